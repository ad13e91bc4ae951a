"""LongRoPE as workers run it: short and long prompts get transformers' answers."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from molink.checkpoint.model_folder import ModelFolder
from molink.ring.step import StepInput
from molink.scheduler.config import SchedulerConfig
from molink.scheduler.scheduler import Scheduler
from molink.stage.stage import Stage
from molink.wire.messages.data_plane import Admit, BlockTable, Release, SamplingParams
from molink.wire.messages.serving import OutputToken
from molinkd.worker.request_table import RequestTable
from molinkd.worker.step import run_step
from tests.support.models import MakeModel
from tests.support.request_states import make_state
from tests.support.stage import Reference

GREEDY = SamplingParams(temperature=0.0, logprobs=0)
#: As Phi-3-mini-128k has it, with a smaller context.
PHI3 = {
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0, 1.05, 1.1, 1.2, 1.4, 1.6, 1.8, 2.0],
        "long_factor": [1.0, 1.5, 3.0, 6.0, 12.0, 20.0, 30.0, 40.0],
    },
    "original_max_position_embeddings": 4096,
    "max_position_embeddings": 8192,
    "sliding_window": None,
}
#: Tolerance of log-probabilities whose float32 sums have another order.
CLOSE = 2e-4


class Workers:
    """A scheduler and two stages that pass each other what workers do."""

    def __init__(self, folder: Path) -> None:
        opened = ModelFolder.open(folder)
        config = opened.config
        limits = SchedulerConfig(
            700,
            16,
            2,
            max_num_batched_tokens=512,
            max_model_len=config.max_model_len,
            short_context=config.short_context,
        )
        self.scheduler = Scheduler(limits, 1)
        bounds = (0, 1), (1, config.layers)
        self._stages = [Stage.load_layers(opened, layers, "cpu", "f32") for layers in bounds]
        self._tables = [RequestTable() for _ in self._stages]
        for stage in self._stages:
            stage.allocate_kv_pool(limits.num_blocks, limits.block_size)

    def serve(self, *asked: tuple[Sequence[int], int]) -> list[list[OutputToken]]:
        """Submit (prompt, tokens to generate) at once; returns the first 32 tokens of each answer.

        After those the client's credit is used up, and it cancels its requests.
        """
        for number, (tokens, count) in enumerate(asked):
            prompt = tuple(tokens)
            request = make_state(
                "d", str(number), prompt, len(prompt), count, GREEDY, credit_window=32
            )
            self.scheduler.submit_request(request, 0.0)
        told = self._run()
        self.scheduler.cancel_peer("d", 0.0)
        told += self._run()
        return [[one for one in told if one.key == str(key)] for key in range(len(asked))]

    def _run(self) -> list[OutputToken]:
        told: list[OutputToken] = []
        while (batch := self.scheduler.next_batch(0.0)) is not None:
            for control in batch.controls:
                for table in self._tables:
                    match control.body:
                        case Admit() as admit:
                            table.admit_request(admit)
                        case BlockTable(request=one):
                            table.append_blocks(one, control.ids or ())
                        case Release(request=one):
                            table.release_request(one)
            for volume in batch.volumes:
                step_inputs = [StepInput(volume.header, volume.tokens)]
                for stage, table in zip(self._stages, self._tables, strict=True):
                    results = run_step(stage, table, step_inputs)
                    step_inputs = [StepInput(result.volume, result.rows) for result in results]
                assert results[0].sampled is not None
                emissions = self.scheduler.on_sampled(results[0].sampled, {}, 0.0)
                told += [
                    each.message for each in emissions if isinstance(each.message, OutputToken)
                ]
            for control in batch.controls:
                if isinstance(control.body, Release):
                    self.scheduler.on_released(control.body.seq, 0.0)
            self.scheduler.validate()
        return told


@pytest.fixture(scope="module")
def folder(make_model: MakeModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    made = make_model(tmp_path_factory.mktemp("phi3"), "phi3", 5, **PHI3)
    assert json.loads((made / "config.json").read_text())["max_position_embeddings"] == 8192
    return made


@pytest.fixture(scope="module")
def reference(folder: Path) -> Reference:
    return Reference(folder)


def prompt(count: int) -> list[int]:
    generator = torch.Generator().manual_seed(9)
    return torch.randint(0, 256, (count,), generator=generator).tolist()


def check(reference: Reference, tokens: Sequence[int], answer: Sequence[OutputToken]) -> None:
    """Compare greedy tokens and their log-probabilities with one forward pass over all tokens."""
    found = [one.token for one in answer]
    logits = reference.logits([*tokens, *found[:-1]])[len(tokens) - 1 :]
    assert logits.argmax(-1).tolist() == found
    expected = logits.log_softmax(-1).max(-1).values
    likely = torch.tensor([one.logprob for one in answer])
    torch.testing.assert_close(likely, expected, atol=CLOSE, rtol=0)


def test_short_and_long_prompts(folder: Path, reference: Reference) -> None:
    workers = Workers(folder)
    short, long = prompt(40), prompt(4200)
    # Both at once, in one batch: each prompt's rows are rotated by its own frequencies.
    answers = workers.serve((short, 20), (long, 4))
    check(reference, short, answers[0])
    check(reference, long, answers[1])
    # One after the other: short and long prompts share no cached blocks.
    (again,) = workers.serve((prompt(60), 4))
    check(reference, prompt(60), again)
    assert again[0].cached_tokens == 40  # although the long prompt begins with the same 60 tokens
    (again,) = workers.serve(([*long, 5], 4))
    check(reference, [*long, 5], again)
    assert again[0].cached_tokens == 4200


def test_a_prompt_whose_answer_may_be_long_is_rotated_for_that(
    folder: Path, reference: Reference
) -> None:
    workers = Workers(folder)
    tokens = prompt(40)
    short = workers.serve((tokens, 2))[0][0]
    # The pool stores keys of up to 4096 tokens, and the last sampled token needs none, so this
    # answer is the longest that counts as short.
    fits = workers.serve((tokens, 4096 + 1 - 40))[0][0]
    long = workers.serve((tokens, 4096 + 2 - 40))[0][0]
    assert fits.logprob == pytest.approx(short.logprob, abs=CLOSE)
    assert abs(long.logprob - short.logprob) > 0.01
    check(reference, tokens, [short])
