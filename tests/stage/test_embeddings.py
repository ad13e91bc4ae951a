"""An embedding model's last row equals transformers', whole, split and in chunks."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from molink.checkpoint.model_folder import ModelFolder
from molink.stage.batch import SequenceRows
from tests.support.models import MakeModel, make_embedding_model
from tests.support.stage import Reference, Ring

BLOCKS = (5, 2, 9, 0, 7, 3)
LENGTH = 40
MODELS: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "qwen3 tied": {"tie_word_embeddings": True},
    "mistral": {},
    "gemma2": {},
}


@pytest.mark.parametrize("named", MODELS)
def test_the_last_row(
    make_model: MakeModel,
    tmp_path: Path,
    make_reference: type[Reference],
    random_tokens: Callable[..., list[int]],
    named: str,
) -> None:
    folder = make_model(tmp_path, named.split()[0], 4, **MODELS[named])
    tokens = random_tokens(LENGTH)
    with torch.inference_mode():
        model = make_reference(folder).model.model
        expected = model(torch.tensor([tokens])).last_hidden_state[0, -1]
    make_embedding_model(folder)
    assert "lm_head.weight" not in ModelFolder.open(folder).tensors
    for splits in ((), (1,), (1, 2)):
        for chunk in (LENGTH, 7, 1):
            ring = Ring(folder, splits)
            for start in range(0, LENGTH, chunk):
                rows = tokens[start : start + chunk]
                end = start + len(rows)
                wanted = [len(rows) - 1] if end == LENGTH else []
                found = ring.run(rows, [SequenceRows(start, len(rows), BLOCKS)], wanted)
                assert found.shape == (len(wanted), len(expected))
            torch.testing.assert_close(found[0], expected, atol=1e-5, rtol=1e-5)
