"""Multimodal models equal transformers: whole, split, in chunks, and after cached prefixes."""

from pathlib import Path
from typing import Any

import pytest
import torch

from molink.checkpoint.model_folder import ModelFolder
from molink.errors import UsageError
from tests.support.low_bit_models import write_low_bit
from tests.support.models import MakeModel
from tests.support.sight import (
    PROMPT_TEXT,
    SeeingRing,
    SeenModel,
    SeenPrompt,
    make_picture,
    make_seeing,
)

FAMILIES = (
    *("smolvlm", "mistral3", "gemma3", "gemma4", "gemma4_unified"),
    *("qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5"),
)


@pytest.fixture(params=FAMILIES, scope="module")
def seen(
    request: pytest.FixtureRequest, make_model: MakeModel, tmp_path_factory: pytest.TempPathFactory
) -> SeenModel:
    """A multimodal model, with a prompt."""
    folder = tmp_path_factory.mktemp("seen") / "model"
    return SeenModel(make_seeing(make_model, folder, request.param))


@pytest.mark.parametrize("splits", [(), (1,), (1, 2)], ids=["whole", "two stages", "three stages"])
@pytest.mark.parametrize("chunk", [1024, 7])
def test_a_prompt_with_images(seen: SeenModel, splits: tuple[int, ...], chunk: int) -> None:
    ring = SeeingRing(seen.folder, tuple(split + seen.first - 1 for split in splits))
    logits = ring.run_prompt(seen.prompt, seen.blocks, chunk)
    torch.testing.assert_close(logits, seen.logits, rtol=0, atol=1e-4)
    assert ring.decode(seen.prompt, logits, 32, seen.blocks) == seen.answer


@pytest.mark.parametrize("seen", [one for one in FAMILIES if one != "qwen3_5"], indirect=True)
def test_a_prompt_whose_beginning_is_cached(seen: SeenModel) -> None:
    ring, spans = SeeingRing(seen.folder), [image.span for image in seen.prompt.images]
    ring.run_prompt(seen.prompt, seen.blocks)
    starts = (spans[0].start, spans[0].start + 2, spans[0].end, len(seen.prompt.ids) - 1)
    for first in starts:
        logits = ring.run_prompt(seen.prompt, seen.blocks, first=first)
        torch.testing.assert_close(logits, seen.logits[first:], rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("family", "section"),
    [
        ("qwen2_5_vl", {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True}),
        ("qwen3_vl", {"quant_method": "fp8", "weight_block_size": [32, 32]}),
    ],
)
def test_a_quantized_decoder_beside_its_tower(
    make_model: MakeModel, tmp_path: Path, family: str, section: dict[str, Any]
) -> None:
    folder = make_seeing(make_model, tmp_path / "model", family)
    section = section | {"modules_to_not_convert": ["lm_head", "visual"]}
    stored = write_low_bit(folder, tmp_path / "stored", tmp_path / "exact", section)
    seen = SeenModel(tmp_path / "exact")
    ring = SeeingRing(stored, avoid=("compiled-linear",))
    logits = ring.run_prompt(seen.prompt, seen.blocks)
    torch.testing.assert_close(logits, seen.logits, rtol=0, atol=1e-4)
    assert ring.decode(seen.prompt, logits, 32, seen.blocks) == seen.answer


@pytest.mark.parametrize("seen", ["qwen3_vl"], indirect=True)
@pytest.mark.parametrize("layers", [(0, 1), (1, 4)])
def test_one_stage_has_all_layers_that_add_rows_of_images(
    seen: SeenModel, layers: tuple[int, int]
) -> None:
    assert seen.first == 2
    with pytest.raises(UsageError, match="cut layers 1-2, which one stage must hold"):
        ModelFolder.open(seen.folder, layers)


def test_other_pixels_have_other_ids(seen: SeenModel) -> None:
    pictures = [make_picture(40, 24, 1), make_picture(20, 50, 3)]
    other = SeenPrompt.from_text(seen.folder, PROMPT_TEXT, pictures)
    differing = [
        position
        for position, (one, two) in enumerate(zip(seen.prompt.ids, other.ids, strict=True))
        if one != two
    ]
    changed = [image.span for image in seen.prompt.images if image not in other.images]
    assert changed
    assert differing == [
        position
        for span in changed
        for position in range(span.start, span.end)
        if span.row_at(position) is not None
    ]
