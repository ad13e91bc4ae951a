"""A clock that stops while its daemon is suspended."""

import asyncio

from molinkd.peer.frontend.swarm_backend import POLL_INTERVAL_S, RunningClock


class StoppableLoop(asyncio.SelectorEventLoop):
    """An event loop whose time a test sets."""

    now = 100.0

    def time(self) -> float:
        return self.now


def test_it_stops_with_its_daemon_and_timers_fire_early() -> None:
    loop = StoppableLoop()
    clock = RunningClock(loop)
    try:
        loop.now += POLL_INTERVAL_S
        due = clock.time() + 30.0
        assert clock.call_at(due, print).when() == due
        loop.now += 60.0
        assert clock.time() == due - 30.0
        assert clock.call_at(due, print).when() == due + 60.0
    finally:
        clock.close()
        loop.close()


def test_it_detects_a_suspension() -> None:
    loop = StoppableLoop()
    clock = RunningClock(loop)
    try:
        for _ in range(8):
            loop.now += POLL_INTERVAL_S
            loop.run_until_complete(asyncio.sleep(0))
        assert clock.time() == 100.0 + 8 * POLL_INTERVAL_S
    finally:
        clock.close()
        loop.close()
