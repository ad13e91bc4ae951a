"""Whether a request is taken at all."""

import math

from molink.errors import ContextTooLong, Overloaded, RequestError
from molink.head.limits import HeadLimits
from molink.head.request import HeadRequest

#: Bounds of ``Retry-After``, in seconds.
RETRY_MIN, RETRY_MAX = 1.0, 60.0
#: Weight of the latest interval between two departures.
_SMOOTHING = 0.2


class Admission:
    """Refuses what can never be served, and what can't be queued now."""

    def __init__(self, limits: HeadLimits) -> None:
        self._limits = limits
        self._interval: float | None = None
        self._last: float | None = None

    def check(self, request: HeadRequest) -> None:
        """Pass, or say why it can never be served.

        Raises:
            RequestError: a field is out of range.
            ContextTooLong: it can never fit into the context, or into the KV blocks.
        """
        self._check_fields(request)
        self._check_fits(request)

    def is_full(self, waiting: int, running: int) -> bool:
        """Whether no more can be queued; ``waiting`` and ``running`` count the jobs there are."""
        limits = self._limits
        # Requests that only wait for the next micro-batch do not fill the queue.
        return waiting >= limits.max_waiting + max(0, limits.max_running - running)

    def overloaded(self, waiting: int, running: int) -> Overloaded:
        """The error for a request that finds no place."""
        return Overloaded(
            f"{running} requests are running and {waiting} waiting; try again later",
            self.retry_after,
        )

    def departed(self, now: float) -> None:
        """A request has ended: a place is free."""
        if self._last is not None:
            interval = max(0.0, now - self._last)
            before = interval if self._interval is None else self._interval
            self._interval = before + _SMOOTHING * (interval - before)
        self._last = now

    @property
    def retry_after(self) -> float:
        """Seconds until a place in the queue is likely to be free."""
        wait = RETRY_MIN if self._interval is None else self._interval
        return float(min(RETRY_MAX, max(RETRY_MIN, math.ceil(wait))))

    def _check_fields(self, request: HeadRequest) -> None:
        if not request.tokens:
            raise RequestError("the prompt is empty", "prompt")
        if not 1 <= request.prompt_tokens <= len(request.tokens):
            raise RequestError(
                f"{request.prompt_tokens} prompt tokens in a request of {len(request.tokens)}",
                "prompt",
            )
        if request.max_tokens < 1:
            raise RequestError(f"max_tokens is {request.max_tokens}, not 1 or more", "max_tokens")
        if request.window < 1:
            raise RequestError(f"window is {request.window}, not 1 or more", "window")

    def _check_fits(self, request: HeadRequest) -> None:
        limits, tokens = self._limits, len(request.tokens)
        if tokens + request.max_tokens <= limits.longest:
            return
        if limits.longest < limits.max_context:
            bound = f"the pipeline's KV cache of {limits.blocks * limits.block_size} tokens"
        else:
            bound = f"the context of {limits.max_context}"
        answer = limits.longest - tokens
        if answer > 0:
            advice = f"max_tokens may be up to {answer} with this prompt"
        else:
            advice = "with this prompt nothing can be generated"
        raise ContextTooLong(
            f"{tokens} tokens and up to {request.max_tokens} more exceed {bound}; at most"
            f" {limits.longest} tokens fit, prompt and answer together: {advice}",
            "max_tokens" if answer > 0 else "prompt",
        )
