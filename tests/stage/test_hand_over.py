"""A stage that changes its layers doesn't read again those that it has."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from molink.checkpoint.model_folder import ModelFolder
from molink.stage.stage import Stage
from molink.stage.weights.weight_reader import WeightReader
from tests.support.models import MakeModel
from tests.support.stage import Ring

PROMPT = [5, 9, 2, 7, 1]


def load(folder: Path, layers: tuple[int, int], **options: Any) -> Stage:
    return Stage.load_layers(ModelFolder.open(folder), layers, "cpu", "f32", **options)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    ("before", "after"), [([1, 2], [2]), ([1], [2]), ([2], [1]), ([1], []), ([], [1])]
)
def test_reused_layers_compute_the_same(
    make_model: MakeModel, tmp_path: Path, before: list[int], after: list[int], tied: bool
) -> None:
    folder = make_model(tmp_path, tie_word_embeddings=tied)
    ring = Ring(folder, before)
    expected = ring.generate(PROMPT, 12, range(8))
    bounds = [0, *after, ring.stages[-1].layers[1]]
    held = [stage.layers for stage in ring.stages]
    stages = []
    for old, layers in zip(ring.stages, pairwise(bounds), strict=False):
        stages.append(load(folder, layers, held=old.release_weights(layers)))
    stages += [load(folder, layers) for layers in list(pairwise(bounds))[len(held) :]]
    ring.stages = stages
    for stage in stages:
        stage.allocate_kv_pool(64, 8)
    assert ring.generate(PROMPT, 12, range(8)) == expected


def test_only_new_layers_are_read(
    make_model: MakeModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_model(tmp_path)
    old = load(folder, (0, 2))
    before = old.weight_bytes
    read: list[str] = []
    merge = WeightReader._merge_tensors

    def note(self: WeightReader, names: Any, dtype: torch.dtype) -> torch.Tensor:
        read.extend(names)
        return merge(self, names, dtype)

    monkeypatch.setattr(WeightReader, "_merge_tensors", note)
    new = load(folder, (1, 3), held=old.release_weights((1, 3)))
    assert {name.split(".")[2] for name in read if name.startswith("model.layers.")} == {"2"}
    assert not any("embed" in name for name in read)
    # The old stage frees what it gives up; what it hands over counts for the new one.
    assert old.weight_bytes == 0
    assert new.weight_bytes == load(folder, (1, 3)).weight_bytes
    assert before > 0
