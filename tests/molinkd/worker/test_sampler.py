"""The last stage reports the tokens that a grammar forces; they are verified without logits."""

import json
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from molink.checkpoint.model_folder import ModelFolder
from molink.facts.drafts import MAX_DRAFTS
from molink.ring.step import StepInput, StepOutput
from molink.stage.batch import StageInput, StageOutput
from molink.stage.stage import Stage
from molink.text import grammar_matcher as matcher
from molink.text.grammar import build_grammar
from molink.text.grammar_matcher import GrammarCompiler
from molink.wire.messages.base import Payload
from molink.wire.messages.data_plane import (
    Admit,
    ForcedTokens,
    RequestSlice,
    SamplerOutput,
    SamplingParams,
    Volume,
)
from molinkd.worker.request_table import RequestTable
from molinkd.worker.sampler import precompute_masks
from molinkd.worker.step import run_step

SCHEMA = {
    "type": "object",
    "properties": {"a_long_name": {"enum": [12, 345]}, "b": {"const": "x"}},
    "required": ["a_long_name", "b"],
    "additionalProperties": False,
}
PROMPT = [5, 6]


@pytest.fixture(scope="module")
def folder(make_model: Any, tmp_path_factory: pytest.TempPathFactory) -> ModelFolder:
    torch.set_num_threads(1)
    return ModelFolder.open(make_model(tmp_path_factory.mktemp("tail")))


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy PC takes longer to compile a grammar than a swarm waits for it."""
    monkeypatch.setattr(matcher, "COMPILE_TIMEOUT_S", 60)


class Tail:
    """A stage with all layers, for one request."""

    def __init__(self, folder: ModelFolder, sampling: SamplingParams) -> None:
        self.stage = Stage.load_layers(folder, (0, folder.config.layers), "cpu", "f32")
        self.stage.allocate_kv_pool(16, 8)
        self.requests = RequestTable(GrammarCompiler(folder.path, folder.config.vocab_size))
        self.requests.admit_request(Admit(1, 0, sampling, len(PROMPT)))
        self.requests.set_grammar(0, build_grammar("json_schema", json.dumps(SCHEMA), "compact"))
        self.logits: list[int] = []
        self._compute_step = self.stage.compute_step
        self.stage.compute_step = self.spy  # type: ignore[method-assign]
        self.seq = 1
        self.last: Sequence[StepOutput] = ()

    def spy(self, batch: StageInput, between_layers: object = None) -> StageOutput:
        self.logits.append(len(batch.logit_rows))
        return self._compute_step(batch)

    def step(self, tokens: Sequence[int], start: int, drafts: Sequence[int] = ()) -> SamplerOutput:
        self.seq += 1
        blocks = () if start else tuple(range(16))
        count = len(tokens) + len(drafts)
        rows = RequestSlice(0, start, count, self.seq - 1, blocks, True, -1, tuple(drafts))
        header = Volume(self.seq, start == 0, (rows,), Payload("i32", (count,)))
        self.last = run_step(self.stage, self.requests, [StepInput(header, [*tokens, *drafts])])
        (result,) = self.last
        assert result.sampled is not None
        assert not result.sampled.failed
        return result.sampled

    def answer(self, ends: Sequence[int], *, drafted: bool, prepared: bool) -> list[int]:
        """Generate until a token of ``ends``, with forced tokens as drafts if ``drafted``."""
        found = [*PROMPT]
        sampled = self.step(PROMPT, 0)
        while True:
            found += [choice.token for choice in sampled.sampled]
            if found[-1] in ends:
                return found
            if prepared:
                precompute_masks(self.requests, self.last)
            (drafts,) = (each.tokens for each in sampled.forced or (ForcedTokens(0, ()),))
            drafts = tuple(token for token in drafts if token not in ends) if drafted else ()
            sampled = self.step(found[-1:], len(found) - 1, drafts)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("prepared", [False, True])
def test_forced_tokens_come_many_at_a_time_and_take_no_logits(
    folder: ModelFolder, temperature: float, prepared: bool
) -> None:
    ends = matcher.Tokenizer.open(folder.path).eos_ids
    sampling = SamplingParams(temperature=temperature, seed=4)
    plain, ahead = Tail(folder, sampling), Tail(folder, sampling)
    expected = plain.answer(ends, drafted=False, prepared=False)
    assert ahead.answer(ends, drafted=True, prepared=prepared) == expected
    assert len(ahead.logits) < 0.5 * len(plain.logits)
    assert max(ahead.logits) == 1


def test_logprobs_of_forced_tokens_are_the_models(folder: ModelFolder) -> None:
    tail = Tail(folder, SamplingParams(temperature=0.0, logprobs=0))
    first = tail.step(PROMPT, 0)
    ((forced,),) = ((each.tokens for each in first.forced),)
    assert 3 < len(forced) <= MAX_DRAFTS
    drafted = tail.step([first.sampled[0].token], 2, forced)
    assert [choice.token for choice in drafted.sampled][:-1] == list(forced)
    assert tail.logits[1] == 1 + len(forced)
    assert all(choice.logprob < 0 for choice in drafted.sampled)


def test_precomputed_masks_are_reused(folder: ModelFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    tail = Tail(folder, SamplingParams(temperature=0.0))
    sampled = tail.step(PROMPT, 0)
    precompute_masks(tail.requests, tail.last)
    requested = []
    real = matcher._compute_mask
    monkeypatch.setattr(matcher, "_compute_mask", lambda it: requested.append(it) or real(it))
    constraint = tail.requests[0].matcher
    assert constraint is not None
    forced = sampled.forced[0].tokens
    masks = constraint.compute_masks(forced)
    assert constraint.compute_masks(forced[:2]) == masks[:3]
    assert not requested
    wrong = (forced[0], forced[0])
    assert constraint.compute_masks(wrong)[:2] == masks[:2]
    assert requested
    constraint.add_tokens(forced[:1])
    assert constraint.compute_masks() == masks[1:2]


def test_masks_are_not_precomputed_for_finished_requests(
    folder: ModelFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    finished, running = (Tail(folder, SamplingParams(temperature=0.0)) for _ in range(2))
    for tail in (finished, running):
        tail.step(PROMPT, 0)
    computed = []
    real = matcher._compute_mask
    monkeypatch.setattr(matcher, "_compute_mask", lambda it: computed.append(it) or real(it))
    finished.requests.release_request(0)
    precompute_masks(finished.requests, finished.last)
    assert not computed
    precompute_masks(running.requests, running.last)
    assert computed
