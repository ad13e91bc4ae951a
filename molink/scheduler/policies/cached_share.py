"""Admission by the cached share of the prompt, without starvation (Preble, §4.3)."""

from collections.abc import Sequence

from molink.scheduler.policies.fcfs import Fcfs
from molink.scheduler.request_state import RequestState

#: The paper's ``P``.
GROUPS = 10


class CachedShare(Fcfs):
    """First come, first served within groups by the share of the prompt cached on arrival.

    The groups order the requests of one client; clients are admitted by fair shares. While both
    have waiting requests, group ``g`` is chosen ``g + 1`` times as often as group 0 (stride
    scheduling). With 63 % cached, a request is in group 6 of :data:`GROUPS`. Preempted requests
    come first.
    """

    def __init__(self) -> None:
        self._groups: dict[RequestState, int] = {}
        #: Requests of ``_groups`` that have been admitted.
        self._admitted: set[RequestState] = set()
        #: Stride-scheduling passes; an admission advances a higher group by less.
        self._passes = [0.0] * GROUPS

    def on_arrived(self, state: RequestState, now: float) -> None:
        """Assign the group; an idle group earns no credit."""
        cached = len(state.tokens) - state.num_uncached
        group = min(GROUPS - 1, GROUPS * cached // len(state.tokens))
        waiting = {self._groups[other] for other in self._groups.keys() - self._admitted}
        if waiting and group not in waiting:
            behind = min(self._passes[other] for other in waiting)
            self._passes[group] = max(self._passes[group], behind)
        self._groups[state] = group

    def on_issued(self, state: RequestState, now: float) -> None:
        """Advance the group with the first rows."""
        if state not in self._admitted:
            self._admitted.add(state)
            group = self._groups[state]
            self._passes[group] += 1 / (group + 1)

    def on_removed(self, state: RequestState, now: float) -> None:
        self._groups.pop(state, None)
        self._admitted.discard(state)

    def choose_admitted(self, waiting: Sequence[RequestState], now: float) -> RequestState | None:
        """Choose the first request of the first client's group with the lowest pass."""
        waiting = [state for state in waiting if state.client_key == waiting[0].client_key]
        again = [state for state in waiting if state in self._admitted]
        if not again:
            groups = {self._groups[state] for state in waiting}
            chosen = min(groups, key=lambda group: (self._passes[group], -group))
            again = [state for state in waiting if self._groups[state] == chosen]
        return super().choose_admitted(again, now)
