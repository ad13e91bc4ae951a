"""Whether a request is taken at all, and in whose place."""

import math
from collections import Counter
from collections.abc import Iterable

from molink.errors import ContextTooLong, Overloaded, RequestError
from molink.scheduler.job import Job
from molink.scheduler.limits import HeadLimits
from molink.scheduler.request import HeadRequest

#: Bounds of ``Retry-After``, in seconds.
RETRY_MIN, RETRY_MAX = 1.0, 60.0


class Admission:
    """Refuses what can never be served, and what can't be queued now."""

    def __init__(self, limits: HeadLimits) -> None:
        self._limits = limits

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

    @staticmethod
    def displaced_by(request: HeadRequest, waiting: Iterable[Job], now: float) -> Job | None:
        """Which of those that wait gives his place in the full queue to a new one, if any.

        One that its client has abandoned; else, if another owner holds at least two places more
        than the new one's, one of his client with most; else of a client of the same owner with at
        least two more than the new one's. That is one that waits for its client, or its last. So
        the owners who want in come to have equal shares, as do the clients of each, and one who is
        alone has them all.
        """
        jobs, owner = list(waiting), request.owner
        abandoned = next((job for job in jobs if job.abandoned(now)), None)
        if abandoned is not None:
            return abandoned
        held = Counter(job.request.owner for job in jobs)
        greedy = max(held, key=held.__getitem__, default=owner)
        theirs = owner if held[greedy] < held[owner] + 2 else greedy
        clients = Counter(job.request.client for job in jobs if job.request.owner == theirs)
        most = max(clients, key=clients.__getitem__, default=request.client)
        if theirs == owner and clients[most] < clients[request.client] + 2:
            return None
        jobs = [job for job in reversed(jobs) if job.request.whose == (theirs, most)]
        stalled = next((job for job in jobs if job.stalled), None)
        return stalled or max(jobs, key=lambda job: job.turn)

    def overloaded(self, waiting: int, running: int, place_in: float | None) -> Overloaded:
        """The error for a request that finds no place; there should be one in so many seconds."""
        return Overloaded(
            f"{running} requests are running and {waiting} waiting; try again later",
            _retry_after(place_in),
        )

    def max_queue_s(self, request: HeadRequest) -> float:
        """Seconds that a request may wait to be admitted."""
        return request.max_queue_s or self._limits.max_queue_s or math.inf

    def is_bounded(self, request: HeadRequest) -> bool:
        """Whether it can come to be late."""
        return bool(request.deadline_s) or self.max_queue_s(request) < math.inf

    def check_wait(self, job: Job, wait: float | None) -> None:
        """Pass a new request that will be admitted in ``wait`` seconds, as far as that is known.

        Raises:
            Overloaded: that is more than it may wait, or no token of it could come in time.
            RequestError: its prompt alone takes longer than it has.
        """
        most = self.max_queue_s(job.request)
        if wait is not None and wait > most:
            raise Overloaded(
                f"its turn would come in about {wait:.0f} s; it may wait for {most:g} s"
                " (`max_queue_time`)",
                _retry_after(wait - most),
            )
        self._check_deadline(job, wait)

    def is_late(self, job: Job, now: float) -> bool:
        """Whether a waiting job must not be admitted any more; one that gave way always may."""
        if job.admissions:
            return False
        hopeless = job.request.deadline_s > 0 and not job.resumed and now >= job.start_by
        return hopeless or now - job.since >= self.max_queue_s(job.request)

    def waited_in_vain(self, job: Job, wait: float | None, now: float) -> Overloaded:
        """The error for a job that is late; a new one would wait for ``wait``."""
        request = job.request
        most = self.max_queue_s(request)
        if now - job.since < most:
            return Overloaded(
                f"its turn has not come in time for an answer within {request.deadline_s:.1f} s"
                " (`timeout`)",
                _retry_after(None if wait is None else wait - (job.start_by - job.since)),
            )
        return Overloaded(
            f"its turn has not come within {most:g} s (`max_queue_time`)",
            _retry_after(None if wait is None else wait - most),
        )

    def _check_deadline(self, job: Job, wait: float | None) -> None:
        """Whose answer has begun passes: there is something to be had of it whenever it ends."""
        most = job.request.deadline_s
        if not most or job.resumed:
            return
        spare = job.start_by - job.since
        if spare < 0:
            raise RequestError(
                f"the prompt alone takes {most - spare:.1f} s or more here; its answer has to end"
                f" within {most:.1f} s (`timeout`)",
                "timeout",
            )
        if wait is not None and wait > spare:
            raise Overloaded(
                f"its first token would come in about {wait + most - spare:.0f} s; its answer has"
                f" to end within {most:.1f} s (`timeout`)",
                _retry_after(wait - spare),
            )

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


def _retry_after(seconds: float | None) -> float:
    """In whole seconds, within bounds; as soon as may be where nothing is known."""
    return float(min(RETRY_MAX, max(RETRY_MIN, math.ceil(seconds or 0.0))))
