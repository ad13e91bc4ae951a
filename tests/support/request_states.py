"""Creates scheduler states of requests."""

from collections.abc import Sequence

from molink.scheduler.request_state import RequestState
from molink.wire.messages.data_plane import SamplingParams
from molink.wire.messages.serving import Request


def make_state(
    peer: str,
    key: str,
    tokens: Sequence[int],
    prompt_tokens: int,
    max_tokens: int,
    sampling_params: SamplingParams,
    stop_token_ids: tuple[int, ...] = (),
    credit_window: int = 256,
    grammar: bytes = b"",
    client: str = "",
    priority: int = 0,
    max_queue_s: float = 0.0,
    deadline_s: float = 0.0,
    cache_salt: bytes = b"",
    adapter: str = "",
) -> RequestState:
    """A submission: a prompt of ``prompt_tokens``, and tokens generated in earlier epochs.

    ``max_tokens`` more may be generated.
    """
    request = Request(
        "m",
        tuple(tokens[:prompt_tokens]),
        max_tokens + len(tokens) - prompt_tokens,
        sampling_params,
        stop_token_ids,
        grammar,
        client,
        priority,
        max_queue_s,
        deadline_s,
        cache_salt,
        adapter,
    )
    return RequestState.from_request(
        request, peer, key, tokens[prompt_tokens:], credit_window=credit_window
    )


def arrived(state: RequestState, now: float = 0.0) -> RequestState:
    """A submission that arrived at ``now``."""
    state.set_arrival(now)
    return state
