"""GGUF models with an mmproj file equal transformers with the values that the files hold."""

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from molink.checkpoint.gguf_import import import_gguf, read_gguf_model
from molink.checkpoint.hub import NullCounter
from tests.support.gguf_models import Kind
from tests.support.mmproj_models import write_seeing_gguf
from tests.support.models import MakeModel
from tests.support.sight import SeeingRing, SeenModel, SeenPrompt, make_picture, make_seeing

#: Each family with the type of most of the tower's weights.
CASES = (
    ("gemma3", Kind.F32),
    ("smolvlm", Kind.F16),
    ("mistral3", Kind.F32),
    ("qwen2_5_vl", Kind.F16),
    ("qwen3_vl", Kind.Q8_0),
    ("qwen3_vl_moe", Kind.F16),
    ("qwen3_5", Kind.F32),
)
OTHER_CASES = tuple(
    pytest.param(family, kind, marks=pytest.mark.slow)
    for family, usual in CASES
    for kind in (Kind.F32, Kind.F16, Kind.Q8_0)
    if kind is not usual
)
#: Fields of text models that GGUF has no keys for have llama.cpp's values.
FIELDS: dict[str, dict[str, Any]] = {"gemma3": {"query_pre_attn_scalar": 16}}


def unpack(path: Path, into: Path) -> Path:
    return import_gguf(path, into, NullCounter(), threading.Event())


@pytest.mark.parametrize(("family", "kind"), [*CASES, *OTHER_CASES])
def test_a_prompt_with_images(
    make_model: MakeModel, tmp_path: Path, family: str, kind: Kind
) -> None:
    folder, exact = tmp_path / "model", tmp_path / "exact"
    make_seeing(make_model, folder, family, **FIELDS.get(family, {}))
    path = write_seeing_gguf(folder, tmp_path / "gguf", kind, exact=exact)
    seen, made = SeenModel(exact), unpack(path, tmp_path / "into")
    ring = SeeingRing(made, (seen.first,), avoid=("compiled-linear",))
    logits = ring.run_prompt(seen.prompt, seen.blocks, 7)
    torch.testing.assert_close(logits, seen.logits, rtol=0, atol=1e-4)
    assert ring.decode(seen.prompt, logits, 32, seen.blocks) == seen.answer
    pictures = [make_picture(40, 24, 1), make_picture(20, 50, 2)]
    assert SeenPrompt.from_text(made, "@ and @", pictures).ids == (
        SeenPrompt.from_text(folder, "@ and @", pictures).ids
    )
    config, entries = read_gguf_model(path)
    assert config.vision is not None
    assert any(name.startswith("vision.") for name in entries)
