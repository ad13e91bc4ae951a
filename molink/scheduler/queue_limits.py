"""Limits of the queue: decides which requests may queue, and estimates how long they wait."""

import math
from collections import Counter
from collections.abc import Iterable

from molink.errors import ContextTooLong, Overloaded, RequestError
from molink.scheduler.config import SchedulerConfig
from molink.scheduler.fair_shares import W_INPUT, W_OUTPUT
from molink.scheduler.request_queues import PREEMPT_AFTER_S, RequestQueues
from molink.scheduler.request_state import MIN_TIMEOUT_S, RequestState
from molink.util.ewma import Ewma

#: Bounds of ``Retry-After``, in seconds.
RETRY_MIN, RETRY_MAX = 1.0, 60.0


class QueueLimits:
    """Rejects requests that can never run, and requests for which the queue has no room."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config

    def check_request(self, state: RequestState) -> None:
        """Check a request before it is queued.

        Raises:
            RequestError: a field is out of range.
            ContextTooLong: the request exceeds the context length or the KV cache.
        """
        self._check_fields(state)
        self._check_fits(state)

    def is_full(self, waiting: int, running: int) -> bool:
        """Whether the queue is full, given the numbers of waiting and running requests."""
        config = self._config
        # Requests that wait only for the next micro-batch do not count towards the queue.
        return waiting >= config.max_queue_len + max(0, config.max_num_seqs - running)

    @staticmethod
    def choose_displaced(
        new: RequestState, waiting: Iterable[RequestState], now: float
    ) -> RequestState | None:
        """Choose the waiting request that a new one replaces in a full queue, if any.

        Candidates are, in this order: a request whose client has abandoned it; a request of the
        peer with the most queue slots, if it holds at least two more than the new request's peer; a
        request of the same peer's client that holds at least two more than the new request's
        client. Of the chosen client's requests, the last in queue order is replaced; preempted
        requests, whose answers have begun, come first in that order. Peers, and the clients of each
        peer, thus converge to equal shares of the queue.
        """
        requests, peer = list(waiting), new.peer
        abandoned = next((state for state in requests if state.is_abandoned(now)), None)
        if abandoned is not None:
            return abandoned
        held = Counter(state.peer for state in requests)
        greedy = max(held, key=held.__getitem__, default=peer)
        chosen = peer if held[greedy] < held[peer] + 2 else greedy
        clients = Counter(state.request.client for state in requests if state.peer == chosen)
        most = max(clients, key=clients.__getitem__, default=new.request.client)
        if chosen == peer and clients[most] < clients[new.request.client] + 2:
            return None
        requests = [state for state in reversed(requests) if state.client_key == (chosen, most)]
        return max(requests, key=lambda state: state.queue_key)

    def overloaded_error(self, waiting: int, running: int, wait: float | None) -> Overloaded:
        """Create the error for a full queue; ``wait`` is an estimate in seconds."""
        return Overloaded(
            f"{running} requests are running and {waiting} waiting; try again later",
            _retry_after(wait),
        )

    def max_queue_s(self, state: RequestState) -> float:
        """Seconds that a request may wait for admission."""
        usual = self._config.max_queue_s
        usual = usual and max(MIN_TIMEOUT_S, usual - state.encoded_s)
        return state.max_queue_s or usual or math.inf

    def has_wait_bound(self, state: RequestState) -> bool:
        """Whether the request can expire while waiting."""
        return bool(state.deadline_s) or self.max_queue_s(state) < math.inf

    def check_wait(self, state: RequestState, wait: float | None) -> None:
        """Check a new request against its estimated wait in seconds; ``None`` means unknown.

        Raises:
            Overloaded: the wait exceeds the request's limit, or its first token would miss the
                deadline.
            RequestError: the prefill alone exceeds the deadline.
        """
        most = self.max_queue_s(state)
        if wait is not None and wait > most:
            raise Overloaded(
                f"the request would wait about {wait:.0f} s; its limit is {most:g} s"
                " (`max_queue_time`)",
                _retry_after(wait - most),
            )
        self._check_deadline(state, wait)

    def is_late(self, state: RequestState, now: float) -> bool:
        """Whether a waiting request has expired. Preempted requests never expire."""
        if state.num_admissions:
            return False
        hopeless = state.deadline_s > 0 and not state.is_resubmitted and now >= state.start_by
        return hopeless or now - state.arrived_at >= self.max_queue_s(state)

    def late_error(self, state: RequestState, wait: float | None, now: float) -> Overloaded:
        """Create the error for an expired request; a new one would wait ``wait`` seconds."""
        most = self.max_queue_s(state)
        if now - state.arrived_at < most:
            return Overloaded(
                f"the request was not started in time to finish within {state.deadline_s:.1f} s"
                " (`timeout`)",
                _retry_after(None if wait is None else wait - (state.start_by - state.arrived_at)),
            )
        return Overloaded(
            f"the request was not started within {most:g} s (`max_queue_time`)",
            _retry_after(None if wait is None else wait - most),
        )

    def _check_deadline(self, state: RequestState, wait: float | None) -> None:
        """Check that the deadline can be met; resubmitted requests have begun and pass."""
        most = state.deadline_s
        if not most or state.is_resubmitted:
            return
        spare = state.start_by - state.arrived_at
        if spare < 0:
            raise RequestError(
                f"the prompt alone takes {most - spare:.1f} s or more; the answer must finish"
                f" within {most:.1f} s (`timeout`)",
                "timeout",
            )
        if wait is not None and wait > spare:
            raise Overloaded(
                f"the first token would take about {wait + most - spare:.0f} s; the answer must"
                f" finish within {most:.1f} s (`timeout`)",
                _retry_after(wait - spare),
            )

    def _check_fields(self, state: RequestState) -> None:
        if not state.num_prompt_tokens:
            raise RequestError("the prompt is empty", "prompt")
        if state.max_remaining < 1:
            raise RequestError(
                f"max_tokens is {state.request.max_tokens}, not more than the"
                f" {state.num_output_tokens} tokens generated so far",
                "max_tokens",
            )
        if state.credit_window < 1:
            raise RequestError(f"window is {state.credit_window}, not 1 or more", "window")

    def _check_fits(self, state: RequestState) -> None:
        config, tokens = self._config, len(state.tokens)
        if tokens + state.max_remaining <= config.max_request_tokens:
            return
        if config.max_request_tokens < config.max_model_len:
            bound = f"the pipeline's KV cache of {config.num_blocks * config.block_size} tokens"
        else:
            bound = f"the context of {config.max_model_len}"
        answer = config.max_request_tokens - tokens
        if answer > 0:
            advice = f"max_tokens may be up to {answer} with this prompt"
        else:
            advice = "with this prompt nothing can be generated"
        raise ContextTooLong(
            f"{tokens} tokens and up to {state.max_remaining} more exceed {bound}; at most"
            f" {config.max_request_tokens} tokens fit, prompt and answer together: {advice}",
            "max_tokens" if answer > 0 else "prompt",
        )


def _retry_after(seconds: float | None) -> float:
    """Round to whole seconds within bounds; the minimum if the wait is unknown."""
    return float(min(RETRY_MAX, max(RETRY_MIN, math.ceil(seconds or 0.0))))


#: Time constant in seconds of the rate's exponential decay, and seconds before a rate is known.
MEMORY_S, LEAST_S = 30.0, 0.5
#: Weight of the latest answer's length.
_SMOOTHING = 0.1


class ServingRate:
    """A rate per second, measured only while there is work."""

    def __init__(self) -> None:
        self._count = self._seconds = 0.0
        #: Time, total and busy state at the last observation.
        self._at, self._total, self._busy = 0.0, 0, False

    def observe_total(self, total: int, now: float, *, busy: bool) -> None:
        """Record the ``total`` of events; ``busy`` says whether work remains."""
        if self._busy and now > self._at:
            kept = math.exp((self._at - now) / MEMORY_S)
            self._count *= kept
            self._seconds = self._seconds * kept + MEMORY_S * (1 - kept)
        self._count += total - self._total
        self._at, self._total, self._busy = now, total, busy

    @property
    def rate(self) -> float | None:
        """Events per second, above 0; ``None`` while unknown."""
        known = self._seconds >= LEAST_S and self._count > 0
        return self._count / self._seconds if known else None


class WaitEstimator:
    """Estimates how long requests wait for admission.

    It assumes that answers are as long as recent ones, that waiting work is served at the recent
    rate in units of :mod:`molink.scheduler.fair_shares`, and that no further requests arrive.
    """

    def __init__(self, config: SchedulerConfig, queues: RequestQueues) -> None:
        self._config = config
        self._queues = queues
        self._unit_rate, self._token_rate = ServingRate(), ServingRate()
        #: Mean tokens of an answer.
        self._answer_length = Ewma(_SMOOTHING)

    def observe_served(self, now: float) -> None:
        """Sample the service rates; called after every change of the queues."""
        shares, busy = self._queues.fair_shares, self._queues.num_running > 0
        self._unit_rate.observe_total(shares.total_units, now, busy=busy)
        self._token_rate.observe_total(shares.generated_tokens, now, busy=busy)

    def on_finished(self, state: RequestState) -> None:
        """Learn from the length of a finished answer."""
        self._answer_length.add_sample(state.num_generated)

    def estimate_next_slot(self) -> float | None:
        """Estimate the seconds until a running request finishes, if the rate is known."""
        rate = self._token_rate.rate
        if rate is None:
            return None
        requests = list(self._queues.running_requests)
        return min(map(self._remaining_tokens, requests), default=0.0) * len(requests) / rate

    def estimate_wait(self, state: RequestState) -> float | None:
        """Estimate the seconds until a new request is admitted, if known."""
        queues = self._queues
        if not queues.num_waiting and queues.num_running < self._config.max_num_seqs:
            return 0.0
        rate, first = self._unit_rate.rate, self.estimate_next_slot()
        if rate is None or first is None:
            return None
        if queues.is_owed_slot(state):
            first = min(first, PREEMPT_AFTER_S)
        backlog = self._backlog_units(queues.waiting_requests)
        return first + queues.fair_shares.units_before(state, backlog) / rate

    def _backlog_units(
        self, requests: Iterable[RequestState]
    ) -> Iterable[tuple[RequestState, float]]:
        for state in requests:
            prompt = state.num_uncached if not state.num_admissions else 0
            yield state, W_INPUT * prompt + W_OUTPUT * self._remaining_tokens(state)

    def _remaining_tokens(self, state: RequestState) -> float:
        """Return the expected number of tokens that a request still generates."""
        mean = self._answer_length.value
        if mean is None:
            return state.max_remaining
        # A request beyond the mean length is expected to generate the mean number of further
        # tokens.
        left = mean - state.num_generated
        return min(state.max_remaining, left if left >= 1 else mean)
