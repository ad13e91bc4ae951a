"""Multi-level feedback queues: FastServe's skip-join MLFQ and its baselines (§4.1)."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from molink.facts.ring_times import RingTimes
from molink.scheduler.policies.ranked import Rank, RankedPolicy
from molink.scheduler.request_state import RequestState

#: Each queue has twice the quantum of the previous one; the last is unlimited.
LEVELS = 16
#: Minimum seconds of waiting before a promotion (the paper's alpha).
ALPHA = 0.3
#: Minimum wait before a promotion, in quanta of the request's queue.
PROMOTION_QUANTA = 16
#: Minimum ratio of a request's quantum to its restore cost for a preemption.
MIN_QUANTUM_RATIO = 8
#: Assumed seconds of an iteration before profiles or measurements exist.
DEFAULT_ITERATION_S = 0.05


@dataclass(slots=True)
class QueuePosition:
    """A request's position in the queues."""

    arrival_number: int
    level: int
    #: When it joined the level.
    since: float
    #: The level whose quantum it consumes, which differs from its level while promoted.
    home_level: int
    #: Time since which it has had no rows in flight; ``None`` while it has some.
    idle_since: float | None
    #: Seconds with rows in flight at its level, and the time up to which they are counted.
    spent_s: float = 0.0
    counted_until: float = 0.0


class Mlfq(RankedPolicy):
    """Prioritizes requests that have run for a shorter time.

    A request joins the first queue. After that queue's quantum, counted while any of its rows are
    in flight, it is demoted to the end of the next queue. The first quantum is the ring's shortest
    iteration; each further quantum is doubled. Requests in flight keep their place.

    *Promotion.* A request that waits for ``alpha`` seconds, and for :data:`PROMOTION_QUANTA` quanta
    of its queue, moves to the end of the first queue and consumes its own queue's quantum there.
    The paper promotes a request after ``alpha``, for one quantum of the first queue. Under load
    that promotes all requests, so that none has priority, and may recompute a preempted request for
    a single token. Here the wait is bounded by a multiple of the time that the request has run,
    plus the time of requests promoted before it, each of which stays for at most its quantum and an
    iteration.
    """

    def __init__(self, alpha: float = ALPHA) -> None:
        super().__init__()
        self._alpha = alpha
        self._positions: dict[RequestState, QueuePosition] = {}
        self._num_arrivals = 0
        #: The first queue's quantum, in seconds.
        self._shortest_s = DEFAULT_ITERATION_S
        #: The shortest iteration measured.
        self._shortest_observed_s: float | None = None

    def initial_level(self, state: RequestState) -> int:
        """Return the queue of a new request."""
        return 0

    def demoted_level(self, state: RequestState, level: int) -> int:
        """Return the queue to which a request is demoted."""
        return level + 1

    def quantum_s(self, level: int) -> float:
        """Return the seconds that a request may run in a queue."""
        return float(self._shortest_s * (1 << level))

    def level_for(self, seconds: float) -> int:
        """Return the first queue with a quantum of at least ``seconds``."""
        levels = range(LEVELS - 1)
        return next((level for level in levels if self.quantum_s(level) >= seconds), LEVELS - 1)

    def _promoted_at(self, entry: QueuePosition) -> float | None:
        """Return when a request is promoted if it stays idle; ``None`` while it runs."""
        if entry.idle_since is None:
            return None
        return entry.idle_since + max(
            self._alpha, PROMOTION_QUANTA * self.quantum_s(entry.home_level)
        )

    def set_times(self, times: RingTimes) -> None:
        """Update the quanta by the shortest iteration."""
        super().set_times(times)
        predicted = times.round_trip_s(1)
        if predicted > 0:
            self._shortest_s = predicted

    def on_arrived(self, state: RequestState, now: float) -> None:
        """Join a queue."""
        level = min(self.initial_level(state), LEVELS - 1)
        self._positions[state] = QueuePosition(self._num_arrivals, level, now, level, now)
        self._num_arrivals += 1

    def on_issued(self, state: RequestState, now: float) -> None:
        """Start running, promoted if it has waited too long."""
        entry = self._positions[state]
        promoted_at = self._promoted_at(entry)
        if promoted_at is None:
            return
        if entry.level > 0 and now >= promoted_at:
            entry.level, entry.since, entry.spent_s = 0, promoted_at, 0.0
        entry.idle_since, entry.counted_until = None, now

    def on_rows_returned(self, state: RequestState, seconds: float, now: float) -> None:
        """Consume the quantum, and demote the request when it is used up."""
        self._observe_iteration(seconds)
        entry = self._positions[state]
        entry.spent_s += now - entry.counted_until
        entry.counted_until = now
        if not state.awaited_seqs:
            entry.idle_since = now
        if entry.spent_s >= self.quantum_s(entry.home_level):
            entry.level = entry.home_level = min(
                self.demoted_level(state, entry.home_level), LEVELS - 1
            )
            entry.since, entry.spent_s = now, 0.0

    def _observe_iteration(self, seconds: float) -> None:
        """Without profiles, use the shortest measured iteration."""
        if self.ring_times.round_trip_s(1) <= 0:
            self._shortest_observed_s = (
                seconds
                if self._shortest_observed_s is None
                else min(seconds, self._shortest_observed_s)
            )
            self._shortest_s = self._shortest_observed_s

    def on_removed(self, state: RequestState, now: float) -> None:
        del self._positions[state]

    def queue_lengths(self) -> Sequence[int]:
        """Requests per queue."""
        levels = Counter(entry.level for entry in self._positions.values())
        return [levels[level] for level in range(LEVELS)]

    def can_be_preempted(self, state: RequestState) -> bool:
        """Whether the request has run for much longer than its restoration takes."""
        seconds = self.restore_cost(state)
        if seconds is None:
            seconds = self.ring_times.prompt_s(state.num_computed)
        return self.quantum_s(self._positions[state].home_level) >= MIN_QUANTUM_RATIO * seconds

    def estimate_next_scheduled(
        self, requests: Collection[RequestState], batch: int, now: float
    ) -> Mapping[RequestState, float]:
        """Estimate when requests before it are demoted to its queue, or it is promoted (§4.2)."""
        levels = Counter(entry.level for entry in self._positions.values())
        before, ahead, quanta = [0.0] * LEVELS, 0, 0.0
        # Each request ahead consumes the quanta of all queues from its own to this one.
        for level in range(1, LEVELS):
            ahead += levels[level - 1]
            quanta += ahead * self.quantum_s(level - 1)
            before[level] = quanta / max(1, batch)
        scheduled = {}
        for state in requests:
            entry = self._positions[state]
            promoted_at = self._promoted_at(entry)
            waits = before[entry.level]
            scheduled[state] = (
                waits if promoted_at is None else min(waits, max(0.0, promoted_at - now))
            )
        return scheduled

    def rank_request(self, state: RequestState, now: float) -> Rank:
        """Rank by queue, then by the time of joining it."""
        entry = self._positions[state]
        promoted_at = self._promoted_at(entry)
        if (
            promoted_at is not None
            and entry.level > 0
            and now >= promoted_at
            and not state.is_stalled
        ):
            return 0, promoted_at, entry.arrival_number
        return entry.level, entry.since, entry.arrival_number


class SkipJoinMlfq(Mlfq):
    """A new request skips queues with a quantum shorter than its prefill.

    The prefill time of uncached tokens is predicted from profiles and links. A demoted request
    skips queues whose quantum is shorter than its next iteration, including the rest of its prompt.
    """

    def initial_level(self, state: RequestState) -> int:
        """Return the first queue whose quantum covers the prefill."""
        return self.level_for(self.ring_times.prompt_s(state.num_uncached))

    def demoted_level(self, state: RequestState, level: int) -> int:
        """Return the next queue, or a later one whose quantum covers the rest of the prompt."""
        rest = len(state.tokens) - state.num_issued
        return max(level + 1, self.level_for(self.ring_times.prompt_s(rest)) if rest > 1 else 0)


class FixedPriority(SkipJoinMlfq):
    """Skip-join MLFQ without demotion or promotion: fixed priority by prompt length.

    It ignores answer lengths, and long prompts starve while shorter ones arrive.
    """

    def on_rows_returned(self, state: RequestState, seconds: float, now: float) -> None:
        """Consume nothing."""

    def on_issued(self, state: RequestState, now: float) -> None:
        """Never promote."""

    def _promoted_at(self, entry: QueuePosition) -> float | None:
        return None

    def can_be_preempted(self, state: RequestState) -> bool:
        """Allow preemption for any shorter prompt, at any cost."""
        return True

    def rank_request(self, state: RequestState, now: float) -> Rank:
        """Rank by queue, then by arrival."""
        entry = self._positions[state]
        return entry.level, 0.0, entry.arrival_number
