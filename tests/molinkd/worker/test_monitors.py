"""Warnings about scarce host memory, and how often they are repeated."""

import pytest

from molink.wire.messages.worker_pipe import WorkerStats
from molinkd.worker.monitors import WARNING_INTERVAL_S, SwapShortage


def stats(fallbacks: int, blocks: int = 30) -> WorkerStats:
    counters = {"scheduler_swap_fallbacks_total": float(fallbacks)}
    return WorkerStats(epoch=1, counters=counters, gauges={"scheduler_host_blocks": float(blocks)})


def test_warnings_come_at_once_then_once_per_interval() -> None:
    shortage = SwapShortage()
    assert shortage.check_stats(stats(0), 1.0) is None
    assert (shortage.check_stats(stats(2), 2.0) or "").startswith("2 preempted requests")
    assert shortage.check_stats(stats(9), 1.9 + WARNING_INTERVAL_S) is None
    assert (shortage.check_stats(stats(9), 2.0 + WARNING_INTERVAL_S) or "").startswith("7 ")
    assert shortage.check_stats(stats(9), 5 * WARNING_INTERVAL_S) is None


@pytest.mark.parametrize(("blocks", "reason"), [(30, "the 30 blocks"), (0, "no host memory")])
def test_the_warning_names_the_reason(blocks: int, reason: str) -> None:
    assert reason in (SwapShortage().check_stats(stats(1, blocks), 0.0) or "")
