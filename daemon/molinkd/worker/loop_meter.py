"""How busy a worker's event loop is."""

import time


class LoopMeter:
    """Share of wall-clock time that the calling thread spent on a CPU.

    Beside the compute thread a busy event loop steals decode steps through the GIL, so its share is
    shown in ``/metrics`` and should stay below 0.1. Call it from the loop's own thread.
    """

    def __init__(self) -> None:
        self._cpu_s = time.thread_time()
        self._wall_s = time.monotonic()

    def measure_busy_share(self) -> float:
        """The share since the last call, 0 to 1."""
        cpu, wall = time.thread_time(), time.monotonic()
        spent, passed = cpu - self._cpu_s, wall - self._wall_s
        self._cpu_s, self._wall_s = cpu, wall
        return min(1.0, spent / passed) if passed > 0 else 0.0
