"""Simulated requests with content, so that drafts are right or wrong."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from molink.bench.workload import TraceRow
from molink.sim.known_text import KnownText
from molink.sim.scenario import Scenario
from molink.sim.simulate import simulate_scenario
from molink.sim.workload import Workload

#: Answers that repeat their prompt, and an unpredictable one.
COPY = tuple(range(100, 150))
TEXTS = (KnownText(COPY, COPY[5:40]), KnownText(tuple(range(9)), tuple(range(50, 90))))


#: A draft model with a fifteenth of the parameters.
SMALL = str(Path(__file__).parents[2] / "configs" / "models" / "qwen2.5-0.5b.toml")


def trace_of(texts: Sequence[KnownText]) -> tuple[TraceRow, ...]:
    """A workload of these requests, one per second."""
    return tuple(
        TraceRow(float(index), len(text.prompt), len(text.answer))
        for index, text in enumerate(texts)
    )


def scenario() -> Scenario:
    workload = Workload(1.0, 4.0, trace_rows=trace_of(TEXTS), arrivals="trace")
    return Scenario(workload, texts=TEXTS)


def test_tokens_by_position() -> None:
    text = KnownText((7, 8), (9,))
    assert [text.token_at(position) for position in range(4)] == [7, 8, 9, 0]


def test_right_drafts_save_round_trips() -> None:
    # The clients check each token.
    without = simulate_scenario(scenario())
    found = simulate_scenario(replace(scenario(), num_speculative_tokens=4))
    assert found.report.failed == without.report.failed == 0
    assert found.report.output_tokens == without.report.output_tokens == 2 * (35 + 40)
    assert (without.drafted, without.accepted) == (0, 0)
    assert 0 < found.accepted <= found.drafted
    assert found.report.latency_s.mean is not None
    assert without.report.latency_s.mean is not None
    assert found.report.latency_s.mean < 0.7 * without.report.latency_s.mean


def test_forced_tokens_are_drafted() -> None:
    # Of every ten tokens five are forced; the others are unpredictable.
    answer = tuple(range(200, 250))
    runs = tuple(5 - at % 10 if at % 10 < 5 else 0 for at in range(50))
    text = KnownText(tuple(range(9)), answer, runs)
    assert text.forced_at(9 + 12) == answer[12:15]
    assert text.forced_at(9 + 7) == text.forced_at(4) == text.forced_at(99) == ()
    workload = Workload(1.0, 2.0, trace_rows=trace_of([text, text]), arrivals="trace")
    given = Scenario(workload, texts=(text, text))
    found = simulate_scenario(replace(given, num_speculative_tokens=-1))
    plain = replace(given, texts=(replace(text, forced_runs=()),) * 2, num_speculative_tokens=-1)
    assert (found.drafted, found.accepted) == (48, 48)
    before, after = simulate_scenario(plain).report.latency_s.mean, found.report.latency_s.mean
    assert before is not None
    assert after is not None
    assert after < 0.75 * before


def with_drafts(right: int) -> tuple[KnownText, ...]:
    """Each text with model drafts of four tokens, of which the first ``right`` are right."""
    found = []
    for text in TEXTS:
        rest = [text.answer[at : at + 4] for at in range(len(text.answer))]
        tokens = [(*each[:right], *(1 + token for token in each[right:])) for each in rest]
        drafts = tuple((each, (0.6,) * len(each)) for each in tokens)
        found.append(replace(text, model_drafts=drafts))
    return tuple(found)


def test_a_right_draft_model_saves_round_trips() -> None:
    times = []
    for right in (0, 4):
        texts = with_drafts(right)
        asking = replace(scenario(), texts=texts, num_speculative_tokens=-1, draft_model=SMALL)
        found, without = (
            simulate_scenario(asking),
            simulate_scenario(replace(asking, draft_model="")),
        )
        assert found.report.failed == without.report.failed == 0
        assert found.report.output_tokens == without.report.output_tokens
        assert found.report.latency_s.mean is not None
        assert without.report.latency_s.mean is not None
        times.append(found.report.latency_s.mean / without.report.latency_s.mean)
    wrong, right = times
    assert right < 0.7
    assert wrong < 1.03


def test_texts_are_identified_by_prefix() -> None:
    text = KnownText((7, 8), (9, 10))
    assert all(text.has_prefix((7, 8, 9, 10)[:count]) for count in range(5))
    assert not any(text.has_prefix(other) for other in ((8,), (7, 8, 10), (7, 8, 9, 10, 11)))


def test_conversations_are_served_completely() -> None:
    auto = simulate_scenario(replace(scenario(), num_speculative_tokens=-1))
    assert auto.report.failed == 0
    assert auto.accepted > 0
