"""Virtual time: what happens when, one thing after another."""

from collections import deque
from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count
from math import inf
from typing import Any

Action = Callable[..., None]


class Appointment:
    """An action that can be called off."""

    __slots__ = ("_action",)

    def __init__(self, action: Callable[[], object]) -> None:
        self._action: Callable[[], object] | None = action

    def cancel(self) -> None:
        """Don't run it."""
        self._action = None

    def run(self) -> None:
        """Run it, unless it was called off."""
        if self._action is not None:
            self._action()


class Agenda:
    """Runs actions in order of their time; those of the same time in the order of their entry.

    It is the :class:`molink.link.ends.Timers` of what lives in virtual time.

    ``now`` is in seconds from 0 and never goes back.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self._later: list[tuple[float, int, Action, tuple[Any, ...]]] = []
        self._soon: deque[tuple[Action, tuple[Any, ...]]] = deque()
        self._numbers = count()
        self._stopped = False

    def at(self, time: float, action: Action, *arguments: Any) -> None:
        """Run ``action(*arguments)`` at ``time``; now, if that is over."""
        at = time if time > self.now else self.now
        heappush(self._later, (at, next(self._numbers), action, arguments))

    def soon(self, action: Action, *arguments: Any) -> None:
        """Run it as soon as what runs now has ended, before time goes on."""
        self._soon.append((action, arguments))

    def time(self) -> float:
        """Seconds, as :attr:`now`."""
        return self.now

    def call_at(self, when: float, callback: Callable[[], object], /) -> Appointment:
        """As :meth:`at`, for what may be called off."""
        appointment = Appointment(callback)
        self.at(when, appointment.run)
        return appointment

    def call_soon(self, callback: Callable[[], object], /) -> Appointment:
        """As :meth:`soon`, for what may be called off."""
        appointment = Appointment(callback)
        self.soon(appointment.run)
        return appointment

    def stop(self) -> None:
        """Run nothing that is later than now."""
        self._stopped = True

    @property
    def is_stopped(self) -> bool:
        """Whether somebody has stopped it."""
        return self._stopped

    @property
    def next_at(self) -> float:
        """When something is due next; infinity if nothing is."""
        if self._soon:
            return self.now
        return self._later[0][0] if self._later else inf

    def step(self) -> bool:
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

    def advance(self, to: float) -> None:
        """As :meth:`run`; then it is ``to``, whatever was due last."""
        self.run(to)
        if not self._stopped:
            self.now = max(self.now, to)
