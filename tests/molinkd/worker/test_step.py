"""A step that fails at any stage fails its requests and nothing else."""

from pathlib import Path
from typing import Any

import pytest
import torch

from molink.checkpoint.model_folder import ModelFolder
from molink.ring.step import StepInput, StepOutput
from molink.stage.stage import Stage
from molink.text.grammar_matcher import GrammarCompiler
from molink.wire.messages.base import Payload
from molink.wire.messages.data_plane import Admit, History, RequestSlice, SamplingParams, Volume
from molinkd.worker.request_table import RequestTable
from molinkd.worker.step import fail_step, run_step
from tests.support.models import add_draft_layer

GREEDY = SamplingParams(temperature=0.0)


@pytest.fixture(scope="module")
def folder(make_model: Any, tmp_path_factory: pytest.TempPathFactory) -> ModelFolder:
    torch.set_num_threads(1)
    return ModelFolder.open(make_model(tmp_path_factory.mktemp("step")))


def load(folder: ModelFolder, first: int, last: int) -> Stage:
    stage = Stage.load_layers(folder, (first, last), "cpu", "f32")
    stage.allocate_kv_pool(8, 4)
    return stage


def table(*requests: int, sampling: SamplingParams = GREEDY, reach: int = 0) -> RequestTable:
    made = RequestTable()
    for request in requests:
        made.admit_request(Admit(request + 1, request, sampling, 2, reach))
    return made


def volume(seq: int, *groups: RequestSlice, prefill: bool = True) -> Volume:
    count = sum(each.count for each in groups)
    return Volume(seq, prefill, groups, Payload("i32", (count,)))


def two_requests() -> list[StepInput]:
    header = volume(9, RequestSlice(0, 0, 2, 1, (0,), True), RequestSlice(1, 0, 2, 2, (1,), True))
    return [StepInput(header, [1, 2, 3, 4])]


def pass_on(results: list[StepOutput]) -> list[StepInput]:
    return [StepInput(result.volume, result.rows) for result in results]


def test_failed_rows_travel_as_nan_to_the_last_stage(
    folder: ModelFolder, caplog: pytest.LogCaptureFixture
) -> None:
    first, last = load(folder, 0, 1), load(folder, 1, 3)
    healthy = run_step(first, table(0, 1), two_requests())
    tables = table(0, 1), table(0, 1)
    tables[0][0].failed = True
    results = run_step(first, tables[0], two_requests())
    (result,) = run_step(last, tables[1], pass_on(results))
    assert result.sampled is not None
    assert result.sampled.failed == (0,)
    assert caplog.messages == ["rows of request 0 are not finite"]
    (expected,) = run_step(load(folder, 1, 3), table(0, 1), pass_on(healthy))
    assert expected.sampled is not None
    assert result.sampled.sampled == expected.sampled.sampled[1:]


def test_an_adapter_that_the_model_lacks_fails_its_request(folder: ModelFolder) -> None:
    first, last = load(folder, 0, 1), load(folder, 1, 3)
    healthy = pass_on(run_step(first, table(0, 1), two_requests()))
    (expected,) = run_step(last, table(0, 1), healthy)
    tables = table(1), table(1)
    for made in tables:
        made.admit_request(Admit(1, 0, GREEDY, 2, adapter=1))
    (result,) = run_step(
        load(folder, 1, 3), tables[1], pass_on(run_step(first, tables[0], two_requests()))
    )
    assert result.sampled is not None
    assert expected.sampled is not None
    assert result.sampled.failed == (0,)
    assert result.sampled.sampled == expected.sampled.sampled[1:]


def test_a_request_whose_state_is_lost_fails_alone(
    make_model: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stage = load(ModelFolder.open(make_model(tmp_path, "lfm2")), 0, 4)
    made = RequestTable()
    for request in (0, 1):
        made.admit_request(Admit(request + 1, request, GREEDY, 2, state_slot=request))
    lost = RequestSlice(1, 3, 2, 2, (1, 2), True)
    header = volume(9, RequestSlice(0, 0, 2, 1, (0,), True), lost)
    (result,) = run_step(stage, made, [StepInput(header, [1, 2, 3, 4])])
    assert result.sampled is not None
    assert [each.request for each in result.sampled.sampled] == [0]
    assert result.sampled.failed == (1,)
    assert caplog.messages == ["request 1 has no state after 3 tokens"]


def test_a_failed_step_fails_all_of_its_requests(folder: ModelFolder) -> None:
    first, middle, last = (load(folder, index, index + 1) for index in range(3))
    step_inputs = pass_on(fail_step(first, table(0, 1), two_requests()))
    step_inputs = pass_on(run_step(middle, table(0, 1), step_inputs))
    (result,) = run_step(last, table(0, 1), step_inputs)
    assert result.sampled is not None
    assert (result.sampled.sampled, result.sampled.failed) == ((), (0, 1))
    (result,) = fail_step(last, table(0, 1), step_inputs)
    assert result.sampled is not None
    assert (result.sampled.sampled, result.sampled.failed) == ((), (0, 1))


def test_decode_and_prefill_are_fused_and_split_again(folder: ModelFolder) -> None:
    alone = load(folder, 0, 1)
    requests = table(0, 1)
    (prefilled,) = run_step(
        alone, requests, [StepInput(volume(3, RequestSlice(0, 0, 2, 1, (0,))), [1, 2])]
    )
    decode = StepInput(volume(4, RequestSlice(0, 2, 1, 3), prefill=False), [7])
    prefill = StepInput(volume(5, RequestSlice(1, 0, 3, 2, (1,))), [3, 4, 5])
    fused = run_step(alone, requests, [decode, prefill])
    assert [result.volume.seq for result in fused] == [4, 5]

    again, others = load(folder, 0, 1), table(0, 1)
    run_step(again, others, [StepInput(prefilled.volume, [1, 2])])
    for step_input, result in zip([decode, prefill], fused, strict=True):
        (single,) = run_step(again, others, [step_input])
        one, other = (torch.frombuffer(each.rows, dtype=torch.float32) for each in (single, result))
        torch.testing.assert_close(one, other)


def test_kept_rows_are_those_of_the_remaining_groups(folder: ModelFolder) -> None:
    stage = load(folder, 0, 3)
    whole = table(0, 1)
    (both,) = run_step(stage, whole, two_requests())
    rest = volume(9, RequestSlice(1, 0, 2, 2, (1,), True))
    (result,) = run_step(
        load(folder, 0, 3), table(1), [StepInput(rest, [1, 2, 3, 4], row_indices=(2, 3))]
    )
    assert both.sampled is not None
    assert result.sampled is not None
    assert result.sampled.sampled == both.sampled.sampled[1:]


def test_penalties_see_history_and_what_was_sampled_here(folder: ModelFolder) -> None:
    stage = load(folder, 0, 3)
    never_again = SamplingParams(temperature=0.0, frequency_penalty=2.0, repetition_penalty=100.0)
    requests = table(0, sampling=never_again)
    body = History(2, 0, 0, Payload("i32", (3,)))
    requests.add_history(body.request, body.first, [1, 2, 3])
    assert requests[0].history.token_counts == {1: 0, 2: 0, 3: 1}
    (result,) = run_step(
        stage, requests, [StepInput(volume(3, RequestSlice(0, 0, 3, 1, (0,), True)), [1, 2, 3])]
    )
    assert result.sampled is not None
    token = result.sampled.sampled[0].token
    assert requests[0].history.token_counts == {1: 0, 2: 0, 3: 1, token: 1}


def test_top_logprobs_come_with_their_token(folder: ModelFolder) -> None:
    requests = table(0, sampling=SamplingParams(temperature=0.0, logprobs=3))
    step_input = StepInput(volume(3, RequestSlice(0, 0, 2, 1, (0,), True)), [1, 2])
    (result,) = run_step(load(folder, 0, 3), requests, [step_input])
    assert result.sampled is not None
    (choice,), (top,) = result.sampled.sampled, result.tops
    assert (top.request, top.position, len(top.tokens)) == (0, 2, 3)
    assert (top.tokens[0], top.logprobs[0]) == (choice.token, choice.logprob)
    assert list(top.logprobs) == sorted(top.logprobs, reverse=True)


@pytest.mark.parametrize("stray", [1 << 30, -7])
def test_tokens_that_a_model_lacks_fail_no_drafting(
    make_model: Any, tmp_path: Path, stray: int
) -> None:
    """A prompt's next token may stand for an image, or be a hostile scheduler's."""
    made = ModelFolder.open(add_draft_layer(make_model(tmp_path, "glm4_moe", 0)))
    stage, requests = load(made, 0, made.config.layers), table(0)
    assert stage.has_mtp
    requests.add_history(0, 0, [1, stray, 3])
    header = volume(3, RequestSlice(0, 0, 3, 1, (0,), True))
    (result,) = run_step(stage, requests, [StepInput(header, [1, 2, 3])])
    assert result.sampled is not None
    assert len(result.sampled.sampled) == 1


def test_history_needs_no_order_of_prompt_and_answer(tmp_path: Path) -> None:
    made = table(0, sampling=SamplingParams(repetition_penalty=1.1))
    made.add_history(0, 0, [1])
    made.add_history(0, 1, [2, 3])
    made.add_history(0, 3, [4])
    assert made[0].history.token_counts == {1: 0, 2: 0, 3: 1, 4: 1}
    made.release_request(0)
    assert len(made) == 0


def test_a_prompts_first_chunk_is_rotated_like_its_last(make_model: Any, tmp_path: Path) -> None:
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 8,
        "long_factor": [4.0] * 8,
    }
    fields = {"rope_parameters": rope, "original_max_position_embeddings": 8}
    folder = ModelFolder.open(make_model(tmp_path, "phi3", 0, **fields))

    def rows(*counts: int) -> torch.Tensor:
        stage, requests, start, found = load(folder, 0, 2), table(0, reach=12), 0, []
        for count in counts:
            blocks = () if start else (0, 1, 2)
            header = volume(start + 1, RequestSlice(0, start, count, start, blocks))
            (result,) = run_step(
                stage, requests, [StepInput(header, list(range(start, start + count)))]
            )
            assert result.rows is not None
            found.append(torch.frombuffer(result.rows, dtype=torch.float32))
            start += count
        return torch.cat(found)

    torch.testing.assert_close(rows(4, 8), rows(12))


def test_tables_are_whole_even_if_a_copy_fails(
    folder: ModelFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage, requests = load(folder, 0, 2), table(0, 1)

    def fail(*_: object) -> None:
        raise RuntimeError("no copy")

    monkeypatch.setattr(stage, "copy_block", fail)
    header = volume(
        9, RequestSlice(0, 2, 2, 1, (0,), True, 5), RequestSlice(1, 0, 2, 2, (1,), True)
    )
    with pytest.raises(RuntimeError, match="no copy"):
        run_step(stage, requests, [StepInput(header, [1, 2, 3, 4])])
    assert [list(requests[request].blocks) for request in (0, 1)] == [[0], [1]]


def test_a_bad_grammar_fails_its_own_request_only(
    folder: ModelFolder, caplog: pytest.LogCaptureFixture
) -> None:
    stage, requests = load(folder, 0, 3), RequestTable(GrammarCompiler(folder.path, 320))
    for request in (0, 1):
        requests.admit_request(Admit(request + 1, request, GREEDY, 2))
    requests.set_grammar(0, b"\xff not a grammar")
    (result,) = run_step(stage, requests, two_requests())
    assert result.sampled is not None
    assert result.sampled.failed == (0,)
    assert [choice.request for choice in result.sampled.sampled] == [1]
    assert "request failed" in caplog.text
