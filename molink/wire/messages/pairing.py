"""Messages between a joining PC and the swarm before it has joined.

They travel in plain text over TCP: nothing here is secret, and nothing is trusted before a person
has compared the code derived from it (``molink.swarm.membership.pairing``). A frame is two bytes of
length and a tagged msgpack map.
"""

from typing import Annotated, Any, Literal

import msgspec

from molink.errors import WireError
from molink.facts.scalars import Count
from molink.wire.messages.base import Message, Port, PublicKey

#: Maximum bytes of a frame without its length.
MAX_FRAME = 1024
#: Bytes of the length prefix.
LENGTH_BYTES = 2

Hash = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
Nonce = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
ShortText = Annotated[str, msgspec.Meta(max_length=64)]

#: The result for a joining PC. ``duplicate``: a PC with its key already runs in the swarm.
#: ``full``: the swarm has its maximum number of PCs. ``busy``: too many PCs are asking.
#: ``version``: the protocols differ.
PairingOutcome = Literal[
    "admitted", "refused", "expired", "busy", "full", "revoked", "duplicate", "version"
]


class Commitment(Message, frozen=True, kw_only=True, tag="commitment"):
    """A PC asks to join under its own key; ``commitment`` binds it to a nonce.

    It signs with ``verify_key``; PCs of older protocols send none.
    """

    public_key: PublicKey
    name: ShortText
    version: ShortText
    commitment: Hash
    protocol: Count = 1
    verify_key: Annotated[str, msgspec.Meta(max_length=40)] = ""


class Challenge(Message, frozen=True, kw_only=True, tag="challenge"):
    """The swarm's id, name and coordinator key, and a nonce."""

    swarm: ShortText
    name: ShortText
    public_key: PublicKey
    nonce: Nonce


class Reveal(Message, frozen=True, kw_only=True, tag="reveal"):
    """The nonce that the PC has committed to."""

    nonce: Nonce


class PairingResult(Message, frozen=True, kw_only=True, tag="pairing-result"):
    """The final message. With ``admitted`` it has the coordinator's address, with ``version`` the
    swarm's molink version.
    """

    outcome: PairingOutcome
    port: Port = 0
    addresses: Annotated[tuple[ShortText, ...], msgspec.Meta(max_length=6)] = ()
    version: ShortText = ""
    protocol: Count = 1


PairingClientMessage = Commitment | Reveal
PairingServerMessage = Challenge | PairingResult


def encode_frame(message: Message) -> bytes:
    """Encode a message with its length prefix."""
    body = msgspec.msgpack.encode(message)
    if len(body) > MAX_FRAME:
        raise WireError(f"a {type(message).__name__} of {len(body)} bytes is over {MAX_FRAME}")
    return len(body).to_bytes(LENGTH_BYTES, "big") + body


def parse_frame_length(prefix: bytes) -> int:
    """Parse the length in a frame's prefix.

    Raises:
        WireError: it is 0 or too large.
    """
    length = int.from_bytes(prefix, "big")
    if not 0 < length <= MAX_FRAME:
        raise WireError(f"a frame of {length} bytes; 1 to {MAX_FRAME} are allowed")
    return length


def decode_frame(body: bytes, types: Any) -> Any:
    """Decode a frame's body as one of ``types``.

    Raises:
        WireError: it is invalid.
    """
    try:
        return msgspec.msgpack.decode(body, type=types)
    except (ValueError, RecursionError) as error:
        raise WireError(f"not a message: {error}") from error
