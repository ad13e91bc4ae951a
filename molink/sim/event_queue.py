"""Event queues in virtual time, for a ring and for a fleet."""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from heapq import heappop, heappush
from itertools import count
from math import inf
from typing import Any

from molink.sim.pc import SimPc, Uplink

Callback = Callable[..., None]


class ScheduledCallback:
    """A scheduled callback that can be cancelled."""

    __slots__ = ("_callback",)

    def __init__(self, callback: Callable[[], object]) -> None:
        self._callback: Callable[[], object] | None = callback

    def cancel(self) -> None:
        self._callback = None

    def run(self) -> None:
        """Run it unless it was cancelled."""
        if self._callback is not None:
            self._callback()


class EventQueue:
    """Runs callbacks in order of time, and simultaneous ones in order of scheduling.

    It implements :class:`molink.link.base.Timers`. ``now`` starts at 0 s and never decreases.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self._later: list[tuple[float, int, Callback, tuple[Any, ...]]] = []
        self._soon: deque[tuple[Callback, tuple[Any, ...]]] = deque()
        self._numbers = count()
        self._stopped = False

    def schedule_at(self, time: float, callback: Callback, *arguments: Any) -> None:
        """Run ``callback(*arguments)`` at ``time`` (seconds), or now if ``time`` has passed."""
        at = time if time > self.now else self.now
        heappush(self._later, (at, next(self._numbers), callback, arguments))

    def schedule_soon(self, callback: Callback, *arguments: Any) -> None:
        """Run ``callback(*arguments)`` after the current callback, before time advances."""
        self._soon.append((callback, arguments))

    def time(self) -> float:
        """Return :attr:`now` in seconds."""
        return self.now

    def call_at(self, when: float, callback: Callable[[], object], /) -> ScheduledCallback:
        """Like :meth:`schedule_at`, but can be cancelled."""
        scheduled = ScheduledCallback(callback)
        self.schedule_at(when, scheduled.run)
        return scheduled

    def call_soon(self, callback: Callable[[], object], /) -> ScheduledCallback:
        """Like :meth:`schedule_soon`, but can be cancelled."""
        scheduled = ScheduledCallback(callback)
        self.schedule_soon(scheduled.run)
        return scheduled

    def stop(self) -> None:
        """Stop :meth:`run` before time advances."""
        self._stopped = True

    @property
    def is_stopped(self) -> bool:
        return self._stopped

    @property
    def next_event_at(self) -> float:
        """Time of the next event; infinity if there is none."""
        if self._soon:
            return self.now
        return self._later[0][0] if self._later else inf

    def run_next(self) -> bool:
        """Run the next callback; return ``False`` if there is none."""
        if self._soon:
            callback, arguments = self._soon.popleft()
        elif self._later:
            self.now, _, callback, arguments = heappop(self._later)
        else:
            return False
        callback(*arguments)
        return True

    def run(self, until: float) -> None:
        """Run until the queue is empty or stopped, or ``until`` (seconds) is reached."""
        soon, later = self._soon, self._later
        while True:
            while soon:
                callback, arguments = soon.popleft()
                callback(*arguments)
            if self._stopped or not later or later[0][0] > until:
                return
            self.now, _, callback, arguments = heappop(later)
            callback(*arguments)

    def advance_to(self, to: float) -> None:
        """Run until ``to`` seconds, and set the time to ``to`` unless stopped."""
        self.run(to)
        if not self._stopped:
            self.now = max(self.now, to)


#: Maximum seconds for which regions advance without synchronization.
_MAX_STEP_S = 1.0


def assign_regions(pipelines: Iterable[Sequence[SimPc]]) -> list[int]:
    """Return each pipeline's region; pipelines whose PCs share an uplink are in one region."""
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
    """A common event queue and one event queue for each region of pipelines.

    Regions share no state between common events (arrivals, departures of PCs), so each region
    advances alone until the next common event. Events have the same order as in a single queue, but
    only a few pipelines at a time occupy the CPU's caches.
    """

    def __init__(self, regions: Iterable[int]) -> None:
        self.common = EventQueue()
        self._regions = {number: EventQueue() for number in sorted(set(regions))}
        #: Times and events that regions have reported.
        self._pending: list[tuple[float, Callback, tuple[Any, ...]]] = []
        self._horizon = 0.0

    def region_queue(self, region: int) -> EventQueue:
        """The event queue of a region."""
        return self._regions[region]

    def schedule_common(self, time: float, callback: Callback, *arguments: Any) -> None:
        """Run a region's report of ``time`` seconds, before any later common event."""
        self._pending.append((time, callback, arguments))

    def schedule_later(
        self, region: EventQueue, seconds: float, callback: Callback, *arguments: Any
    ) -> None:
        """Run a common event ``seconds`` after a region's current time.

        Other regions may be up to a second ahead; the event does not run before their time.
        """
        at = max(self.common.now, region.now) + seconds
        self.common.schedule_at(max(at, self._horizon), callback, *arguments)

    def run(self, until: float) -> None:
        """Run until the common queue is stopped, or until ``until`` seconds."""
        common, told = self.common, self._pending
        while not common.is_stopped and common.now < until:
            self._horizon = min(common.next_event_at, common.now + _MAX_STEP_S, until)
            for region in self._regions.values():
                region.advance_to(self._horizon)
            for _, callback, arguments in sorted(told, key=lambda one: one[0]):
                callback(*arguments)
            if common.is_stopped and told:
                common.now = max(time for time, _, _ in told)
                return
            told.clear()
            common.advance_to(self._horizon)
