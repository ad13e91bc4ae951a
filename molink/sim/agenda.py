"""Virtual time: what happens when, one thing after another."""

from collections import deque
from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count
from typing import Any

Action = Callable[..., None]


class Agenda:
    """Runs actions in order of their time; those of the same time in the order of their entry.

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

    def stop(self) -> None:
        """Run nothing that is later than now."""
        self._stopped = True

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
