"""Who finds more of the prompt cached is admitted sooner, and nobody starves (Preble, §4.3)."""

from collections.abc import Collection, Sequence

from molink.scheduler.policies.fcfs import Fcfs
from molink.scheduler.request_state import RequestState

#: The paper's ``P``.
GROUPS = 10


class CachedShare(Fcfs):
    """First come, first served within groups by the share of the prompt that was cached on arrival.

    Group ``g`` is admitted from ``g + 1`` times as often as group 0, as long as jobs wait in both:
    the one that lags behind its share most is next (stride scheduling). With 63 % cached a job is
    in group 6 of :data:`GROUPS`. What was preempted goes first.
    """

    def __init__(self) -> None:
        self._groups: dict[RequestState, int] = {}
        #: Those that have been admitted, of ``_groups``.
        self._admitted: set[RequestState] = set()
        #: How far each group is: an admission takes it further, the less the higher it is.
        self._passes = [0.0] * GROUPS

    def on_arrived(self, state: RequestState, now: float) -> None:
        """It joins its group; one in which nobody waited has saved nothing up meanwhile."""
        cached = len(state.tokens) - state.num_uncached
        group = min(GROUPS - 1, GROUPS * cached // len(state.tokens))
        waiting = {self._groups[other] for other in self._groups.keys() - self._admitted}
        if waiting and group not in waiting:
            behind = min(self._passes[other] for other in waiting)
            self._passes[group] = max(self._passes[group], behind)
        self._groups[state] = group

    def on_issued(self, state: RequestState, now: float) -> None:
        """If these are its first rows, it was admitted."""
        if state not in self._admitted:
            self._admitted.add(state)
            group = self._groups[state]
            self._passes[group] += 1 / (group + 1)

    def on_removed(self, state: RequestState, now: float) -> None:
        """Forget it."""
        self._groups.pop(state, None)
        self._admitted.discard(state)

    def choose_admitted(
        self, waiting: Sequence[RequestState], admitted: Collection[RequestState], now: float
    ) -> RequestState | None:
        """Of the group that lags behind most, the first of the client whose turn it is."""
        again = [state for state in waiting if state in self._admitted]
        if not again:
            groups = {self._groups[state] for state in waiting}
            chosen = min(groups, key=lambda group: (self._passes[group], -group))
            again = [state for state in waiting if self._groups[state] == chosen]
        return super().choose_admitted(again, admitted, now)
