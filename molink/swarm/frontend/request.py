"""What a client asks the swarm for, and what comes back: token ids, no text."""

from collections.abc import Sequence
from dataclasses import dataclass

from molink.wire.messages.data_plane import SamplingParams
from molink.wire.messages.serving import FinishReason


@dataclass(frozen=True, slots=True)
class Request:
    """Token ids in, token ids out. ``max_tokens`` counts generated tokens.

    ``grammar`` is the text of what the answer is held to (:mod:`molink.text.grammar`), if it is.
    ``client`` is a name for whom it is, which says nothing else; of its requests the one with the
    least ``priority`` goes first. It may wait for ``max_queue_s`` seconds until it is its turn, as
    long as the head lets it if that is 0. Its answer has to end within ``deadline_s`` seconds, when
    the endpoint cuts it off; 0: it may take any time.
    """

    model: str
    prompt: Sequence[int]
    max_tokens: int
    sampling_params: SamplingParams
    stop_token_ids: tuple[int, ...] = ()
    grammar: bytes = b""
    client: str = ""
    priority: int = 0
    max_queue_s: float = 0.0
    deadline_s: float = 0.0


@dataclass(frozen=True, slots=True)
class GeneratedToken:
    """One token of the answer. ``top`` pairs ids with logprobs, most likely first.

    ``finish_reason`` is set on the last one; a stop id is reported as a token with
    ``finish="stop"``. ``cached_tokens`` is the number of prompt tokens found in the prefix cache
    (first token only).
    """

    position: int
    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]
    finish_reason: FinishReason | None
    cached_tokens: int = 0
