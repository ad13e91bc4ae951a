"""How busy a worker's event loop is."""

import time


class LoopMeter:
    """Share of wall-clock time that the calling thread spent on a CPU.

    Beside the compute thread a busy event loop steals decode steps through the GIL, so its share is
    shown in ``/metrics`` and should stay below 0.1. Call it from the loop's own thread.
    """

    def __init__(self) -> None:
        self._cpu = time.thread_time()
        self._wall = time.monotonic()

    def share(self) -> float:
        """The share since the last call, 0 to 1."""
        cpu, wall = time.thread_time(), time.monotonic()
        spent, passed = cpu - self._cpu, wall - self._wall
        self._cpu, self._wall = cpu, wall
        return min(1.0, spent / passed) if passed > 0 else 0.0
