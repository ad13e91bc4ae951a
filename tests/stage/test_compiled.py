"""Whole models by compiled code, compared with transformers in float32."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from molink.facts.dtypes import WeightDType
from molink.facts.kernels import FALLBACKS
from molink.stage.attention.compiled import CompiledAttention
from molink.stage.attention.gather import PlainAttention
from molink.stage.batch import SequenceRows
from molink.stage.cpu_kernels.create import create_matmul
from molink.stage.decoder.norm import CompiledRmsNorm
from molink.stage.linear import CompiledLinear, PlainLinear
from molink.stage.torch_dtypes import TORCH_DTYPES, choose_dtype
from tests.support.kernels import NOT_COMPILED
from tests.support.models import MakeModel
from tests.support.stage import Reference, Ring

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"num_key_value_heads": 1},
    "mistral": {"sliding_window": 20},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {},
    "phi3": {},
    "gemma3_text": {},
    "mixtral": {},
    "granite": {},
    "olmo2": {},
    "glm4": {},
    "qwen2_moe": {},
    "gpt_oss": {},
}


@pytest.fixture
def dtype() -> WeightDType:
    """The type that this CPU computes 16-bit weights in, by compiled code."""
    chosen = choose_dtype("auto", "bf16", torch.device("cpu"))
    if create_matmul(TORCH_DTYPES[chosen], 1) is None:
        pytest.skip(NOT_COMPILED[chosen])
    return chosen


@pytest.mark.parametrize("family", FAMILIES)
def test_bf16_models(
    dtype: WeightDType,
    make_model: MakeModel,
    tmp_path: Path,
    make_ring: type[Ring],
    make_reference: type[Reference],
    random_tokens: Callable[..., list[int]],
    family: str,
) -> None:
    folder = make_model(tmp_path, family, dtype="bfloat16", head_dim=32, **FAMILIES[family])
    ring = make_ring(folder, (2,), dtype=dtype, block_size=16)
    block = ring.stages[0]._decoder.blocks[0]
    assert isinstance(block.mixer.qkv, CompiledLinear)
    assert any(
        isinstance(norm, CompiledRmsNorm) for norm in (block.input_norm, block.post_mlp_norm)
    )
    assert isinstance(ring.stages[0]._attention_backend(16), CompiledAttention)
    tokens, reference = random_tokens(70), make_reference(folder)
    exact = reference.logits(tokens)
    given = ring.run(tokens, [SequenceRows(0, 70, [7, 6, 9, 8, 10])])
    assert (given - exact).abs().mean() < 0.05 * exact.std()
    blocks, chunks = [3, 1, 4, 2, 5], []
    for first, last in ((0, 33), (33, 50), (50, 69), (69, 70)):
        rows = [SequenceRows(first, last - first, blocks)]
        chunks.append(ring.run(tokens[first:last], rows))
    assert (torch.cat(chunks) - exact).abs().mean() < 0.05 * exact.std()


def test_kernels_that_are_avoided(
    dtype: WeightDType,
    make_model: MakeModel,
    tmp_path: Path,
    make_ring: type[Ring],
    random_tokens: Callable[..., list[int]],
) -> None:
    """The kernels that replace disabled ones compute the same."""
    folder = make_model(tmp_path, "llama", dtype="bfloat16", head_dim=32)
    tokens, rows = random_tokens(40), [SequenceRows(0, 40, [2, 0, 1])]
    usual = make_ring(folder, (2,), dtype=dtype, block_size=16).run(tokens, rows)
    ring = make_ring(folder, (2,), dtype=dtype, block_size=16, avoid=tuple(FALLBACKS))
    block = ring.stages[0]._decoder.blocks[0]
    assert isinstance(block.mixer.qkv, PlainLinear)
    assert not isinstance(block.input_norm, CompiledRmsNorm)
    assert isinstance(ring.stages[0]._attention_backend(16), PlainAttention)
    assert (ring.run(tokens, rows) - usual).abs().mean() < 0.05 * usual.std()


@pytest.mark.parametrize(
    ("family", "kept"),
    [
        ("llama", "bfloat16"),
        ("qwen2", "bfloat16"),
        ("mixtral", "bfloat16"),
        ("llama", "float16"),
        ("qwen2", "float16"),
        ("mixtral", "float16"),
    ],
)
def test_16_bit_weights_with_float32_rows(
    make_model: MakeModel,
    tmp_path: Path,
    make_ring: type[Ring],
    make_reference: type[Reference],
    random_tokens: Callable[..., list[int]],
    family: str,
    kept: str,
) -> None:
    if create_matmul(torch.float32, 1) is None:
        pytest.skip(NOT_COMPILED["f32"])
    folder = make_model(tmp_path, family, dtype=kept, **FAMILIES[family])
    ring = make_ring(folder, (2,), dtype="f32", block_size=16)
    projection = ring.stages[0]._decoder.blocks[0].mixer.qkv
    assert isinstance(projection, CompiledLinear)
    assert projection.weight.dtype is getattr(torch, kept)
    assert projection.nbytes == 2 * projection.weight.numel() + 4 * len(projection.bias)

    tokens = random_tokens(40)
    given = ring.run(tokens, [SequenceRows(0, 40, [2, 0, 1])])
    torch.testing.assert_close(given, make_reference(folder).logits(tokens), atol=1e-4, rtol=1e-4)
