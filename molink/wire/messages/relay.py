"""Two PCs that can't reach each other, and a third that passes their bytes on.

The messages are between the coordinator and the three. What the ends and the relay say to each
other is a few bytes of plain TCP: the relay sends a nonce, an end answers with a proof that it has
been told the secret (:func:`compute_proof`), which itself never travels there. What follows is what
two ZeroMQ sockets say to each other, encrypted between them.
"""

import hashlib
import hmac
from typing import Annotated, Literal

import msgspec

from molink.errors import WireError
from molink.facts.scalars import Addresses, Count, Text
from molink.wire.messages.base import Message, Port

Secret = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
#: Who dials the other end, and who waits for that.
Role = Literal["dials", "waits"]

#: Bytes of what the relay says first, and of the answer.
NONCE_BYTES, PROOF_BYTES = 16, 8 + 1 + 32
#: What the relay says to an end that has waited: another has come.
PEER_ARRIVED = b"\x01"
#: Bytes of the port that the dialling end asks the other one for, once they are connected.
PORT_BYTES = 2
_ROLES: dict[Role, bytes] = {"dials": b"d", "waits": b"w"}


class OpenRelay(Message, frozen=True, kw_only=True, tag="open-relay"):
    """Pass bytes on between two ends that know ``secret``, until you are told to stop."""

    id: Count
    secret: Secret


class RelayOpened(Message, frozen=True, kw_only=True, tag="relay-open"):
    """The answer: where the ends are to connect; port 0 if that can't be had."""

    id: Count
    port: Port


class RelayedRoute(Message, frozen=True, kw_only=True, tag="detour"):
    """``peer`` is to be reached by way of a relay; or it is to reach you, if you ``wait``."""

    id: Count
    secret: Secret
    peer: Text
    role: Role
    addresses: Addresses
    port: Port


class CloseRelay(Message, frozen=True, kw_only=True, tag="close-relay"):
    """That relay, or detour, is no more."""

    id: Count


def compute_proof(id: int, role: Role, secret: bytes, nonce: bytes) -> bytes:
    """What an end answers to a relay's nonce."""
    begin = id.to_bytes(8, "big") + _ROLES[role]
    return begin + hmac.new(secret, nonce + begin, hashlib.sha256).digest()


def parse_claim(answer: bytes) -> tuple[int, Role]:
    """Of which relay an answer speaks, and as whom; nothing of it is proved.

    Raises:
        WireError: it is none.
    """
    for role, letter in _ROLES.items():
        if len(answer) == PROOF_BYTES and answer[8:9] == letter:
            return int.from_bytes(answer[:8], "big"), role
    raise WireError("no answer to a relay's nonce")


def is_valid_proof(answer: bytes, id: int, role: Role, secret: bytes, nonce: bytes) -> bool:
    """Whether an answer proves that its sender knows the secret."""
    return hmac.compare_digest(answer, compute_proof(id, role, secret, nonce))
