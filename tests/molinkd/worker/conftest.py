"""An event loop whose time passes at once, for shells with timers."""

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any

import pytest


class _InstantSelector(selectors.DefaultSelector):
    """Never waits: it moves the clock instead."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        ready = super().select(0)
        if not ready and timeout is not None:
            self.now += max(timeout, 0.0)
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """A loop in virtual time, which begins at 0."""

    def __init__(self) -> None:
        self._virtual = _InstantSelector()
        super().__init__(self._virtual)
        # Timers are due when they are due, however coarse this platform's clock is.
        self._clock_resolution = 1e-9

    def time(self) -> float:
        return self._virtual.now


@pytest.fixture
def virtually() -> Callable[[Coroutine[Any, Any, Any]], Any]:
    """Run a coroutine in virtual time."""

    def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            return runner.run(coroutine)

    return run
