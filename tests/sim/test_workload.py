"""Arrivals of requests."""

from itertools import pairwise

import pytest

from molink.bench.workload import TraceRow
from molink.errors import UsageError
from molink.sim.workload import Workload

ROWS = (
    TraceRow(0.0, 100, 10),
    TraceRow(1.0, 5000, 10),
    TraceRow(2.0, 200, 20),
    TraceRow(3.0, 200, 2000),
    TraceRow(9.0, 300, 30),
)


def test_fitting_trace_sizes_repeat() -> None:
    plan = Workload(rate=1.0, duration=20.0, trace_rows=ROWS, seed=1).plan_requests()
    sizes = [(request.input_tokens, request.output_tokens) for request in plan]
    assert len(sizes) > 6
    assert sizes[:6] == [(100, 10), (200, 20), (300, 30)] * 2


def test_poisson_arrivals_follow_rate_and_seed() -> None:
    load = Workload(rate=5.0, duration=400.0, trace_rows=ROWS, seed=7)
    times = [request.arrival_s for request in load.plan_requests()]
    assert len(times) == pytest.approx(2000, rel=0.1)
    assert times == sorted(times)
    assert times == [request.arrival_s for request in load.plan_requests()]
    assert times[-1] < 400.0


def test_trace_times_are_scaled_to_the_rate() -> None:
    plan = Workload(rate=0.5, duration=60.0, trace_rows=ROWS, arrivals="trace").plan_requests()
    assert len(plan) == 30
    gaps = [b.arrival_s - a.arrival_s for a, b in pairwise(plan[:3])]
    # 2 s and 7 s of the trace.
    assert gaps[1] / gaps[0] == pytest.approx(3.5)
    assert plan[3].arrival_s == pytest.approx(6.0)


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"rate": 0.0}, "--rate and --duration must be above 0"),
        ({"rate": float("nan")}, "--rate"),
        ({"rate": float("inf")}, "--rate"),
        ({"duration": -1.0}, "--duration"),
        ({"warmup": -1.0}, "--warmup must be 0 or more"),
        ({"input_tokens": 0}, "--input-tokens"),
        ({"max_prompt": 0}, "--max-prompt"),
        ({"arrivals": "never"}, "--arrivals"),
        ({"rate": 1e6, "duration": 1e6}, "more than 1000000 requests"),
    ],
)
def test_invalid_values_are_rejected(fields: dict, complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        Workload(**({"rate": 1.0, "duration": 10.0} | fields))


def test_an_empty_workload_is_rejected() -> None:
    with pytest.raises(UsageError, match="at most 50 prompt and 1024 output tokens"):
        Workload(rate=1.0, duration=10.0, trace_rows=ROWS, max_prompt=50).plan_requests()
    with pytest.raises(UsageError, match="no request arrives"):
        Workload(rate=1e-6, duration=1.0).plan_requests()
    same = tuple(TraceRow(0.0, 10, 10) for _ in range(3))
    with pytest.raises(UsageError, match="all arrive at once"):
        Workload(rate=1.0, duration=10.0, trace_rows=same, arrivals="trace").plan_requests()
