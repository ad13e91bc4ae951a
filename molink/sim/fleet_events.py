"""The virtual time of a fleet: pipelines that share nothing go on by themselves for a while.

Between two things that concern all (a request comes, a PC leaves) whatever happens in one region
changes nothing in another. So each goes on alone until the next such thing: the order of what
happens within a region, and between it and what concerns all, is as if there were one agenda. But
the state of a few pipelines at a time is what the processor's caches have to hold.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from molink.sim.event_queue import Callback, EventQueue
from molink.sim.pc import SimPc
from molink.sim.uplink import Uplink

#: Seconds that regions go on at most without a look at what concerns all.
_MAX_STEP_S = 1.0


def assign_regions(pipelines: Iterable[Sequence[SimPc]]) -> list[int]:
    """The region of each pipeline, from its PCs: those that share an uplink are in the same one."""
    parents: list[int] = []
    owners: dict[Uplink, int] = {}

    def first(number: int) -> int:
        while parents[number] != number:
            number = parents[number] = parents[parents[number]]
        return number

    for number, pcs in enumerate(pipelines):
        parents.append(number)
        for pc in pcs:
            parents[first(number)] = first(owners.setdefault(pc.uplink, number))
    return [first(number) for number in range(len(parents))]


class FleetEventQueue:
    """An agenda for what concerns all, and one for each region."""

    def __init__(self, regions: Iterable[int]) -> None:
        self.common = EventQueue()
        self._regions = {number: EventQueue() for number in sorted(set(regions))}
        #: What regions have told, and when.
        self._pending: list[tuple[float, Callback, tuple[Any, ...]]] = []
        self._horizon = 0.0

    def region_queue(self, region: int) -> EventQueue:
        """What happens in a region."""
        return self._regions[region]

    def schedule_common(self, time: float, action: Callback, *arguments: Any) -> None:
        """Run it before anything that concerns all and is later than ``time``, in that order."""
        self._pending.append((time, action, arguments))

    def schedule_later(
        self, region: EventQueue, seconds: float, action: Callback, *arguments: Any
    ) -> None:
        """Run what concerns all, so many seconds after what happens now (in that region).

        Not before the others, which may have gone on up to a second further.
        """
        at = max(self.common.now, region.now) + seconds
        self.common.schedule_at(max(at, self._horizon), action, *arguments)

    def run(self, until: float) -> None:
        """Go on until somebody stops the common agenda, or until that time."""
        common, told = self.common, self._pending
        while not common.is_stopped and common.now < until:
            self._horizon = min(common.next_event_at, common.now + _MAX_STEP_S, until)
            for region in self._regions.values():
                region.advance_to(self._horizon)
            for _, action, arguments in sorted(told, key=lambda one: one[0]):
                action(*arguments)
            if common.is_stopped and told:
                common.now = max(time for time, _, _ in told)
                return
            told.clear()
            common.advance_to(self._horizon)
