"""What is said of predicted and measured times per token; a ring where there are namespaces."""

import os
from pathlib import Path

import pytest

from tools.bench_plan import Row
from tools.plan_rings import Asked, Link, Run, described
from tools.wan import unavailable


def test_a_row_is_of_all_requests() -> None:
    runs = [Run(0.1, (0.1, 0.12)), Run(0.2, (0.2, 0.18, 0.22))]
    row = Row.of("two", Link(20.0, 5.0), runs, 0.5)
    assert (row.ring, row.mbps, row.delay_ms, row.requests, row.load) == ("two", 20.0, 5.0, 5, 0.5)
    assert row.predicted_ms == pytest.approx(150)
    assert row.measured_ms == pytest.approx(180)
    assert (row.ratio, row.least, row.most) == pytest.approx((1.0, 0.9, 1.2))


@pytest.mark.slow
@pytest.mark.skipif(unavailable() is not None, reason=f"no namespaces here: {unavailable()}")
def test_the_ring_that_was_planned_runs(tmp_path: Path) -> None:
    recorded = tmp_path / "rows.bin"
    recorded.write_bytes(os.urandom(64 * 2 * 4096))
    asked = Asked(2, 8, 4, "cubic")
    devices = ["rtx3090", "rtx3060"]
    run = described(devices, "qwen-7b", Link(100.0, 5.0), asked, recorded, 0)
    assert len(run.measured) == 2
    assert 0 < run.predicted < 0.2
