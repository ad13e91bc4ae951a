"""A draft model's proposals, and what it keeps of each request."""

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from molink.checkpoint.model_folder import ModelFolder
from molink.facts.drafts import DraftBatch, DraftRequest, DraftResults, DraftTokens
from molink.stage.batch import SequenceRows, StageInput
from molink.stage.stage import Stage
from molinkd.worker.draft_proposer import DraftModelThread, DraftProposer

BLOCKS, SIZE = 12, 4
TEXT = tuple(range(30, 41))


@pytest.fixture(scope="module")
def stage(make_model: Any, tmp_path_factory: pytest.TempPathFactory) -> Stage:
    torch.set_num_threads(1)
    folder = ModelFolder.open(make_model(tmp_path_factory.mktemp("drafter")))
    return Stage.load_layers(folder, (0, folder.config.layers), "cpu", "f32")


@pytest.fixture(scope="module")
def other(stage: Stage, make_model: Any, tmp_path_factory: pytest.TempPathFactory) -> Stage:
    """A second proposer, whose greedy tokens are the expected drafts."""
    folder = ModelFolder.open(make_model(tmp_path_factory.mktemp("drafter")))
    return Stage.load_layers(folder, (0, folder.config.layers), "cpu", "f32")


def greedy(stage: Stage, tokens: Sequence[int], count: int) -> tuple[int, ...]:
    stage.allocate_kv_pool(BLOCKS, SIZE)
    found = list(tokens)
    for _ in range(count):
        rows = (SequenceRows(0, len(found), range(BLOCKS)),)
        logits = stage.forward(StageInput(torch.tensor(found), None, rows, (len(found) - 1,)))
        found.append(int(logits[0].argmax()))
    return tuple(found[len(tokens) :])


def drafter(stage: Stage, blocks: int = BLOCKS, vocabulary: int = 1 << 20) -> DraftProposer:
    return DraftProposer(stage, blocks, SIZE, vocabulary)


def ask(of: DraftProposer, *asks: DraftRequest, over: Sequence[int] = ()) -> list[DraftTokens]:
    return of.propose_drafts(DraftBatch(asks, over))


def test_it_drafts_the_likeliest_tokens(stage: Stage, other: Stage) -> None:
    made = drafter(stage)
    (one, two) = ask(made, DraftRequest(0, 0, TEXT, 3), DraftRequest(1, 0, TEXT[:2], 5))
    assert one.tokens == greedy(other, TEXT, 3)
    assert two.tokens == greedy(other, TEXT[:2], 5)
    assert [len(each.probabilities) for each in (one, two)] == [3, 5]
    assert all(0 < chance <= 1 for chance in (*one.probabilities, *two.probabilities))


@pytest.mark.parametrize("right", range(4))
def test_it_continues_after_the_last_right_draft(stage: Stage, other: Stage, right: int) -> None:
    made = drafter(stage)
    (first,) = ask(made, DraftRequest(0, 0, TEXT, 3))
    new = (*first.tokens[:right], 7)
    (second,) = ask(made, DraftRequest(0, len(TEXT), new, 4))
    assert second.tokens == greedy(other, (*TEXT, *new), 4)


def test_it_computes_only_what_is_new(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    made, rows = drafter(stage), list[int]()
    forward = stage.forward

    def counted(batch: StageInput) -> torch.Tensor:
        assert batch.tokens is not None
        rows.append(len(batch.tokens))
        return forward(batch)

    monkeypatch.setattr(stage, "forward", counted)
    (first,) = ask(made, DraftRequest(0, 0, TEXT, 3))
    ask(made, DraftRequest(0, len(TEXT), (first.tokens[0], 7), 2))
    ask(made, DraftRequest(0, len(TEXT) + 2, (8, 9), 0))
    assert rows == [len(TEXT), 1, 1, 1, 1, 2]


def test_it_takes_a_long_text_in_several_requests(stage: Stage, other: Stage) -> None:
    made = drafter(stage)
    assert ask(made, DraftRequest(0, 0, TEXT[:5])) == [DraftTokens(0)]
    (found,) = ask(made, DraftRequest(0, 5, TEXT[5:], 2))
    assert found.tokens == greedy(other, TEXT, 2)


def test_it_prefills_at_most_one_pass_per_request(
    stage: Stage, other: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("molinkd.worker.draft_proposer._MOST", 6)
    made = drafter(stage)
    assert ask(made, DraftRequest(0, 0, TEXT, 2)) == [DraftTokens(0)]
    (found,) = ask(made, DraftRequest(0, len(TEXT), (7,), 2))
    assert found.tokens == greedy(other, (*TEXT, 7), 2)


def test_it_stops_drafting_at_an_unlikely_token(stage: Stage) -> None:
    (whole,) = ask(drafter(stage), DraftRequest(0, 0, TEXT, 8))
    least = 0.99 * whole.probabilities[0] * whole.probabilities[1]
    (found,) = ask(drafter(stage), DraftRequest(0, 0, TEXT, 8, least))
    assert found.tokens == whole.tokens[:3]


def test_ended_requests_leave_no_blocks(stage: Stage) -> None:
    made, rng = drafter(stage, blocks=40), random.Random(2)
    alive, number = dict[int, int](), 0
    for _ in range(60):
        asks = []
        for request in list(alive)[:3]:
            asks.append(
                DraftRequest(request, alive[request], (rng.randrange(200),), rng.randrange(4))
            )
            alive[request] += 1
        if len(alive) < 4:
            asks.append(DraftRequest(number, 0, TEXT[: rng.randint(1, 9)], 2))
            alive[number] = len(asks[-1].tokens)
            number += 1
        over = [request for request in alive if rng.random() < 0.2]
        ask(made, *asks)
        ask(made, over=over)
        for request in over:
            del alive[request]
        assert made.num_held_blocks <= 40
    ask(made, over=list(alive))
    assert made.num_held_blocks == 0
    assert sorted(made._free_blocks) == list(range(40))


def test_the_least_recently_used_sequence_is_evicted(stage: Stage, other: Stage) -> None:
    made = drafter(stage, blocks=8)
    ask(made, DraftRequest(0, 0, TEXT, 1))
    ask(made, DraftRequest(1, 0, TEXT[1:], 1))
    (third,) = ask(made, DraftRequest(2, 0, TEXT[2:], 1))
    assert third.tokens == greedy(other, TEXT[2:], 1)
    assert made.num_held_blocks <= 8
    (again,) = ask(made, DraftRequest(0, len(TEXT), (5,), 2))
    assert again.tokens == greedy(other, (*TEXT, 5), 2)
    # Its KV pool holds two of these requests at once.
    asks = [DraftRequest(number, 0, TEXT, 1) for number in (5, 6, 7)]
    assert [len(guess.tokens) for guess in ask(made, *asks)] == [1, 1, 0]


def test_no_drafts_beyond_context_or_vocabulary(stage: Stage) -> None:
    made = drafter(stage)
    assert ask(made, DraftRequest(0, 0, TEXT * 4, 5)) == [DraftTokens(0)]
    assert ask(made, DraftRequest(1, 0, (1, stage.config.vocab_size), 5)) == [DraftTokens(1)]
    assert ask(made, DraftRequest(1, 2, (1,), 5)) == [DraftTokens(1)]


def test_it_drafts_only_tokens_of_the_served_model(stage: Stage) -> None:
    (found,) = ask(drafter(stage, vocabulary=9), DraftRequest(0, 0, TEXT, 8))
    assert max(found.tokens) < 9


def test_a_failing_draft_model_reports_it() -> None:
    tasks, told = list[Any](), list[DraftResults]()

    def broken() -> DraftProposer:
        raise RuntimeError("out of memory")

    thread = DraftModelThread(broken, tasks.append, lambda done, found: done(found))
    thread.request_drafts(DraftBatch((DraftRequest(0, 0, TEXT, 1),)), told.append)
    for task in tasks:
        task()
    assert [found.failed for found in told] == [True]
