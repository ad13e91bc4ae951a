"""PCs and processes in virtual time: they die, freeze and resume, and share no clock."""

from collections import deque
from collections.abc import Callable
from typing import Any

from molink.sim.event_queue import EventQueue, ScheduledCallback


class Failure(AssertionError):
    """An invariant was violated."""


class Pc:
    """A computer: its processes, its clock and its ports."""

    def __init__(self, event_queue: EventQueue, name: str, number: int) -> None:
        self.event_queue = event_queue
        self.name = name
        self.number = number
        #: Monotonic clocks of PCs differ by up to this many seconds.
        self.offset = 1000.0 * (number + 1)
        self.up = True
        self.processes: list[Process] = []

    def __repr__(self) -> str:
        return self.name


class Process:
    """One process with its timers, like an event loop.

    Events of a frozen process (SIGSTOP) wait until it resumes; those of a dead one are lost.
    """

    def __init__(self, pc: Pc, name: str) -> None:
        self.pc = pc
        self.name = f"{pc.name}/{name}"
        self.alive = True
        self.frozen = False
        self._event_queue = pc.event_queue
        self._backlog: deque[tuple[Callable[..., object], tuple[Any, ...]]] = deque()
        #: Called once when it has died.
        self.on_death: list[Callable[[], None]] = []
        pc.processes.append(self)

    def __repr__(self) -> str:
        return self.name

    # --- timers --------------------------------------------------------------------------------

    def time(self) -> float:
        """Seconds of this PC's monotonic clock."""
        return self._event_queue.now + self.pc.offset

    def call_at(self, when: float, callback: Callable[[], object], /) -> ScheduledCallback:
        """See :class:`molink.link.base.Timers`."""
        appointment = ScheduledCallback(callback)
        self._event_queue.schedule_at(when - self.pc.offset, self.run, appointment.run)
        return appointment

    def call_soon(self, callback: Callable[[], object], /) -> ScheduledCallback:
        """See :class:`molink.link.base.Timers`."""
        appointment = ScheduledCallback(callback)
        self._event_queue.schedule_soon(self.run, appointment.run)
        return appointment

    def later(self, seconds: float, action: Callable[..., object], *arguments: Any) -> None:
        """Call ``action`` after ``seconds``."""
        self._event_queue.schedule_at(self._event_queue.now + seconds, self.run, action, *arguments)

    def run(self, action: Callable[..., object], *arguments: Any) -> None:
        """Run ``action`` in this process."""
        if not self.alive:
            return
        if self.frozen:
            self._backlog.append((action, arguments))
        else:
            action(*arguments)

    # --- life cycle ----------------------------------------------------------------------------

    def freeze(self) -> None:
        """Stop the process (SIGSTOP)."""
        self.frozen = True

    def thaw(self) -> None:
        """Resume; events of the meantime run in order."""
        self.frozen = False
        while self._backlog and self.alive and not self.frozen:
            action, arguments = self._backlog.popleft()
            action(*arguments)

    def die(self) -> None:
        """End at once."""
        if not self.alive:
            return
        self.alive = False
        self._backlog.clear()
        self.pc.processes.remove(self)
        for callback in self.on_death:
            callback()
