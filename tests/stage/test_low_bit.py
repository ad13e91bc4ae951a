"""GPTQ, AWQ, FP8 and compressed-tensors give transformers' results with their stored values."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from molink.checkpoint.model_folder import ModelFolder
from molink.facts.footprint import Footprint, StageSetup
from molink.stage.batch import SequenceRows
from molink.stage.cpu_kernels.create import supports_block_weights
from molink.stage.stage import Stage
from tests.support.low_bit_models import write_low_bit
from tests.support.models import MakeModel
from tests.support.stage import Reference, Ring

BLOCKS = tuple(range(16))
LENGTH = 60
#: Weights are kept as f32, so that only the order of sums differs from transformers.
EXACT: dict[str, Any] = {"avoid": ("compiled-linear",)}


def gptq(bits: int = 4, size: int = 32, **fields: Any) -> dict[str, Any]:
    usual = {"desc_act": False, "sym": True, "checkpoint_format": "gptq"}
    return {"quant_method": "gptq", "bits": bits, "group_size": size, **usual, **fields}


def awq(size: int = 32) -> dict[str, Any]:
    usual = {"bits": 4, "group_size": size, "zero_point": True, "version": "gemm"}
    return {"quant_method": "awq", **usual}


def compressed(layout: str, kind: str = "int", **weights: Any) -> dict[str, Any]:
    usual = {"type": kind, "num_bits": 8, "symmetric": True, **weights}
    group = {"targets": ["Linear"], "weights": usual, "input_activations": None}
    method = {"quant_method": "compressed-tensors", "format": layout}
    return {**method, "config_groups": {"group_0": group}, "ignore": ["lm_head"]}


def grouped(**weights: Any) -> dict[str, Any]:
    usual = {"num_bits": 4, "strategy": "group", "group_size": 32, **weights}
    return compressed("pack-quantized", **usual)


def float4(name: str, size: int) -> dict[str, Any]:
    group = {"num_bits": 4, "strategy": "group", "group_size": size}
    return compressed(f"{name}-pack-quantized", "float", **group)


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "gptq": ("llama", gptq()),
    "gptq, ordered": ("llama", gptq(desc_act=True)),
    "gptq, asymmetric": ("qwen2", gptq(sym=False)),
    "gptq, asymmetric and ordered": ("mistral", gptq(sym=False, desc_act=True)),
    "gptq, a row": ("qwen3", gptq(size=-1)),
    "gptq, a row, ordered": ("llama", gptq(size=-1, desc_act=True, sym=False)),
    "gptq of 8 bits": ("qwen2", gptq(8, sym=False, desc_act=True)),
    "gptq of 8 bits, a row": ("phi3", gptq(8, size=-1)),
    "gptq of 2 bits": ("llama", gptq(2, size=16, sym=False)),
    "gptq_v2": ("llama", gptq(sym=False, checkpoint_format="gptq_v2")),
    "gptq_v2 of 8 bits": ("qwen3_moe", gptq(8, sym=False, checkpoint_format="gptq_v2")),
    "awq": ("qwen2", awq()),
    "awq, a row": ("llama", awq(-1)),
    "awq of experts": ("mixtral", awq(16)),
    "fp8": ("qwen2", {"quant_method": "fp8", "activation_scheme": "static"}),
    "fp8 in blocks": ("qwen3", {"quant_method": "fp8", "weight_block_size": [32, 32]}),
    "fp8 of shared experts": ("glm4_moe", {"quant_method": "fp8", "weight_block_size": [32, 32]}),
    "fp8 of latents": ("glm4_moe_lite", {"quant_method": "fp8", "weight_block_size": [32, 32]}),
    "fp8 of MiniMax": ("minimax_m2", {"quant_method": "fp8", "weight_block_size": [32, 32]}),
    "fp8 in blocks that don't divide": (
        "llama",
        {"quant_method": "fp8", "weight_block_size": [40, 24]},
    ),
    "packed": ("llama", grouped()),
    "packed, asymmetric": ("qwen2", grouped(symmetric=False)),
    "packed, ordered": ("llama", grouped(actorder="group", symmetric=False)),
    "packed by row": ("llama", grouped(strategy="channel", group_size=None, num_bits=8)),
    "compressed fp8 by row": ("qwen3", compressed("float-quantized", "float", strategy="channel")),
    "compressed fp8": ("llama", compressed("float-quantized", "float", strategy="tensor")),
    "compressed fp8 in blocks": (
        "llama",
        compressed("naive-quantized", "float", strategy="block", block_structure=[32, 32]),
    ),
    "nvfp4": ("llama", float4("nvfp4", 16)),
    "mxfp4": ("qwen2", float4("mxfp4", 32)),
    "compressed int8": ("gemma3_text", compressed("int-quantized", strategy="channel")),
}


@pytest.mark.parametrize("name", CASES)
def test_logits_and_greedy_text(
    make_model: MakeModel,
    make_ring: type[Ring],
    make_reference: type[Reference],
    random_tokens: Callable[..., list[int]],
    tmp_path: Path,
    name: str,
) -> None:
    family, section = CASES[name]
    folder = make_model(tmp_path / "model", family, 3)
    stored = write_low_bit(folder, tmp_path / "stored", tmp_path / "exact", section)
    tokens, reference = random_tokens(LENGTH), make_reference(tmp_path / "exact")
    expected, greedy = reference.logits(tokens), reference.generate(tokens, 24)
    # Packed if possible, whole and split; then unpacked.
    for splits, disabled_kernels in (((), ()), ((1,), ()), ((), ("gguf-blocks",))):
        ring = make_ring(stored, splits, avoid=(*disabled_kernels, "compiled-linear"))
        logits = ring.run(tokens, [SequenceRows(0, LENGTH, BLOCKS)])
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)
        assert ring.generate(tokens, 24, BLOCKS) == greedy


#: Bits per weight of a layer that stays packed.
PACKED: dict[str, tuple[dict[str, Any], float]] = {
    "gptq": (gptq(size=128), 4 + 32 / 128),
    "gptq, ordered": (gptq(size=64, desc_act=True), 4 + 32 / 64),
    "gptq of 8 bits, a row": (gptq(8, size=-1), 8 + 32 / 128),
    "awq": (awq(32), 5),
    "packed": (grouped(), 4 + 16 / 32),
    "compressed int8": (compressed("int-quantized", strategy="channel"), 8 + 16 / 128),
    "gptq of 2 bits": (gptq(2, size=32), 16),
    "fp8": ({"quant_method": "fp8"}, 16),
}


@pytest.mark.parametrize("name", PACKED)
def test_a_plan_counts_what_stays_packed(make_model: MakeModel, tmp_path: Path, name: str) -> None:
    if not supports_block_weights():
        pytest.skip("this CPU doesn't multiply by few bits")
    section, bits = PACKED[name]
    wide = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
    made = make_model(tmp_path / "model", "llama", 3, dtype="bfloat16", **wide)
    write_low_bit(made, tmp_path / "stored", tmp_path / "exact", section)
    folder = ModelFolder.open(tmp_path / "stored")
    facts = folder.placement_facts("m")
    planned = Footprint.of_stage(
        facts, StageSetup(dtype="bf16", has_block_kernels=True)
    ).layer_bytes
    # One projection of the second layer is not quantized.
    full = 256 * 256
    packed = facts.projection_bytes // 2 - full
    norms = 2 * 2 * 256
    assert planned == packed * bits / 8 + 2 * full + norms
    loaded = Stage.load_layers(
        folder, (1, 2), "cpu", "bf16", disabled_kernels=("compiled-linear",)
    ).layer_bytes
    # The rest are float32 biases and orders of columns.
    assert planned <= loaded <= 1.06 * planned


@pytest.mark.parametrize("mode", ["int8", "nf4"])
@pytest.mark.parametrize("name", ["gptq, asymmetric and ordered", "awq", "fp8 in blocks"])
def test_weights_are_requantized_on_request(
    make_model: MakeModel,
    make_ring: type[Ring],
    random_tokens: Callable[..., list[int]],
    tmp_path: Path,
    mode: str,
    name: str,
) -> None:
    family, section = CASES[name]
    folder = make_model(tmp_path / "model", family, 3)
    stored = write_low_bit(folder, tmp_path / "stored", tmp_path / "exact", section)
    tokens, rows = random_tokens(30), [SequenceRows(0, 30, BLOCKS)]
    expected = make_ring(tmp_path / "exact", (), quantize=mode, **EXACT).run(tokens, rows)
    logits = make_ring(stored, (1,), quantize=mode, **EXACT).run(tokens, rows)
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)
