"""What packing makes of the bundled model's rows, on a few held-out conversations."""

import pytest

from molink.checkpoint.model_folder import ModelFolder
from tools.demo_model.tokenizer import answered, encode, load_tokenizer
from tools.demo_model.train import conversations
from tools.measure_compression import measure
from tools.train_demo_model import FOLDER


@pytest.fixture(scope="module")
def found() -> dict[str, dict[str, int] | list[dict[str, float | str]] | str]:
    tokenizer = load_tokenizer(FOLDER)
    texts = encode(tokenizer, conversations("held_out", 6, 7))
    masks = [answered(tokenizer, text) for text in texts]
    return measure({"bundled": (ModelFolder.open(FOLDER), texts)}, masks, repeat=1)


def test_rows_shrink_by_what_the_design_counts_on(
    found: dict[str, dict[str, int] | list[dict[str, float | str]] | str],
) -> None:
    minimum = {"bf16": 1.43, "f16": 1.12, "f32": 1.15}
    for row in found["speed"]:
        lossless = row["coding"] == "lossless"
        assert row["ratio"] > (minimum[row["dtype"]] if lossless else 1.9)


def test_nothing_that_was_tried_is_smaller(
    found: dict[str, dict[str, int] | list[dict[str, float | str]] | str],
) -> None:
    ours = next(row for row in found["tried"] if row["way"] == "exponents, entropy code only")
    for row in found["tried"]:
        # Among them what compresses the mantissas, too.
        assert row["ratio"] <= ours["ratio"] * 1.02


def test_8_bit_rows_cost_little_quality(
    found: dict[str, dict[str, int] | list[dict[str, float | str]] | str],
) -> None:
    assert [(row["dtype"], row["stages"]) for row in found["quality"]] == [
        ("f32", 2),
        ("f32", 3),
        ("bf16", 2),
        ("bf16", 3),
    ]
    for row in found["quality"]:
        assert row["perplexity"] < row["perplexity_exact"] * 1.01
        assert row["agreement"] > 0.98
        assert row["divergence"] < 0.001
