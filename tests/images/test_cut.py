"""Images are resized and placed in prompts as the released processors do."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from molink.checkpoint.config import ModelConfig
from molink.checkpoint.vision import VisionConfig
from molink.errors import RequestError
from molink.images.cut import cut_image
from molink.images.prompt import encode_prompt
from molink.text.tokenizer import Tokenizer
from tests.support.models import MakeModel
from tests.support.sight import (
    IMAGE_ID,
    PREPROCESSORS,
    cell_patches,
    make_picture,
    make_seeing,
)

PROCESSORS: dict[str, tuple[Any, dict[str, Any]]] = {
    "smolvlm": (Idefics3ImageProcessorPil, {"return_row_col_info": True}),
    "mistral3": (PixtralImageProcessorPil, {"patch_size": 16}),
    "gemma3": (Gemma3ImageProcessorPil, {}),
    "qwen2_5_vl": (Qwen2VLImageProcessorPil, {}),
    "qwen3_vl": (Qwen2VLImageProcessorPil, {}),
}
SIZES = [(30, 20), (100, 170), (64, 64), (8, 200), (400, 90), (2, 2)]


def open_vision(folder: Path) -> VisionConfig:
    vision = ModelConfig.load_folder(folder).vision
    assert vision is not None
    return vision


@pytest.fixture
def seeing(request: Any, make_model: MakeModel, tmp_path: Path) -> Path:
    """A small multimodal model."""
    return make_seeing(make_model, tmp_path / "model", request.param)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("seeing", PROCESSORS, indirect=True)
def test_pixels_of_the_released_processors(
    seeing: Path, size: tuple[int, int], request: pytest.FixtureRequest
) -> None:
    family = request.node.callspec.params["seeing"]
    picture, vision = make_picture(*size), open_vision(seeing)
    cut, (kind, more) = cut_image(picture, vision), PROCESSORS[family]
    given = PREPROCESSORS[family] | {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    if vision.rules.layout == "cells":
        given |= {"patch_size": 4}
    found = kind(**given)(picture, return_tensors="pt", **more)
    ours = np.stack([np.array(tile) for tile in cut.tiles])
    pixels = (torch.from_numpy(ours).permute(0, 3, 1, 2) / 255 - 0.5) / 0.5
    if vision.rules.layout == "cells":
        pixels = cell_patches(pixels[0], vision)
        lines, columns = (extent // vision.patch_size for extent in cut.tiles[0].size[::-1])
        assert found["image_grid_thw"].tolist() == [[1, lines, columns]]
    expected = found["pixel_values"]
    torch.testing.assert_close(pixels, expected.view(pixels.shape), rtol=0, atol=1e-5)


@pytest.mark.parametrize("size", [*SIZES, (300, 2), (3, 900), (1000, 1000)])
@pytest.mark.parametrize("seeing", ["gemma4"], indirect=True)
def test_pixels_within_a_budget_of_tokens(seeing: Path, size: tuple[int, int]) -> None:
    rules = PREPROCESSORS["gemma4"] | {"max_soft_tokens": 70}
    (seeing / "preprocessor_config.json").write_text(json.dumps(rules))
    picture, vision = make_picture(*size), open_vision(seeing)
    cut = cut_image(picture, vision)
    found = Gemma4ImageProcessorPil(**rules)(picture, return_tensors="pt")
    lines, columns = (extent // vision.patch_size for extent in cut.tiles[0].size[::-1])
    pixels = torch.from_numpy(np.array(cut.tiles[0])) / 255
    split = pixels.view(lines, vision.patch_size, columns, vision.patch_size, 3)
    patches = split.transpose(1, 2).reshape(lines * columns, -1)
    expected = found["pixel_values"][0][: lines * columns]
    torch.testing.assert_close(patches, expected.float(), rtol=0, atol=1e-5)
    assert cut.text.count("<|image|>") == int(found["num_soft_tokens_per_image"][0])


@pytest.mark.parametrize("seeing", ["gemma4"], indirect=True)
def test_low_detail_within_a_budget_of_tokens(seeing: Path) -> None:
    rules = PREPROCESSORS["gemma4"] | {"max_soft_tokens": 1120}
    (seeing / "preprocessor_config.json").write_text(json.dumps(rules))
    vision, picture = open_vision(seeing), make_picture(400, 400)
    high, low = (cut_image(picture, vision, low_detail=low) for low in (False, True))
    assert (high.text.count("<|image|>"), low.text.count("<|image|>")) == (33 * 33, 8 * 8)


@pytest.mark.parametrize("seeing", ["smolvlm"], indirect=True)
def test_tiles_in_a_prompt(seeing: Path) -> None:
    cut = cut_image(make_picture(60, 30), open_vision(seeing))
    row = "<fake_token_around_image><row_1_col_{}>" + "<image>" * 4
    whole = "<fake_token_around_image><global-img>" + "<image>" * 4 + "<fake_token_around_image>"
    assert cut.text == row.format(1) + row.format(2) + "\n\n" + whole
    small = cut_image(make_picture(60, 30), open_vision(seeing), low_detail=True)
    assert small.text == whole


@pytest.mark.parametrize("seeing", ["mistral3"], indirect=True)
def test_lines_in_a_prompt(seeing: Path) -> None:
    cut = cut_image(make_picture(40, 20), open_vision(seeing))
    assert cut.text == "[IMG][IMG][IMG][IMG_BREAK][IMG][IMG][IMG][IMG_END]"


@pytest.mark.parametrize("seeing", ["mistral3"], indirect=True)
@pytest.mark.parametrize(
    ("text", "message"),
    [("[IMG] and [IMG]", "shows 2 images"), ("none", "shows 0 images")],
)
def test_placeholders_of_clients_are_refused(seeing: Path, text: str, message: str) -> None:
    vision, tokenizer = open_vision(seeing), Tokenizer.open(seeing)
    cuts = [cut_image(make_picture(40, 20), vision)]
    with pytest.raises(RequestError, match=message):
        encode_prompt(text, cuts, vision, IMAGE_ID, lambda text: tokenizer.encode(text))


@pytest.mark.parametrize("seeing", ["smolvlm"], indirect=True)
def test_too_many_tiles_are_refused(seeing: Path) -> None:
    vision, tokenizer = open_vision(seeing), Tokenizer.open(seeing)
    cuts = [cut_image(Image.new("RGB", (64, 64)), vision)] * 32
    with pytest.raises(RequestError, match="160 tiles"):
        encode_prompt("<image>" * 32, cuts, vision, IMAGE_ID, lambda text: tokenizer.encode(text))
