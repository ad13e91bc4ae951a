"""What is said of host memory that is short, and how often."""

from molink.wire.messages.worker_pipe import WorkerStats
from molinkd.worker.monitors import WARNING_INTERVAL_S, SwapShortage


def stats(fallbacks: int, blocks: int = 30) -> WorkerStats:
    counters = {"scheduler_swap_fallbacks_total": float(fallbacks)}
    return WorkerStats(epoch=1, counters=counters, gauges={"scheduler_host_blocks": float(blocks)})


def test_it_is_said_at_once_and_then_now_and_then() -> None:
    shortage = SwapShortage()
    assert shortage.check_stats(WorkerStats(epoch=1, counters={}, gauges={}), 0.0) is None
    assert shortage.check_stats(stats(0), 1.0) is None
    said = shortage.check_stats(stats(2), 2.0)
    assert said is not None
    assert said.startswith(
        "2 preempted requests could not be swapped and will be recomputed: the 30"
    )
    assert shortage.check_stats(stats(9), 1.9 + WARNING_INTERVAL_S) is None
    said = shortage.check_stats(stats(9), 2.0 + WARNING_INTERVAL_S)
    assert said is not None
    assert said.startswith("7 times")
    assert shortage.check_stats(stats(9), 5 * WARNING_INTERVAL_S) is None


def test_where_a_stage_has_none_that_is_said() -> None:
    said = SwapShortage().check_stats(stats(1, 0), 0.0)
    assert said is not None
    assert "a stage has no host memory for KV; `preemption_mode`" in said
