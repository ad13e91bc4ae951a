"""``tools.bench_card`` and ``molink bench stage`` time the same steps; tested without a card."""

from pathlib import Path
from typing import Any

import pytest
import torch

from molink.checkpoint.model_folder import ModelFolder
from molink.facts.model import BLOCK_SIZE
from molink.stage.batch import StageInput, StageOutput
from molink.stage.diagnostics import stage_passes
from molink.stage.diagnostics.stage_profile import profile_stage
from molink.stage.stage import Stage
from tests.support.models import MakeModel
from tools import bench_card

ROWS, CONTEXT = 64, 128


def test_both_benchmarks_time_the_same_step(
    make_model: MakeModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = ModelFolder.open(make_model(tmp_path))
    steps: list[list[Any]] = []
    compute, sample = Stage.compute_step, stage_passes.sample_tokens

    def record_step(stage: Stage, batch: StageInput) -> StageOutput:
        assert batch.tokens is not None
        steps.append([batch.tokens.tolist(), batch.sequences, batch.logit_rows])
        return compute(stage, batch)

    def record_sampling(logits: torch.Tensor, rows: Any, *given: Any) -> Any:
        steps[-1] += [len(logits), rows]
        return sample(logits, rows, *given)

    monkeypatch.setattr(Stage, "compute_step", record_step)
    monkeypatch.setattr(stage_passes, "sample_tokens", record_sampling)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    monkeypatch.setattr(bench_card, "_STEPS", ((ROWS, CONTEXT),))
    bench_card.measure_steps(bench_card.Card(folder, torch.device("cpu")), "none")
    by_tool, steps[:] = list(steps), []
    stage = Stage.load_layers(folder, (0, folder.config.layers), "cpu")
    profile_stage(stage, 1 << 30, BLOCK_SIZE, seconds=60)
    by_profile = [step for step in steps if len(step[1]) == ROWS]
    assert by_tool[0][2] == tuple(range(ROWS))
    assert {len(step) for step in by_tool} == {5}  # each step was sampled
    assert all(step == by_tool[0] for step in by_tool + by_profile)
    assert by_profile
