"""Relayed routes: two PCs that can't reach each other, and a third that forwards their bytes.

The messages are between the coordinator and the three. The ends and the relay exchange a few bytes
of plain TCP: the relay sends a nonce, an end answers with a proof that it knows the secret
(:func:`compute_proof`) without revealing it. Then the relay forwards the encrypted connection of
two ZeroMQ sockets.

The ends cut that connection into records, each with its length before it, and add signs of life
(:class:`SignOfLife`) with a key that the relay doesn't have, so that a relay can't hold back or cut
a connection unseen.
"""

import hashlib
import hmac
import struct
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
#: Sent by the relay to a waiting end when the other has arrived.
PEER_ARRIVED = b"\x01"
#: Bytes of the port that the dialing end requests once connected, and of the nonce after it, unless
#: it is the port of an echo.
PORT_BYTES, STREAM_NONCE_BYTES = 2, 16
#: The length before a record; 0 before a sign of life.
RECORD_LENGTH = struct.Struct(">I")
_SIGN = struct.Struct(">QQQ?")
_MAC_BYTES = 16
SIGN_BYTES = _SIGN.size + _MAC_BYTES
_LETTERS: dict[Claim, bytes] = {
    "dials": b"d",
    "waits": b"w",
    "registers": b"r",
    "calls": b"c",
}


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


class SignOfLife(NamedTuple):
    """What one end of a relayed connection tells the other, several times a second.

    ``number`` counts them from 1, ``answered`` is the number of the last one received, and ``sent``
    counts the bytes of all records before it. After the last one the end closes the connection.
    """

    number: int
    answered: int
    sent: int
    is_last: bool = False

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
        return cls(*_SIGN.unpack(body))


def _sign_body(body: bytes, role: Role, end_secret: bytes, nonce: bytes) -> bytes:
    person = b"molink-life-" + _LETTERS[role]
    return hashlib.blake2b(
        nonce + body, digest_size=_MAC_BYTES, key=end_secret, person=person
    ).digest()
