"""Relayed routes: two PCs that can't reach each other, and a third that forwards their bytes.

The messages are between the coordinator and the three. The ends and the relay exchange a few bytes
of plain TCP: the relay sends a nonce, an end answers with a proof that it knows the secret
(:func:`compute_proof`) without revealing it. Once both are there, the relay tells each from which
address the other has connected (:func:`encode_address`), and forwards the encrypted connection of
two ZeroMQ sockets.

The ends cut that connection into records, each with its length before it, and add signs of life
(:class:`SignOfLife`) with a key that the relay doesn't have, so that a relay can't hold back or cut
a connection unseen. By these they also agree to open a direct connection, and move to it.
"""

import hashlib
import hmac
import ipaddress
import struct
from enum import IntEnum
from typing import Annotated, Literal, NamedTuple

import msgspec

from molink.errors import WireError
from molink.facts.scalars import Addresses, Count, Text
from molink.wire.messages.base import Message, Port

Secret = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
#: Which end dials the other, and which waits.
Role = Literal["dials", "waits"]
#: What an end claims to be: also a peer that can be called at a rendezvous, and one that calls it
#: (:mod:`molink.wire.messages.rendezvous`).
Claim = Role | Literal["registers", "calls"]

#: Relays at once on one PC.
MAX_OF_PEER = 16
#: Bytes of the relay's nonce, and of the answer.
NONCE_BYTES, PROOF_BYTES = 16, 8 + 1 + 32
#: Sent to a waiting end when another has arrived.
PEER_ARRIVED = b"\x01"
#: Bytes of an address. The other end's and the receiver's own follow, as the relay sees them; the
#: end that dials gets all that too.
ADDRESS_BYTES = 16 + 2
#: Bytes of the port that the dialing end requests once connected, and of the nonce after it.
PORT_BYTES, STREAM_NONCE_BYTES = 2, 16
#: The length before a record; 0 before a sign of life.
RECORD_LENGTH = struct.Struct(">I")
_SIGN = struct.Struct(">QQQB")
_MAC_BYTES = 16
SIGN_BYTES = _SIGN.size + _MAC_BYTES
_LETTERS: dict[Claim, bytes] = {
    "dials": b"d",
    "waits": b"w",
    "registers": b"r",
    "calls": b"c",
}
#: Bytes by which an end proves itself on a direct connection, and the dialing end's choice of it.
DIRECT_PROOF_BYTES, CHOSEN = 32, b"\x01"
#: Host and port as an IP address and number.
Address = tuple[str, int]


class OpenRelay(Message, frozen=True, kw_only=True, tag="open-relay"):
    """Forward bytes between two ends that know ``secret``, until told to stop.

    ``ends`` are addresses that the two report; behind a router they may connect from another one.
    """

    id: Count
    secret: Secret
    ends: Annotated[tuple[Text, ...], msgspec.Meta(max_length=16)] = ()


class RelayOpened(Message, frozen=True, kw_only=True, tag="relay-opened"):
    """The port for the ends; 0 on failure."""

    id: Count
    port: Port


class RelayedRoute(Message, frozen=True, kw_only=True, tag="relayed-route"):
    """Reach ``peer`` through a relay, or wait for it there.

    The relay doesn't know ``end_secret``. Without ``addresses`` the relay is this PC's rendezvous,
    for which ``secret`` follows from its own and the ``id``.
    """

    id: Count
    secret: Secret
    end_secret: Secret
    peer: Text
    role: Role
    addresses: Addresses
    port: Port


class CloseRelay(Message, frozen=True, kw_only=True, tag="close-relay"):
    """Close that relay or relayed route."""

    id: Count


def compute_proof(id: int, claim: Claim, secret: bytes, nonce: bytes) -> bytes:
    """An end's answer to a relay's nonce."""
    begin = id.to_bytes(8, "big") + _LETTERS[claim]
    return begin + hmac.new(secret, nonce + begin, hashlib.sha256).digest()


def parse_claim(answer: bytes) -> tuple[int, Claim]:
    """The relay id and the claim of an answer, unverified.

    Raises:
        WireError: it is invalid.
    """
    for claim, letter in _LETTERS.items():
        if len(answer) == PROOF_BYTES and answer[8:9] == letter:
            return int.from_bytes(answer[:8], "big"), claim
    raise WireError("not an answer to a relay's nonce")


def is_valid_proof(answer: bytes, id: int, claim: Claim, secret: bytes, nonce: bytes) -> bool:
    """Whether an answer proves knowledge of the secret."""
    return hmac.compare_digest(answer, compute_proof(id, claim, secret, nonce))


def encode_address(address: Address | None) -> bytes:
    """An IPv4 or IPv6 address and a port; zeros for none."""
    host, port = ("::", 0) if address is None else address
    ip = ipaddress.ip_address(host.partition("%")[0])
    if ip.version == 4:
        ip = ipaddress.IPv6Address(f"::ffff:{ip}")
    return ip.packed + port.to_bytes(2, "big")


def decode_address(data: bytes) -> Address | None:
    """The address in ``ADDRESS_BYTES``, as the relay claims it; ``None`` without one."""
    ip, port = ipaddress.IPv6Address(data[:16]), int.from_bytes(data[16:], "big")
    return (str(ip.ipv4_mapped or ip), port) if port else None


def compute_direct_proof(role: Role, end_secret: bytes, nonce: bytes) -> bytes:
    """What an end sends first on a direct connection that replaces the relayed one of ``nonce``."""
    person = b"molink-direct-" + _LETTERS[role]
    return hashlib.blake2b(
        nonce, digest_size=DIRECT_PROOF_BYTES, key=end_secret, person=person
    ).digest()


class SignKind(IntEnum):
    """What a sign of life says besides that its sender lives."""

    ALIVE = 0
    #: Nothing follows: the sender closes the connection.
    LAST = 1
    #: The dialing end asks for a direct connection; the other agrees; both start.
    ASK_DIRECT = 2
    AGREE_DIRECT = 3
    START_DIRECT = 4
    #: All that follows comes over the direct connection.
    MOVED = 5


class SignOfLife(NamedTuple):
    """What one end of a relayed connection tells the other, several times a second.

    ``number`` counts them from 1, ``answered`` is the number of the last one received, and ``sent``
    counts the bytes of all records before it.
    """

    number: int
    answered: int
    sent: int
    kind: SignKind = SignKind.ALIVE

    def encode(self, role: Role, end_secret: bytes, nonce: bytes) -> bytes:
        """The bytes after a length of 0; ``role`` is the sender's."""
        body = _SIGN.pack(*self)
        return body + _sign_body(body, role, end_secret, nonce)

    @classmethod
    def decode(cls, data: bytes, role: Role, end_secret: bytes, nonce: bytes) -> "SignOfLife":
        """What an end with that role has sent.

        Raises:
            WireError: it is forged, or of another connection.
        """
        body, mac = data[: _SIGN.size], data[_SIGN.size :]
        if not hmac.compare_digest(mac, _sign_body(body, role, end_secret, nonce)):
            raise WireError("a forged sign of life")
        number, answered, sent, kind = _SIGN.unpack(body)
        try:
            return cls(number, answered, sent, SignKind(kind))
        except ValueError:
            raise WireError(f"a sign of life of unknown kind {kind}") from None


def _sign_body(body: bytes, role: Role, end_secret: bytes, nonce: bytes) -> bytes:
    person = b"molink-life-" + _LETTERS[role]
    return hashlib.blake2b(
        nonce + body, digest_size=_MAC_BYTES, key=end_secret, person=person
    ).digest()
