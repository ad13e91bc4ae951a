"""Requests whose steps alternate on two stages never get each other's rows, over many steps."""

import random
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from molink.checkpoint.model_folder import ModelFolder
from molink.ring.step import StepInput
from molink.stage.stage import Stage
from molink.wire.messages.base import Payload
from molink.wire.messages.data_plane import Admit, RequestSlice, SamplingParams, Volume
from molinkd.worker.request_table import RequestTable
from molinkd.worker.step import run_step
from tests.support.models import MakeModel

REQUESTS, BLOCK_SIZE = 6, 8
#: Tokens of the shortest prompt; each further one has this many more, not a multiple of blocks.
SHORTEST, LONGER = 5, 11
DEVICES = [
    pytest.param("cpu", 60, id="cpu"),
    pytest.param("cuda:0", 20_000, id="cuda", marks=pytest.mark.gpu),
]


@dataclass
class Turns:
    """Two stages as two workers run them; each step of a request computes its last token again."""

    stages: Sequence[Stage]
    tables: Sequence[RequestTable]
    prompts: Sequence[Sequence[int]]
    seq: int = 0

    def run(
        self, requests: Sequence[int], *, whole: bool = False
    ) -> tuple[torch.Tensor, list[int]]:
        """Compute each last token, or all; returns the rows between the stages and the tokens."""
        self.seq += 1
        groups, tokens = [], list[int]()
        for request in requests:
            ids = self.prompts[request]
            start = 0 if whole else len(ids) - 1
            count = -(-len(ids) // BLOCK_SIZE) if whole else 0
            blocks = tuple(range(request * 16, request * 16 + count))
            groups.append(RequestSlice(request, start, len(ids) - start, 0, blocks, sample=True))
            tokens += ids[start:]
        header = Volume(self.seq, whole, tuple(groups), Payload("i32", (len(tokens),)))
        (first,) = run_step(self.stages[0], self.tables[0], [StepInput(header, tokens)])
        (last,) = run_step(self.stages[1], self.tables[1], [StepInput(header, first.rows)])
        assert first.rows is not None
        assert last.sampled is not None
        rows = torch.frombuffer(first.rows, dtype=torch.float32).view(len(tokens), -1)
        return rows, [choice.token for choice in last.sampled.sampled]


@pytest.fixture
def threads() -> Iterator[tuple[ThreadPoolExecutor, ThreadPoolExecutor]]:
    """A thread that allocates and one that computes, as in a worker."""
    with ThreadPoolExecutor(1) as allocates, ThreadPoolExecutor(1) as computes:
        yield allocates, computes


@pytest.mark.parametrize(("device", "steps"), DEVICES)
def test_no_row_is_that_of_another_request(
    make_model: MakeModel,
    tmp_path: Path,
    threads: tuple[ThreadPoolExecutor, ThreadPoolExecutor],
    device: str,
    steps: int,
) -> None:
    if device != "cpu" and not torch.cuda.is_available():
        pytest.skip("no CUDA device; run `pytest -m gpu` on a PC that has one")
    folder = ModelFolder.open(make_model(tmp_path))
    stages = [Stage.load_layers(folder, layers, device, "f32") for layers in ((0, 1), (1, 3))]
    for stage in stages:
        threads[0].submit(stage.allocate_kv_pool, 16 * REQUESTS, BLOCK_SIZE).result()
    turns = Turns(stages, (_table(), _table()), [_prompt(request) for request in range(REQUESTS)])
    rng = random.Random(1)

    def compute() -> list[str]:
        for request in range(REQUESTS):
            turns.run([request], whole=True)
        alone = [turns.run([request]) for request in range(REQUESTS)]
        wrong = []
        for step in range(steps):
            chosen = rng.sample(range(REQUESTS), rng.choice((1, 1, 2, 3)))
            rows, tokens = turns.run(chosen)
            right = torch.cat([alone[request][0] for request in chosen])
            if not torch.allclose(rows, right, atol=1e-3, rtol=0):
                wrong.append(f"step {step}: rows of {chosen}")
            if tokens != [token for request in chosen for token in alone[request][1]]:
                wrong.append(f"step {step}: tokens of {chosen}")
        return wrong

    assert threads[1].submit(compute).result() == []


def _table() -> RequestTable:
    table = RequestTable()
    for request in range(REQUESTS):
        table.admit_request(Admit(request + 1, request, SamplingParams(temperature=0.0), 1))
    return table


def _prompt(request: int) -> list[int]:
    rng = random.Random(request)
    return [rng.randrange(256) for _ in range(SHORTEST + LONGER * request)]
