"""The last stage of an embedding model: a row per prompt, and failed requests."""

from array import array
from pathlib import Path

import pytest
import torch

from molink.checkpoint.model_folder import ModelFolder
from molink.ring.step import StepInput, StepOutput
from molink.stage.batch import SequenceRows
from molink.stage.stage import Stage
from molink.wire.messages.base import Payload
from molink.wire.messages.data_plane import Admit, RequestSlice, SampledId, SamplingParams, Volume
from molinkd.worker.request_table import RequestTable
from molinkd.worker.step import fail_step, run_step
from tests.support.models import MakeModel, make_embedding_model
from tests.support.stage import Ring

TOKENS = [5, 6, 7, 8, 9]


@pytest.fixture(scope="module")
def folder(make_model: MakeModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return make_embedding_model(make_model(tmp_path_factory.mktemp("embed"), "qwen3", 2))


@pytest.fixture
def stage(folder: Path) -> Stage:
    stage = Stage.load_layers(ModelFolder.open(folder), (0, 3), "cpu", "f32")
    stage.allocate_kv_pool(8, 4)
    return stage


def table(*requests: int) -> RequestTable:
    """The last stage's requests; without a grammar compiler, since embedding models need none."""
    made = RequestTable()
    for request in requests:
        made.admit_request(Admit(request + 1, request, SamplingParams(), 2))
    return made


def step(*slices: RequestSlice, prefill: bool = True) -> list[StepInput]:
    count = sum(each.count for each in slices)
    header = Volume(9, prefill, slices, Payload("i32", (count,)))
    return [StepInput(header, TOKENS[:count])]


def rows(result: StepOutput) -> dict[tuple[int, int], torch.Tensor]:
    for body, data in result.pooled:
        assert body.payload == Payload("f32", (64,))
        assert len(data) == body.payload.nbytes
    return {
        (body.request, body.position): torch.tensor(array("f", data))
        for body, data in result.pooled
    }


def test_a_row_for_each_sampled_slice(stage: Stage, folder: Path) -> None:
    slices = (
        RequestSlice(0, 0, 2, 1, (0,), True),
        RequestSlice(1, 0, 2, 2, (1,), True),
        RequestSlice(2, 0, 1, 3, (2,)),
    )
    (result,) = run_step(stage, table(0, 1, 2), step(*slices))
    assert result.sampled is not None
    assert result.sampled.failed == ()
    found = rows(result)
    assert found.keys() == {(0, 2), (1, 2)}
    assert [(each.request, each.position, each.token) for each in result.sampled.sampled] == [
        (0, 2, 0),
        (1, 2, 0),
    ]
    for request, tokens in enumerate((TOKENS[:2], TOKENS[2:4])):
        expected = Ring(folder).run(tokens, [SequenceRows(0, 2, (3,))], [1])[0]
        torch.testing.assert_close(found[request, 2], expected, atol=1e-5, rtol=0)


def test_drafts_are_ignored(stage: Stage) -> None:
    requests = table(0)
    run_step(stage, requests, step(RequestSlice(0, 0, 2, 1, (0,), True)))
    drafted = RequestSlice(0, 2, 3, 1, (1,), True, -1, (0, 0))
    (result,) = run_step(stage, requests, step(drafted, prefill=False))
    assert result.sampled is not None
    assert [each.position for each in result.sampled.sampled] == [3]
    assert rows(result).keys() == {(0, 3)}


def test_requests_that_fail(stage: Stage) -> None:
    """One failed before, one has a grammar, and in the last case no row is finite."""
    requests = table(0, 1)
    requests[0].failed = True
    requests.set_grammar(1, b"x")
    both = step(RequestSlice(0, 0, 2, 1, (0,), True), RequestSlice(1, 0, 2, 2, (1,), True))
    for results in (run_step(stage, requests, both), fail_step(stage, table(0, 1), both)):
        (result,) = results
        assert result.sampled is not None
        assert (result.sampled.sampled, result.sampled.failed) == ((), (0, 1))
        assert result.pooled == ()
    assert stage._decoder.norm is not None
    with torch.inference_mode():
        stage._decoder.norm.weight[3] = torch.inf
    (result,) = run_step(stage, table(0), step(RequestSlice(0, 0, 2, 1, (0,), True)))
    assert result.sampled is not None
    assert result.sampled.failed == (0,)
    assert SampledId(0, 2, 0) not in result.sampled.sampled
    assert result.pooled == ()
