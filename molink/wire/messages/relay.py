"""Relayed routes: two PCs that can't reach each other, and a third that forwards their bytes.

The messages are between the coordinator and the three. The ends and the relay exchange a few bytes
of plain TCP: the relay sends a nonce, an end answers with a proof that it knows the secret
(:func:`compute_proof`) without revealing it. Then the relay forwards the encrypted connection of
two ZeroMQ sockets.
"""

import hashlib
import hmac
from typing import Annotated, Literal

import msgspec

from molink.errors import WireError
from molink.facts.scalars import Addresses, Count, Text
from molink.wire.messages.base import Message, Port

Secret = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
#: Which end dials the other, and which waits.
Role = Literal["dials", "waits"]

#: Bytes of the relay's nonce, and of the answer.
NONCE_BYTES, PROOF_BYTES = 16, 8 + 1 + 32
#: Sent by the relay to a waiting end when the other has arrived.
PEER_ARRIVED = b"\x01"
#: Bytes of the port that the dialing end requests once connected.
PORT_BYTES = 2
_ROLES: dict[Role, bytes] = {"dials": b"d", "waits": b"w"}


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
    """Reach ``peer`` through a relay, or wait for it there."""

    id: Count
    secret: Secret
    peer: Text
    role: Role
    addresses: Addresses
    port: Port


class CloseRelay(Message, frozen=True, kw_only=True, tag="close-relay"):
    """Close that relay or relayed route."""

    id: Count


def compute_proof(id: int, role: Role, secret: bytes, nonce: bytes) -> bytes:
    """An end's answer to a relay's nonce."""
    begin = id.to_bytes(8, "big") + _ROLES[role]
    return begin + hmac.new(secret, nonce + begin, hashlib.sha256).digest()


def parse_claim(answer: bytes) -> tuple[int, Role]:
    """The relay id and role that an answer claims, unverified.

    Raises:
        WireError: it is invalid.
    """
    for role, letter in _ROLES.items():
        if len(answer) == PROOF_BYTES and answer[8:9] == letter:
            return int.from_bytes(answer[:8], "big"), role
    raise WireError("not an answer to a relay's nonce")


def is_valid_proof(answer: bytes, id: int, role: Role, secret: bytes, nonce: bytes) -> bool:
    """Whether an answer proves knowledge of the secret."""
    return hmac.compare_digest(answer, compute_proof(id, role, secret, nonce))
