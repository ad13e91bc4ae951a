"""How busy a worker's event loop is.

When it is said that host memory for KV is short.
"""

import math
import time

from molink.wire.messages.worker_pipe import WorkerStats


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


#: Seconds between two words on it, at least.
WARNING_INTERVAL_S = 60.0


class SwapShortage:
    """Has people told that KV was given up which was to go to host memory. Sans-IO."""

    def __init__(self) -> None:
        #: How often that had been when they were told last, and when that was.
        self._reported_count, self._reported_at = 0, -math.inf

    def check_stats(self, stats: WorkerStats, now: float) -> str | None:
        """What is to be said by now, if anything."""
        count = int(stats.counters.get("scheduler_swap_fallbacks_total", 0))
        if count == self._reported_count or now - self._reported_at < WARNING_INTERVAL_S:
            return None
        more, self._reported_count, self._reported_at = count - self._reported_count, count, now
        blocks = int(stats.gauges.get("scheduler_host_blocks", 0))
        if blocks:
            why = f"the {blocks} blocks of host memory that each stage has are full; the least"
            why += " `swap_space` of all PCs counts"
        else:
            why = "a stage has no host memory for KV; `preemption_mode` and `swap_space` have to be"
            why += " set on every PC"
        return f"{more} times a request that gave way has to be computed anew: {why}"
