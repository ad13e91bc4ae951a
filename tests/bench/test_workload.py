import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from molink.bench.workload import (
    PlannedRequest,
    TraceRow,
    plan_sizes,
    plan_trace,
    poisson_arrivals,
    read_trace,
)
from molink.errors import UsageError

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens\r
2023-11-16 18:15:46.6805900,374,44\r
2023-11-16 18:15:47.1805900,396,109\r
2023-11-16 18:16:46.6805900,879,55"""

MOONCAKE = """{"timestamp": 500, "input_length": 6758, "output_length": 500, "hash_ids": [0, 1]}
{"timestamp": 3500, "input_length": 12, "output_length": 3, "hash_ids": []}
"""


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Any]:
    def write(text: str) -> Path:
        path = tmp_path / "trace"
        path.write_bytes(text.encode())
        return path

    return write


def test_azure(write: Callable[..., Any]) -> None:
    assert read_trace(write(AZURE)) == [
        TraceRow(0.0, 374, 44),
        TraceRow(0.5, 396, 109),
        TraceRow(60.0, 879, 55),
    ]


def test_azure_with_time_zones(write: Callable[..., Any]) -> None:
    text = AZURE.replace("5900,", "590+00:00,")
    assert [row.arrival_s for row in read_trace(write(text))] == [0.0, 0.5, 60.0]


def test_mooncake(write: Callable[..., Any]) -> None:
    assert read_trace(write(MOONCAKE)) == [
        TraceRow(0.0, 6758, 500, (0, 1)),
        TraceRow(3.0, 12, 3),
    ]


def test_rows_are_sorted(write: Callable[..., Any]) -> None:
    first, second = MOONCAKE.splitlines()
    assert [row.arrival_s for row in read_trace(write(f"{second}\n{first}\n"))] == [0.0, 3.0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no requests"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", "has no requests"),
        ("a,b,c\n1,2,3\n", "row 1: expected the header"),
        (AZURE.replace("396", "many"), "row 3: "),
        (AZURE.replace(",109", ""), "row 3: 2 fields instead of 3"),
        (AZURE.replace("2023-11-16 18:16:46", "noon"), "row 4: "),
        (AZURE.replace("879", "0"), "row 4: "),
        (MOONCAKE.replace("12", "-12"), "row 2: "),
        (MOONCAKE.replace('"output_length": 3', '"out": 3'), "row 2: .*output_length"),
        (MOONCAKE + "{", "row 3: "),
    ],
)
def test_bad_rows_are_named(write: Callable[..., Any], text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        read_trace(write(text))


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"can't read the trace .*nowhere\.csv"):
        read_trace(tmp_path / "nowhere.csv")


def test_a_plan_from_a_trace() -> None:
    rows = [TraceRow(0.0, 5, 1), TraceRow(2.0, 6, 2), TraceRow(9.0, 7, 3)]
    assert plan_trace(rows, None, 2, seed=0) == [
        PlannedRequest(0, 0.0, 5, 1),
        PlannedRequest(1, 2.0, 6, 2),
    ]
    at_rate = plan_trace(rows, 100.0, 10, seed=0)
    assert [(request.input_tokens, request.output_tokens) for request in at_rate] == [
        (5, 1),
        (6, 2),
        (7, 3),
    ]
    assert 0 < at_rate[2].arrival_s < 1


def test_a_plan_of_one_size() -> None:
    assert plan_sizes(8, 4, float("inf"), 2, seed=0) == [
        PlannedRequest(0, 0.0, 8, 4),
        PlannedRequest(1, 0.0, 8, 4),
    ]
    with pytest.raises(UsageError, match="--input-tokens"):
        plan_sizes(0, 4, 1.0, 2, seed=0)


def test_infinite_rate_sends_all_at_once() -> None:
    assert poisson_arrivals(math.inf, 3, seed=0) == [0.0, 0.0, 0.0]


def test_poisson_arrivals_ascend_from_zero_with_the_mean_rate() -> None:
    times = poisson_arrivals(4.0, 20_000, seed=1)
    gaps = [b - a for a, b in itertools.pairwise(times)]
    assert times[0] == 0.0
    assert min(gaps) >= 0
    mean = sum(gaps) / len(gaps)
    assert mean == pytest.approx(0.25, rel=0.03)
    # An exponential's standard deviation is its mean.
    assert math.sqrt(sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) == pytest.approx(
        mean, rel=0.05
    )


def test_equal_seeds_give_equal_plans() -> None:
    assert poisson_arrivals(1.0, 9, seed=7) == poisson_arrivals(1.0, 9, seed=7)
    assert poisson_arrivals(1.0, 9, seed=7) != poisson_arrivals(1.0, 9, seed=8)


@pytest.mark.parametrize("rate", [0.0, -1.0, math.nan])
def test_invalid_rates_are_rejected(rate: float) -> None:
    with pytest.raises(UsageError, match="--rate"):
        poisson_arrivals(rate, 1, seed=0)


def test_zero_requests_are_rejected() -> None:
    with pytest.raises(UsageError, match="--requests"):
        poisson_arrivals(1.0, 0, seed=0)
