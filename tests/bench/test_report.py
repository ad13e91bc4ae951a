import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from molink.bench.report import Sample, Summary, percentile, report_table, summarize


def test_percentiles_are_linear_between_neighbours() -> None:
    ordered = [0.0, 1.0, 2.0, 3.0, 4.0]
    assert percentile(ordered, 50) == 2.0
    assert percentile(ordered, 90) == pytest.approx(3.6)
    assert percentile(ordered, 99) == pytest.approx(3.96)
    assert percentile([7.0], 99) == 7.0


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=50))
def test_percentiles_ascend_within_the_range(values: list[float]) -> None:
    summary = Summary.from_values(values)
    assert summary.p50 is not None
    assert summary.p90 is not None
    assert summary.p99 is not None
    assert min(values) <= summary.p50 <= summary.p90 <= summary.p99 <= max(values)


def test_the_json_result() -> None:
    samples = [
        Sample(
            sent_at=0.0,
            piece_times=(1.0, 2.0, 4.0),
            finished_at=4.0,
            input_tokens=9,
            output_tokens=3,
        ),
        Sample(sent_at=1.0, piece_times=(2.0,), finished_at=2.0, input_tokens=9, output_tokens=1),
        Sample(sent_at=1.0, finished_at=9.0, error="HTTP 429: full"),
    ]
    result = summarize(samples, 4.0, policy="fifo").as_json()
    same = {"mean": 1.0, "p50": 1.0, "p90": 1.0, "p99": 1.0}
    assert result == {
        "policy": "fifo",
        "completed": 2,
        "failed": 1,
        "duration_s": 4.0,
        "requests_per_s": 0.5,
        "output_tokens_per_s": 1.0,
        "ttft_s": same,
        "tpot_s": {"mean": 1.5, "p50": 1.5, "p90": 1.5, "p99": 1.5},
        "itl_s": {"mean": 1.5, "p50": 1.5, "p90": 1.9, "p99": 1.99},
        "latency_s": pytest.approx({"mean": 2.5, "p50": 2.5, "p90": 3.7, "p99": 3.97}),
        "input_tokens": 18,
        "output_tokens": 4,
        "interrupted": False,
        "first_error": "HTTP 429: full",
    }


def test_missing_data_is_null_and_a_dash() -> None:
    report = summarize([], 0.0, policy="x")
    assert report.ttft_s == Summary(None, None, None, None)
    assert (report.requests_per_s, report.output_tokens_per_s) == (0.0, 0.0)
    console = Console(width=100)
    with console.capture() as captured:
        console.print(report_table(report))
    assert "–" in captured.get()
