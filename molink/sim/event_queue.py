"""Virtual time: what happens when, one thing after another."""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from heapq import heappop, heappush
from itertools import count
from math import inf
from typing import Any

from molink.sim.pc import SimPc, Uplink

Callback = Callable[..., None]


class ScheduledCallback:
    """An action that can be called off."""

    __slots__ = ("_callback",)

    def __init__(self, action: Callable[[], object]) -> None:
        self._callback: Callable[[], object] | None = action

    def cancel(self) -> None:
        """Don't run it."""
        self._callback = None

    def run(self) -> None:
        """Run it, unless it was called off."""
        if self._callback is not None:
            self._callback()


class EventQueue:
    """Runs actions in order of their time; those of the same time in the order of their entry.

    It is the :class:`molink.link.base.Timers` of what lives in virtual time.

    ``now`` is in seconds from 0 and never goes back.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self._later: list[tuple[float, int, Callback, tuple[Any, ...]]] = []
        self._soon: deque[tuple[Callback, tuple[Any, ...]]] = deque()
        self._numbers = count()
        self._stopped = False

    def schedule_at(self, time: float, action: Callback, *arguments: Any) -> None:
        """Run ``action(*arguments)`` at ``time``; now, if that is over."""
        at = time if time > self.now else self.now
        heappush(self._later, (at, next(self._numbers), action, arguments))

    def schedule_soon(self, action: Callback, *arguments: Any) -> None:
        """Run it as soon as what runs now has ended, before time goes on."""
        self._soon.append((action, arguments))

    def time(self) -> float:
        """Seconds, as :attr:`now`."""
        return self.now

    def call_at(self, when: float, callback: Callable[[], object], /) -> ScheduledCallback:
        """As :meth:`schedule_at`, for what may be called off."""
        appointment = ScheduledCallback(callback)
        self.schedule_at(when, appointment.run)
        return appointment

    def call_soon(self, callback: Callable[[], object], /) -> ScheduledCallback:
        """As :meth:`schedule_soon`, for what may be called off."""
        appointment = ScheduledCallback(callback)
        self.schedule_soon(appointment.run)
        return appointment

    def stop(self) -> None:
        """Run nothing that is later than now."""
        self._stopped = True

    @property
    def is_stopped(self) -> bool:
        """Whether somebody has stopped it."""
        return self._stopped

    @property
    def next_event_at(self) -> float:
        """When something is due next; infinity if nothing is."""
        if self._soon:
            return self.now
        return self._later[0][0] if self._later else inf

    def run_next(self) -> bool:
        """Run the next action, however late it is; ``False`` if there is none."""
        if self._soon:
            action, arguments = self._soon.popleft()
        elif self._later:
            self.now, _, action, arguments = heappop(self._later)
        else:
            return False
        action(*arguments)
        return True

    def run(self, until: float) -> None:
        """Go on until nothing is left, until somebody stops it, or beyond ``until``."""
        soon, later = self._soon, self._later
        while True:
            while soon:
                action, arguments = soon.popleft()
                action(*arguments)
            if self._stopped or not later or later[0][0] > until:
                return
            self.now, _, action, arguments = heappop(later)
            action(*arguments)

    def advance_to(self, to: float) -> None:
        """As :meth:`run`; then it is ``to``, whatever was due last."""
        self.run(to)
        if not self._stopped:
            self.now = max(self.now, to)


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
