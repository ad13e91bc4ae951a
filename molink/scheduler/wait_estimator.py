"""How long a request will wait, by what has been served of late and what is before it."""

import math
from collections.abc import Iterable

from molink.scheduler.config import SchedulerConfig
from molink.scheduler.fair_shares import W_INPUT, W_OUTPUT
from molink.scheduler.request_queues import RequestQueues
from molink.scheduler.request_state import RequestState

#: Seconds of serving after which what was measured counts e times less, and before which a rate is
#: not known.
MEMORY_S, LEAST_S = 30.0, 0.5
#: Weight of the latest answer's length.
_SMOOTHING = 0.1


class ServingRate:
    """How many of something per second, while there is something to do."""

    def __init__(self) -> None:
        self._count = self._seconds = 0.0
        #: At the last look: when it was, how many there had been, and whether there was more to do.
        self._at, self._total, self._busy = 0.0, 0, False

    def observe_total(self, total: int, now: float, *, busy: bool) -> None:
        """By now there have been ``total``; ``busy`` is whether there is more to do from now on."""
        if self._busy and now > self._at:
            kept = math.exp((self._at - now) / MEMORY_S)
            self._count *= kept
            self._seconds = self._seconds * kept + MEMORY_S * (1 - kept)
        self._count += total - self._total
        self._at, self._total, self._busy = now, total, busy

    @property
    def rate(self) -> float | None:
        """So many per second, above 0; ``None`` while nothing is known."""
        known = self._seconds >= LEAST_S and self._count > 0
        return self._count / self._seconds if known else None


class WaitEstimator:
    """Foretells waits of one head. An answer is taken to be as long as others were of late.

    What waits takes as long as as many units (:mod:`molink.scheduler.fair_shares`) of late, be they
    of prompts or of answers; and those who come later are not foreseen.
    """

    def __init__(self, config: SchedulerConfig, queues: RequestQueues) -> None:
        self._config = config
        self._queues = queues
        self._unit_rate, self._token_rate = ServingRate(), ServingRate()
        #: Tokens of an answer, on average.
        self._mean_answer: float | None = None

    def observe_served(self, now: float) -> None:
        """Something was served, or begins or ceases to be."""
        shares, busy = self._queues.fair_shares, self._queues.num_running > 0
        self._unit_rate.observe_total(shares.total_units, now, busy=busy)
        self._token_rate.observe_total(shares.generated_tokens, now, busy=busy)

    def on_finished(self, state: RequestState) -> None:
        """An answer has come to its end."""
        before = state.num_generated if self._mean_answer is None else self._mean_answer
        self._mean_answer = before + _SMOOTHING * (state.num_generated - before)

    def estimate_next_slot(self) -> float | None:
        """Seconds until the next request should end, if the rate is known."""
        rate = self._token_rate.rate
        if rate is None:
            return None
        requests = list(self._queues.running_requests)
        return min(map(self._remaining_tokens, requests), default=0.0) * len(requests) / rate

    def estimate_wait(self, state: RequestState) -> float | None:
        """Seconds until a new request should be admitted, if that is known."""
        queues = self._queues
        if not queues.num_waiting and queues.num_running < self._config.max_num_seqs:
            return 0.0
        rate, first = self._unit_rate.rate, self.estimate_next_slot()
        if rate is None or first is None:
            return None
        return (
            first
            + queues.fair_shares.units_before(state, self._backlog_units(queues.waiting_requests))
            / rate
        )

    def _backlog_units(
        self, requests: Iterable[RequestState]
    ) -> Iterable[tuple[RequestState, float]]:
        for state in requests:
            prompt = state.num_uncached if not state.num_admissions else 0
            yield state, W_INPUT * prompt + W_OUTPUT * self._remaining_tokens(state)

    def _remaining_tokens(self, state: RequestState) -> float:
        """Tokens that a request will still get."""
        most = state.request.max_tokens - state.num_generated
        if self._mean_answer is None:
            return most
        # Whoever is beyond the average has as much before it again.
        left = self._mean_answer - state.num_generated
        return min(most, left if left >= 1 else self._mean_answer)
