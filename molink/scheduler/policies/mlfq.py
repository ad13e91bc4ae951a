"""A multi-level feedback queue that knows nothing of prompts: FastServe's strawman (§4.1)."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from molink.facts.ring_times import RingTimes
from molink.scheduler.policies.ranked import Rank, RankedPolicy
from molink.scheduler.request_state import RequestState

#: Each queue has twice the quantum of the one before it; the last one's is never consumed.
LEVELS = 16
#: Seconds of waiting after which a job is promoted, at least (the paper's alpha).
ALPHA = 0.3
#: And quanta of its queue that it waits for, at least.
PROMOTION_QUANTA = 16
#: A job gives way when its queue's quantum is so many times what it takes to compute it anew, or to
#: copy it to host memory and back.
MIN_QUANTUM_RATIO = 8
#: Seconds that an iteration takes where neither profiles nor a first iteration have told.
DEFAULT_ITERATION_S = 0.05


@dataclass(slots=True)
class QueuePosition:
    """Where a job is in the queues."""

    #: As which of all jobs it came.
    arrival_number: int
    level: int
    #: When it came to that level.
    since: float
    #: The level whose quantum it consumes: another one while it is promoted.
    home_level: int
    #: When it last had no rows in flight; ``None`` while it has.
    idle_since: float | None
    #: Seconds with rows in flight since it came to its level, and until when they are counted.
    spent_s: float = 0.0
    counted_until: float = 0.0


class Mlfq(RankedPolicy):
    """Who has run for a shorter time goes first.

    A job joins the first queue. When it has run for that queue's quantum (with rows in flight,
    however many), it is demoted to the next one, at its end. The first quantum is the ring's
    shortest iteration; each further one is doubled. Jobs in flight keep their place.

    *Promotion.* A job that waits for ``alpha`` seconds, or for :data:`PROMOTION_QUANTA` quanta of
    its queue if these are longer, goes to the end of the first queue, and consumes the quantum of
    its own one there. The paper promotes after ``alpha``, for one quantum of the first queue. Where
    many wait all are promoted then, and nobody goes first; and a job that has to be computed anew
    would be so for one token. Here nobody waits for many times longer than it has run until it is
    in the first queue, and there only for those who came there before it: none of them stays for
    longer than its quantum and an iteration.
    """

    def __init__(self, alpha: float = ALPHA) -> None:
        super().__init__()
        self._alpha = alpha
        self._positions: dict[RequestState, QueuePosition] = {}
        self._num_arrivals = 0
        #: Seconds of the first queue's quantum: the ring's shortest iteration.
        self._shortest_s = DEFAULT_ITERATION_S
        #: The shortest that was heard of.
        self._shortest_observed_s: float | None = None

    # --- queues ----------------------------------------------------------------------------------

    def initial_level(self, state: RequestState) -> int:
        """The queue of a new job."""
        return 0

    def demoted_level(self, state: RequestState, level: int) -> int:
        """The queue below ``level`` that a job is demoted to."""
        return level + 1

    def quantum_s(self, level: int) -> float:
        """Seconds that a job may run for in a queue."""
        return float(self._shortest_s * (1 << level))

    def level_for(self, seconds: float) -> int:
        """The first queue with a quantum of ``seconds``."""
        levels = range(LEVELS - 1)
        return next((level for level in levels if self.quantum_s(level) >= seconds), LEVELS - 1)

    def _promoted_at(self, place: QueuePosition) -> float | None:
        """When it would go to the first queue if it rested until then; ``None``: it runs."""
        if place.idle_since is None:
            return None
        return place.idle_since + max(
            self._alpha, PROMOTION_QUANTA * self.quantum_s(place.home_level)
        )

    # --- events ----------------------------------------------------------------------------------

    def set_times(self, times: RingTimes) -> None:
        """Quanta follow the shortest iteration."""
        super().set_times(times)
        predicted = times.round_trip_s(1)
        if predicted > 0:
            self._shortest_s = predicted

    def on_arrived(self, state: RequestState, now: float) -> None:
        """It joins its queue."""
        level = min(self.initial_level(state), LEVELS - 1)
        self._positions[state] = QueuePosition(self._num_arrivals, level, now, level, now)
        self._num_arrivals += 1

    def on_issued(self, state: RequestState, now: float) -> None:
        """It runs; if it has waited for too long until now, in the first queue."""
        place = self._positions[state]
        promoted_at = self._promoted_at(place)
        if promoted_at is None:
            return
        if place.level > 0 and now >= promoted_at:
            place.level, place.since, place.spent_s = 0, promoted_at, 0.0
        place.idle_since, place.counted_until = None, now

    def on_rows_returned(self, state: RequestState, seconds: float, now: float) -> None:
        """It has consumed some of its quantum; perhaps all of it."""
        self._observe_iteration(seconds)
        place = self._positions[state]
        place.spent_s += now - place.counted_until
        place.counted_until = now
        if not state.awaited_seqs:
            place.idle_since = now
        if place.spent_s >= self.quantum_s(place.home_level):
            place.level = place.home_level = min(
                self.demoted_level(state, place.home_level), LEVELS - 1
            )
            place.since, place.spent_s = now, 0.0

    def _observe_iteration(self, seconds: float) -> None:
        """Where profiles say nothing, the shortest iteration is known by those there were."""
        if self.ring_times.round_trip_s(1) <= 0:
            self._shortest_observed_s = (
                seconds
                if self._shortest_observed_s is None
                else min(seconds, self._shortest_observed_s)
            )
            self._shortest_s = self._shortest_observed_s

    def on_removed(self, state: RequestState, now: float) -> None:
        """Its place is free."""
        del self._positions[state]

    def queue_lengths(self) -> Sequence[int]:
        """How many jobs are in each queue."""
        levels = Counter(place.level for place in self._positions.values())
        return [levels[level] for level in range(LEVELS)]

    # --- questions -------------------------------------------------------------------------------

    def can_be_preempted(self, state: RequestState) -> bool:
        """Whether it has run for much longer than it takes until it is where it was."""
        seconds = self.restore_cost(state)
        if seconds is None:
            seconds = self.ring_times.prompt_s(state.num_computed)
        return self.quantum_s(self._positions[state].home_level) >= MIN_QUANTUM_RATIO * seconds

    def estimate_next_scheduled(
        self, requests: Collection[RequestState], batch: int, now: float
    ) -> Mapping[RequestState, float]:
        """When those before it have been demoted to its queue, or it is promoted (§4.2)."""
        levels = Counter(place.level for place in self._positions.values())
        before, ahead, quanta = [0.0] * LEVELS, 0, 0.0
        # Each job ahead consumes the quanta of all queues from its own to this one.
        for level in range(1, LEVELS):
            ahead += levels[level - 1]
            quanta += ahead * self.quantum_s(level - 1)
            before[level] = quanta / max(1, batch)
        turns = {}
        for state in requests:
            place = self._positions[state]
            promoted_at = self._promoted_at(place)
            waits = before[place.level]
            turns[state] = waits if promoted_at is None else min(waits, max(0.0, promoted_at - now))
        return turns

    def rank_request(self, state: RequestState, now: float) -> Rank:
        """By queue; within one, who came there first."""
        place = self._positions[state]
        promoted_at = self._promoted_at(place)
        if (
            promoted_at is not None
            and place.level > 0
            and now >= promoted_at
            and not state.is_stalled
        ):
            return 0, promoted_at, place.arrival_number
        return place.level, place.since, place.arrival_number


class SkipJoinMlfq(Mlfq):
    """A new job skips the queues whose quantum is shorter than its prefill.

    That is predicted by the stages' profiles and links, for the tokens that the prefix cache lacks.
    A job that is demoted skips those whose quantum is shorter than its next iteration: the rest of
    its prompt, if it has not been issued yet.
    """

    def initial_level(self, state: RequestState) -> int:
        """The first queue whose quantum covers its prefill."""
        return self.level_for(self.ring_times.prompt_s(state.num_uncached))

    def demoted_level(self, state: RequestState, level: int) -> int:
        """The next queue, or a later one whose quantum covers the rest of its prompt."""
        rest = len(state.tokens) - state.num_issued
        return max(level + 1, self.level_for(self.ring_times.prompt_s(rest)) if rest > 1 else 0)


class FixedPriority(SkipJoinMlfq):
    """As skip-join MLFQ, but that a job stays in the queue that it has joined.

    It knows nothing of how long answers are, and a long prompt waits for as long as shorter ones
    keep coming.
    """

    def on_rows_returned(self, state: RequestState, seconds: float, now: float) -> None:
        """It consumes nothing."""

    def on_issued(self, state: RequestState, now: float) -> None:
        """It is not promoted either."""

    def _promoted_at(self, place: QueuePosition) -> float | None:
        """Never."""
        return None

    def can_be_preempted(self, state: RequestState) -> bool:
        """To any with a shorter prompt, whatever that costs."""
        return True

    def rank_request(self, state: RequestState, now: float) -> Rank:
        """By queue; within one, who came first."""
        place = self._positions[state]
        return place.level, 0.0, place.arrival_number
