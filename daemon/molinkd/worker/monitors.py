"""Monitors of a worker: event loop load, and shortage of host memory for swapping."""

import math
import time

from molink.wire.messages.worker_pipe import WorkerStats


class LoopMeter:
    """Measures the share of wall-clock time that the calling thread spends on a CPU.

    A busy event loop slows decode steps through the GIL, so ``/metrics`` shows the share; it should
    stay below 0.1. Call it from the loop's thread.
    """

    def __init__(self) -> None:
        self._cpu_s = time.thread_time()
        self._wall_s = time.monotonic()

    def measure_busy_share(self) -> float:
        """Return the share since the last call, 0 to 1."""
        cpu, wall = time.thread_time(), time.monotonic()
        spent, passed = cpu - self._cpu_s, wall - self._wall_s
        self._cpu_s, self._wall_s = cpu, wall
        return min(1.0, spent / passed) if passed > 0 else 0.0


#: Minimum seconds between two warnings.
WARNING_INTERVAL_S = 60.0


class SwapShortage:
    """Warns when preempted requests are recomputed because swap space is short. Sans-IO."""

    def __init__(self) -> None:
        self._reported_count, self._reported_at = 0, -math.inf

    def check_stats(self, stats: WorkerStats, now: float) -> str | None:
        """Return a warning, if one is due."""
        count = int(stats.counters.get("scheduler_swap_fallbacks_total", 0))
        if count == self._reported_count or now - self._reported_at < WARNING_INTERVAL_S:
            return None
        more, self._reported_count, self._reported_at = count - self._reported_count, count, now
        if blocks := int(stats.gauges.get("scheduler_host_blocks", 0)):
            why = (
                f"the {blocks} blocks of host memory per stage are full (the PC with the smallest "
                "`swap_space` sets the limit)"
            )
        else:
            why = (
                "a stage has no host memory for KV; set `preemption_mode` and `swap_space` on "
                "every PC"
            )
        return f"{more} preempted requests could not be swapped and will be recomputed: {why}"
