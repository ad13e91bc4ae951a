"""Relayed routes: two PCs that can't reach each other, and a third that forwards their bytes.

The coordinator exchanges the messages with the three PCs. The ends and the relay exchange a few
bytes over plain TCP: the relay sends a nonce, and an end answers with a proof that it knows the
secret (:func:`compute_proof`), without revealing it. Once both ends have connected, the relay tells
each the other's address as it sees it (:func:`encode_address`), and forwards the encrypted
connection between two ZeroMQ sockets.

The ends split that connection into records, each preceded by its length, and add signs of life
(:class:`SignOfLife`). The relay doesn't have their key, so it can't hold back or cut a connection
unnoticed. With signs of life, the ends also agree to open a direct connection and move to it.
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
#: What an end claims to be. At a rendezvous, it may also be a peer that others can call, or a peer
#: that calls one (:mod:`molink.wire.messages.rendezvous`).
Claim = Role | Literal["registers", "calls"]

#: Maximum number of simultaneous relays on one PC.
MAX_OF_PEER = 16
#: Bytes of the relay's nonce, and of an end's proof.
NONCE_BYTES, PROOF_BYTES = 16, 8 + 1 + 32
#: The relay sends this to a waiting end once the other end has connected.
PEER_ARRIVED = b"\x01"
#: Bytes of an address. The addresses of the other end and of the receiver follow, as the relay sees
#: them. The end that dials gets the same.
ADDRESS_BYTES = 16 + 2
#: Bytes of the port that the dialing end requests once connected, and of the nonce that follows.
PORT_BYTES, STREAM_NONCE_BYTES = 2, 16
#: Format of the length before a record; 0 precedes a sign of life.
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
#: Bytes of an end's proof on a direct connection, and the byte by which the dialing end chooses the
#: connection.
DIRECT_PROOF_BYTES, CHOSEN = 32, b"\x01"
#: IP address and port.
Address = tuple[str, int]


class OpenRelay(Message, frozen=True, kw_only=True, tag="open-relay"):
    """Forward bytes between two ends that know ``secret``, until :class:`CloseRelay`.

    ``ends`` has the addresses that the two report; behind a router, they may connect from others.
    If the receiver ``is_end`` itself, connections outlive the relay: the way needs no third PC.
    """

    id: Count
    secret: Secret
    ends: Annotated[tuple[Text, ...], msgspec.Meta(max_length=16)] = ()
    is_end: bool = False


class RelayOpened(Message, frozen=True, kw_only=True, tag="relay-opened"):
    """The relay's port for the ends; 0 on failure."""

    id: Count
    port: Port


class RelayedRoute(Message, frozen=True, kw_only=True, tag="relayed-route"):
    """Connect to ``peer`` through a relay, or wait for it there.

    The relay doesn't know ``end_secret``. Without ``addresses``, the relay is this PC's rendezvous;
    instead of ``secret``, the ends then use
    :func:`~molink.wire.messages.rendezvous.derive_session_secret`.

    A route with ``beside`` is tried beside the one of that id: the dialling end reports its latency
    (:class:`~molink.wire.messages.peer_reports.ReachReport`), and whichever of the two is closed
    then leaves its connections to the other. With ``is_direct``, the relay is one of the ends.
    """

    id: Count
    secret: Secret
    end_secret: Secret
    peer: Text
    role: Role
    addresses: Addresses
    port: Port
    beside: Count = 0
    is_direct: bool = False


class CloseRelay(Message, frozen=True, kw_only=True, tag="close-relay"):
    """Close the relay or relayed route ``id``.

    Connections move to the route that was tried beside it, if there is one.
    """

    id: Count


def compute_proof(id: int, claim: Claim, secret: bytes, nonce: bytes) -> bytes:
    """Return an end's answer to a relay's nonce."""
    begin = id.to_bytes(8, "big") + _LETTERS[claim]
    return begin + hmac.new(secret, nonce + begin, hashlib.sha256).digest()


def parse_claim(answer: bytes) -> tuple[int, Claim]:
    """Return the relay id and the claim of an answer, unverified.

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
    """Encode an IPv4 or IPv6 address and a port; zeros if there is none."""
    host, port = ("::", 0) if address is None else address
    ip = ipaddress.ip_address(host.partition("%")[0])
    if ip.version == 4:
        ip = ipaddress.IPv6Address(f"::ffff:{ip}")
    return ip.packed + port.to_bytes(2, "big")


def decode_address(data: bytes) -> Address | None:
    """Decode an address that the relay claims; ``None`` if there is none."""
    ip, port = ipaddress.IPv6Address(data[:16]), int.from_bytes(data[16:], "big")
    return (str(ip.ipv4_mapped or ip), port) if port else None


def compute_direct_proof(role: Role, end_secret: bytes, nonce: bytes) -> bytes:
    """Return an end's proof, which it sends first on a direct connection.

    ``nonce`` identifies the relayed connection that the direct one replaces.
    """
    person = b"molink-direct-" + _LETTERS[role]
    return hashlib.blake2b(
        nonce, digest_size=DIRECT_PROOF_BYTES, key=end_secret, person=person
    ).digest()


class SignKind(IntEnum):
    """What a sign of life means in addition to the fact that its sender lives."""

    ALIVE = 0
    #: The last sign: the sender closes the connection.
    LAST = 1
    #: The dialing end asks for a direct connection, the other end agrees, and both start to
    #: connect.
    ASK_DIRECT = 2
    AGREE_DIRECT = 3
    START_DIRECT = 4
    #: All following bytes are sent over the connection that the two have opened meanwhile.
    MOVED = 5
    #: The sender measures the round trip: a sign of life is due at once.
    ASK_SIGN = 6


class SignOfLife(NamedTuple):
    """A message that each end of a relayed connection sends to the other several times a second.

    ``number`` counts signs from 1, ``answered`` is the number of the last one received, and
    ``sent`` counts the bytes of all earlier records.
    """

    number: int
    answered: int
    sent: int
    kind: SignKind = SignKind.ALIVE

    def encode(self, role: Role, end_secret: bytes, nonce: bytes) -> bytes:
        """Return the bytes that follow a length of 0; ``role`` is the sender's."""
        body = _SIGN.pack(*self)
        return body + _sign_body(body, role, end_secret, nonce)

    @classmethod
    def decode(cls, data: bytes, role: Role, end_secret: bytes, nonce: bytes) -> "SignOfLife":
        """Decode a sign of life from an end with ``role``.

        Raises:
            WireError: it is forged or belongs to another connection.
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
