"""What a stranger and a swarm say to each other before the stranger is a member.

Plain text over TCP, apart from all other messages: nothing here is secret, and nothing of it is
believed before a person has compared the code that follows from it
(``molink.swarm.membership.pairing``). A frame is two bytes of length and a tagged msgpack map.
"""

from typing import Annotated, Any, Literal

import msgspec

from molink.errors import WireError
from molink.facts.scalars import Count
from molink.wire.messages.base import Message, Port, PublicKey

#: Bytes of a frame, without its length.
MAX_FRAME = 1024
#: Bytes of the length before a frame.
LENGTH_BYTES = 2

Hash = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
Nonce = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
ShortText = Annotated[str, msgspec.Meta(max_length=64)]

#: What becomes of a stranger. ``twin``: a PC with its key is in the swarm, and runs.
#: ``full``: the swarm has as many PCs as it may. ``busy``: too many ask at this moment.
#: ``version``: it speaks another protocol.
PairingOutcome = Literal[
    "admitted", "refused", "expired", "busy", "full", "revoked", "twin", "version"
]


class Commitment(Message, frozen=True, kw_only=True, tag="commitment"):
    """A PC asks to be let in under its own key; ``commitment`` binds it to a nonce."""

    public_key: PublicKey
    name: ShortText
    version: ShortText
    commitment: Hash
    protocol: Count = 1


class Challenge(Message, frozen=True, kw_only=True, tag="challenge"):
    """The swarm's answer: its id, its name, the coordinator's key, and a nonce of its own."""

    swarm: ShortText
    name: ShortText
    public_key: PublicKey
    nonce: Nonce


class Reveal(Message, frozen=True, kw_only=True, tag="reveal"):
    """The nonce that the PC has committed to."""

    nonce: Nonce


class PairingResult(Message, frozen=True, kw_only=True, tag="verdict"):
    """The last word. With ``admitted`` comes where the coordinator listens.

    With ``version`` comes which molink the swarm runs.
    """

    outcome: PairingOutcome
    port: Port = 0
    addresses: Annotated[tuple[ShortText, ...], msgspec.Meta(max_length=6)] = ()
    version: ShortText = ""
    protocol: Count = 1


PairingClientMessage = Commitment | Reveal
PairingServerMessage = Challenge | PairingResult


def encode_frame(message: Message) -> bytes:
    """A message with its length before it."""
    body = msgspec.msgpack.encode(message)
    if len(body) > MAX_FRAME:
        raise WireError(f"a {type(message).__name__} of {len(body)} bytes is over {MAX_FRAME}")
    return len(body).to_bytes(LENGTH_BYTES, "big") + body


def parse_frame_length(head: bytes) -> int:
    """The length that the first bytes of a frame announce.

    Raises:
        WireError: it is over its bound, or nothing.
    """
    length = int.from_bytes(head, "big")
    if not 0 < length <= MAX_FRAME:
        raise WireError(f"a frame of {length} bytes, where 1 to {MAX_FRAME} are allowed")
    return length


def decode_frame(body: bytes, types: Any) -> Any:
    """The message in a frame's body, which is one of ``types``.

    Raises:
        WireError: it isn't.
    """
    try:
        return msgspec.msgpack.decode(body, type=types)
    except (ValueError, RecursionError) as error:
        raise WireError(f"not a message: {error}") from error
