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

    def at(self, time: float, action: Action, *arguments: Any) -> None:
        """Run ``action(*arguments)`` at ``time``; now, if that is over."""
        heappush(self._later, (max(time, self.now), next(self._numbers), action, arguments))

    def soon(self, action: Action, *arguments: Any) -> None:
        """Run it as soon as what runs now has ended, before time goes on."""
        self._soon.append((action, arguments))

    def run(self, until: float, idle: Callable[[], bool] = lambda: False) -> None:
        """Go on until nothing is left, until ``idle()`` after an action, or beyond ``until``."""
        soon, later = self._soon, self._later
        while True:
            while soon:
                action, arguments = soon.popleft()
                action(*arguments)
            if not later or later[0][0] > until or idle():
                return
            self.now, _, action, arguments = heappop(later)
            action(*arguments)
