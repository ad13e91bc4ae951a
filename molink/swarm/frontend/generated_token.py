"""A token of an answer, as the endpoint emits it."""

from dataclasses import dataclass

from molink.wire.messages.serving import FinishReason


@dataclass(frozen=True, slots=True)
class GeneratedToken:
    """One token of an answer. ``top`` pairs ids with logprobs, most likely first.

    ``finish_reason`` is set on the last one; a stop id is reported as a token that stops.
    ``cached_tokens`` of the prompt were in the prefix cache (first token only). For an embedding
    model, ``pooled`` is the last row (f32, little-endian), and the token has no meaning.
    """

    position: int
    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]
    finish_reason: FinishReason | None
    cached_tokens: int = 0
    pooled: bytes = b""
