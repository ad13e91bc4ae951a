"""An inconsistent low-bit checkpoint is refused before anything starts, naming the tensor."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load, save_file
from torch import Tensor

from molink.checkpoint.low_bit import LowBitScheme, parse_low_bit
from molink.checkpoint.model_folder import ModelFolder
from molink.errors import BrokenModel, MolinkError, UnsupportedModel
from tests.support.low_bit_models import write_low_bit
from tests.support.models import MakeModel

GPTQ = {
    "quant_method": "gptq",
    "bits": 4,
    "group_size": 32,
    "desc_act": True,
    "sym": True,
    "checkpoint_format": "gptq",
}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}
FP8 = {"quant_method": "fp8", "weight_block_size": [32, 32]}
PACKED = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {
        "group_0": {
            "weights": {
                "num_bits": 4,
                "type": "int",
                "symmetric": False,
                "strategy": "group",
                "group_size": 32,
                "actorder": "group",
            }
        }
    },
}


def float4(name: str, size: int, **changes: Any) -> dict[str, Any]:
    weights = {"type": "float", "num_bits": 4, "strategy": "group", "group_size": size, **changes}
    method = {"quant_method": "compressed-tensors", "format": f"{name}-pack-quantized"}
    return {**method, "config_groups": {"group_0": {"weights": weights}}}


#: Tensors that replace others; ``None`` removes a tensor.
Wrong = dict[str, Tensor | None]
Q = "model.layers.0.self_attn.q_proj"
DOWN = "model.layers.2.mlp.down_proj"


def parse(**section: Any) -> LowBitScheme | None:
    return parse_low_bit({"quantization_config": section}, "config.json")


@pytest.mark.parametrize(
    ("section", "found"),
    [
        ({}, None),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, None),
        (GPTQ, LowBitScheme("gptq", 4, (1, 32), has_column_order=True)),
        ({**GPTQ, "desc_act": False, "group_size": -1}, LowBitScheme("gptq", 4, (1, 0))),
        (
            {**GPTQ, "checkpoint_format": None, "format": "gptq_v2", "bits": 8},
            LowBitScheme("gptq_v2", 8, (1, 32), has_column_order=True),
        ),
        (
            {**GPTQ, "dynamic": {"-:.*down.*": {}}},
            LowBitScheme("gptq", 4, (1, 32), has_column_order=True),
        ),
        (AWQ, LowBitScheme("awq", 4, (1, 32))),
        ({"quant_method": "awq", "w_bit": 4, "q_group_size": 64}, LowBitScheme("awq", 4, (1, 64))),
        (FP8, LowBitScheme("plain", 8, (32, 32), has_zero_points=False, number_kind="float")),
        (
            {"quant_method": "fp8"},
            LowBitScheme("plain", 8, (0, 0), has_zero_points=False, number_kind="float"),
        ),
        (PACKED, LowBitScheme("packed", 4, (1, 32), has_column_order=True)),
        (
            float4("nvfp4", 16),
            LowBitScheme("nvfp4", 4, (1, 16), has_zero_points=False, number_kind="float"),
        ),
        (
            float4("mxfp4", 32),
            LowBitScheme("mxfp4", 4, (1, 32), has_zero_points=False, number_kind="float"),
        ),
    ],
)
def test_configs(section: dict[str, Any], found: LowBitScheme | None) -> None:
    assert parse(**section) == found


def packed(**changes: Any) -> dict[str, Any]:
    (group,) = PACKED["config_groups"].values()  # type: ignore[attr-defined]
    return {**PACKED, "config_groups": {"a": {"weights": {**group["weights"], **changes}}}}


@pytest.mark.parametrize(
    ("section", "error", "message"),
    [
        ({**GPTQ, "bits": 3}, UnsupportedModel, r"bits '3' is not supported \(only 2, 4, 8\)"),
        ({**GPTQ, "bits": "4"}, BrokenModel, "bits"),
        ({**GPTQ, "bits": None}, BrokenModel, "bits is missing"),
        ({**GPTQ, "group_size": 0}, BrokenModel, "group_size must be -1 or a number"),
        ({**GPTQ, "group_size": 0.5}, BrokenModel, "group_size"),
        ({**GPTQ, "checkpoint_format": "marlin"}, UnsupportedModel, "'marlin'.*gptq, gptq_v2"),
        ({**GPTQ, "is_marlin_format": True}, UnsupportedModel, "checkpoint_format"),
        ({**GPTQ, "lm_head": True}, UnsupportedModel, "output head"),
        ({**GPTQ, "dynamic": {"+:.*": {"bits": 8}}}, UnsupportedModel, "dynamic"),
        ({**AWQ, "version": "gemv"}, UnsupportedModel, "version 'gemv'"),
        ({**AWQ, "bits": 8}, UnsupportedModel, "bits '8'"),
        ({**FP8, "fmt": "e5m2"}, UnsupportedModel, "fmt 'e5m2'"),
        ({**FP8, "weight_block_size": [32]}, BrokenModel, "weight_block_size"),
        ({**FP8, "weight_block_size": [32, 0]}, BrokenModel, "weight_block_size"),
        ({**PACKED, "format": "nvfp4-pack-quantized"}, UnsupportedModel, "nvfp4"),
        (float4("nvfp4", 32), UnsupportedModel, "group_size '32'"),
        (float4("mxfp4", 32, num_bits=8), UnsupportedModel, "num_bits '8'"),
        (float4("mxfp4", 32, symmetric=False), UnsupportedModel, "symmetric"),
        ({**PACKED, "format": "marlin-24"}, UnsupportedModel, "marlin-24"),
        ({**PACKED, "kv_cache_scheme": {"num_bits": 8}}, UnsupportedModel, "kv_cache_scheme"),
        ({**PACKED, "sparsity_config": {"format": "sparse-24"}}, UnsupportedModel, "sparse-24"),
        ({**PACKED, "config_groups": {}}, UnsupportedModel, "0 different weight"),
        (packed(num_bits=3), UnsupportedModel, "num_bits '3'"),
        (packed(strategy="tensor_group"), UnsupportedModel, "tensor_group"),
        (packed(strategy="tensor"), UnsupportedModel, "channel, group"),
        (packed(type="float"), UnsupportedModel, "format 'pack-quantized'"),
    ],
)
def test_variants_are_named(
    section: dict[str, Any], error: type[MolinkError], message: str
) -> None:
    with pytest.raises(error, match=rf"config\.json: quantization_config.*{message}"):
        parse(**section)


@pytest.fixture
def stored(make_model: MakeModel, tmp_path: Path) -> Callable[[dict[str, Any]], Path]:
    def write(section: dict[str, Any]) -> Path:
        folder = make_model(tmp_path / "model", "llama", 3)
        return write_low_bit(folder, tmp_path / "stored", tmp_path / "exact", section)

    return write


def change(folder: Path, tensors: Wrong) -> None:
    path = folder / "model.safetensors"
    changed: Wrong = {**load(path.read_bytes()), **tensors}
    save_file({name: t for name, t in changed.items() if t is not None}, path)


WRONG: list[tuple[dict[str, Any], Wrong, str]] = [
    (GPTQ, {f"{Q}.qweight": torch.zeros(8, 32, dtype=torch.int32)}, r"qweight has shape \[8, 32\]"),
    (GPTQ, {f"{Q}.qweight": torch.zeros(8, 64)}, "qweight is F32; supported here: I32"),
    (GPTQ, {f"{Q}.qzeros": None}, "qzeros is in none"),
    (GPTQ, {f"{Q}.scales": None}, "scales is in none"),
    (GPTQ, {f"{Q}.scales": torch.zeros(4, 64).half()}, r"scales has shape \[4, 64\]"),
    (GPTQ, {f"{Q}.g_idx": None}, "g_idx is in none"),
    (GPTQ, {f"{Q}.g_idx": torch.full((64,), 2, dtype=torch.int32)}, "g_idx has groups 2 to 2"),
    (GPTQ, {f"{Q}.g_idx": torch.full((64,), -1, dtype=torch.int32)}, "g_idx has groups -1 to"),
    (GPTQ, {f"{Q}.g_idx": torch.zeros(64, dtype=torch.int32)}, "gives group 0 64 columns"),
    (GPTQ, {f"{DOWN}.g_idx": torch.zeros(96, dtype=torch.int64)}, "g_idx is I64"),
    (GPTQ, {f"{Q}.bias": torch.ones(64).half()}, "bias is a bias that"),
    (GPTQ, {f"{Q}.qweight": None}, r"q_proj\.(weight|g_idx)"),
    (GPTQ, {f"{Q}.weight": torch.zeros(64, 64)}, r"q_proj\.weight"),
    (GPTQ, {f"{Q}.weight_scale": torch.zeros(1)}, r"q_proj\.weight_scale does not fit"),
    (AWQ, {f"{Q}.qweight": torch.zeros(8, 64, dtype=torch.int32)}, r"qweight has shape \[8, 64\]"),
    (AWQ, {f"{Q}.qzeros": torch.zeros(2, 64, dtype=torch.int32)}, r"qzeros has shape \[2, 64\]"),
    (FP8, {f"{Q}.weight_scale_inv": None}, r"q_proj\.weight_scale is in none"),
    (FP8, {f"{Q}.weight_scale_inv": torch.ones(1)}, r"weight_scale_inv has shape \[1\]"),
    (FP8, {f"{Q}.weight": torch.zeros(64, 64).to(torch.float8_e5m2)}, "weight is F8_E5M2"),
    (PACKED, {f"{Q}.weight_zero_point": None}, "weight_zero_point is in none"),
    (PACKED, {f"{Q}.weight_g_idx": torch.full((64,), 9, dtype=torch.int32)}, "groups 9 to 9"),
]


@pytest.mark.parametrize("index", range(len(WRONG)))
def test_contradictions_are_named(stored: Callable[[dict[str, Any]], Path], index: int) -> None:
    section, changes, message = WRONG[index]
    folder = stored(section)
    ModelFolder.open(folder)
    change(folder, changes)
    with pytest.raises((BrokenModel, UnsupportedModel), match=message):
        ModelFolder.open(folder)


def test_only_a_stage_s_own_layers_have_to_be_right(
    stored: Callable[[dict[str, Any]], Path],
) -> None:
    folder = stored(GPTQ)
    change(folder, {f"{Q}.g_idx": torch.zeros(63)})
    ModelFolder.open(folder, (1, 3))
    with pytest.raises(BrokenModel, match="g_idx"):
        ModelFolder.open(folder, (0, 1))


def test_an_awq_folder_whose_config_names_nothing(stored: Callable[[dict[str, Any]], Path]) -> None:
    folder = stored(AWQ)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(UnsupportedModel, match=r"GPTQ or AWQ, but config\.json has no"):
        ModelFolder.open(folder)


def test_a_folder_with_both_configs_of_gptq(stored: Callable[[dict[str, Any]], Path]) -> None:
    folder = stored(GPTQ)
    (folder / "quantize_config.json").write_text('{"bits": 4}', encoding="utf-8")
    assert ModelFolder.open(folder).config.low_bit is not None


def test_without_a_product_by_codes_memory_is_that_of_the_unpacked_weights(
    stored: Callable[[dict[str, Any]], Path], tmp_path: Path
) -> None:
    facts = ModelFolder.open(stored(AWQ)).placement_facts("m")
    exact = ModelFolder.open(tmp_path / "exact").placement_facts("m")  # in float32
    assert (
        msgspec.structs.replace(facts, narrow=None, block_weights=None, plane_weights=None) == exact
    )
    assert facts.block_weights is not None
    assert facts.narrow is not None
    assert facts.narrow.dtype == "bf16"
    assert facts.quantized == "none"


def test_the_dtype_is_not_that_of_scales(
    make_model: MakeModel, tmp_path: Path, edit_json: Callable[..., None]
) -> None:
    folder = make_model(tmp_path / "model", "llama", 3, dtype="bfloat16")
    stored = write_low_bit(folder, tmp_path / "stored", tmp_path / "exact", FP8)
    edit_json(stored / "config.json", dtype=None, torch_dtype=None)
    assert ModelFolder.open(stored).config.dtype == "bf16"
