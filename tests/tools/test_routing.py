"""Workloads, oracle and results of the routing benchmark."""

import json
from collections import Counter
from pathlib import Path

import pytest

from molink.bench.workload import HASH_BLOCK_TOKENS, TraceRow
from molink.routing.base import PipelineLoad, RoutedPrompt
from tools import routing


@pytest.fixture
def trace() -> list[TraceRow]:
    """Fifty conversations of three turns behind one system prompt."""
    return [
        TraceRow(
            float(50 * turn + talk), 512 * (turn + 2), 9, (0, *range(9 * talk, 9 * talk + turn + 1))
        )
        for turn in range(3)
        for talk in range(1, 51)
    ]


def test_conversation_is_kept_whole_or_left_out(trace: list[TraceRow]) -> None:
    kept = [routing.draw_conversations(trace, seed) for seed in range(routing.THINNED)]
    assert sum(map(len, kept)) == len(trace)
    for rows in kept:
        assert set(Counter(map(routing.family_of, rows)).values()) <= {3}


def test_tool_prompts_follow_zipf_with_new_questions() -> None:
    rows = routing.draw_tools((), 1)
    asked = Counter(map(routing.family_of, rows)).most_common()
    assert len(rows) == routing.COUNTS["tools"]
    assert 1.5 < asked[0][1] / asked[1][1] < 3 or asked[0][1] > len(rows) / 8
    assert len({row.hash_ids[-1] for row in rows}) == len(rows)
    assert all(
        0 < row.input_tokens - HASH_BLOCK_TOKENS * (len(row.hash_ids) - 1) < 256 for row in rows
    )


def test_single_requests_share_nothing(
    trace: list[TraceRow], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(routing.COUNTS, "alone", 100)
    rows = routing.draw_singles(trace, 1)
    parts = [part for row in rows for part in row.hash_ids]
    assert len(set(parts)) == len(parts)


def test_oracle_balances_work_and_keeps_families_together() -> None:
    rows = routing.draw_tools((), 2)
    oracle = routing.Oracle(rows, 1.0)
    up = [PipelineLoad(str(number)) for number in range(routing.PIPELINES)]
    homes: dict[int, set[str]] = {}
    work = Counter[str]()
    for index, row in enumerate(rows):
        name = oracle.choose_pipeline(RoutedPrompt(str(index), row.input_tokens), up, 0.0).name
        homes.setdefault(routing.family_of(row), set()).add(name)
        work[name] += row.output_tokens + HASH_BLOCK_TOKENS
    again = RoutedPrompt(str(len(rows)), rows[0].input_tokens)
    assert {oracle.choose_pipeline(again, up, 0.0).name} == homes[routing.family_of(rows[0])]
    assert all(len(names) == 1 for names in homes.values())
    assert max(work.values()) < 2 * min(work.values())


def test_runs_are_stored_once_and_compared_seed_by_seed(tmp_path: Path) -> None:
    def rows(router: str, *seconds: float, **more: object) -> list[dict[str, object]]:
        names = ("latency_mean_s", "latency_p99_s", "ttft_mean_s", "ttft_p99_s")
        return [
            {"workload": "tools", "rate": 1.0, "seed": seed, "router": router, "requests": 9}
            | dict.fromkeys((*names, "new_ttft_mean_s", "new_ttft_p99_s"), each)
            | more
            for seed, each in enumerate(seconds)
        ]

    out = tmp_path / "routing.json"
    routing.merge_results(out, rows("e2", 9.0, 2.0), {"decisions_per_s": 5.0})
    routing.merge_results(out, rows("e2", 1.0), None)
    routing.merge_results(out, rows("round-robin", 2.0, 6.0), None)
    stored = json.loads(out.read_text(encoding="utf-8"))
    assert len(stored["rows"]) == 4
    assert stored["speed"] == {"decisions_per_s": 5.0}
    (compared,) = stored["by_e2"]
    assert (compared["router"], compared["latency_p99_s"]) == ("round-robin", [2.5, 2.0, 3.0])

    routing.merge_results(out, rows("e2", 4.0, policy="cached-share"), None)
    routing.merge_results(out, [row | {"requests": 9000} for row in rows("oracle", 4.0)], None)
    found = json.loads(out.read_text(encoding="utf-8"))["by_e2"]
    assert [(one["router"], one["policy"]) for one in found] == [
        ("e2", "cached-share"),
        ("round-robin", "fcfs"),
    ], "of 9000 requests there is nothing of E2 to compare with"
    assert found[0]["new_ttft_mean_s"] == [4.0, 4.0, 4.0]


def test_waits_of_new_prompts_are_recorded() -> None:
    watched, up = routing.Watched(5.0), [PipelineLoad("a")]
    for key, at, cached in (("early", 0.0, 0), ("new", 6.0, 49), ("known", 6.0, 50)):
        watched.choose_pipeline(RoutedPrompt(key, 100), up, at)
        watched.on_first_token(key, cached, at + 2)
    assert watched.waits == [2.0]
