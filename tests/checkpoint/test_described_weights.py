"""Descriptions of weights compared with the weights of real folders."""

from pathlib import Path
from typing import Any

import pytest

from molink.checkpoint.config import ModelConfig
from molink.checkpoint.described_weights import describe_weights
from molink.checkpoint.hub_catalog import load_catalog
from molink.checkpoint.model_folder import scan_tensors
from molink.checkpoint.placement_facts import model_facts
from tests.support.low_bit_models import LEFT_OUT, write_low_bit
from tests.support.models import MakeModel

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": True},
    "qwen3_moe": {"mlp_only_layers": [1]},
    "deepseek_v3": {"first_k_dense_replace": 1},
    "qwen3_next": {},
    "qwen3_5_moe_text": {},
    "lfm2_moe": {},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_folder_has_the_described_tensors(
    make_model: MakeModel, tmp_path: Path, family: str
) -> None:
    folder = make_model(tmp_path / "m", family, dtype="bfloat16", **FAMILIES[family])
    stored = scan_tensors(folder)
    config = ModelConfig.load_folder(folder).drop_absent_mtp(stored)
    found = describe_weights(config, "bf16")
    for name, tensor in found.tensors.items():
        assert tensor.shape == stored[name].shape
        assert (tensor.dtype, tensor.nbytes) == (stored[name].dtype, stored[name].nbytes), name
    assert found.parameters == sum(span.nbytes for span in stored.values()) // 2
    facts = model_facts(config, "m", found.tensors, found.typical_layers)
    assert facts == model_facts(config, "m", stored)


def test_fp8_has_numbers_and_scales(make_model: MakeModel, tmp_path: Path) -> None:
    plain = make_model(tmp_path / "m", "llama", dtype="bfloat16")
    section = {"quant_method": "fp8", "weight_block_size": [32, 32]}
    made = write_low_bit(plain, tmp_path / "made", tmp_path / "exact", section)
    stored = {name: span for name, span in scan_tensors(made).items() if LEFT_OUT not in name}
    found = describe_weights(ModelConfig.load_folder(made), "fp8")
    assert found.typical_layers == (0,)
    for name, tensor in found.tensors.items():
        same = stored[name.replace("weight_scale", "weight_scale_inv")]
        assert tensor.shape == same.shape
        if "scale" not in name:
            assert tensor.dtype == same.dtype


def test_q4_k_m_spends_six_bits_on_half_of_the_layers(
    make_model: MakeModel, tmp_path: Path
) -> None:
    folder = make_model(
        tmp_path / "m",
        "llama",
        dtype="bfloat16",
        num_hidden_layers=8,
        hidden_size=256,
        intermediate_size=96,
    )
    found = describe_weights(ModelConfig.load_folder(folder), "q4_k_m")
    assert found.typical_layers == (0, 1)
    ends = {name.removeprefix("model.layers."): one for name, one in found.tensors.items()}
    assert (
        ends["0.self_attn.v_proj.weight.q6_k"].nbytes
        == ends["1.self_attn.v_proj.weight.q4_k"].nbytes * 210 // 144
    )
    assert "lm_head.weight.q6_k" in found.tensors
    # Rows of 96 don't consist of whole blocks of 256.
    assert {"0.mlp.down_proj.weight.q8_0", "1.mlp.down_proj.weight.q5_0"} <= ends.keys()
    assert ends["0.input_layernorm.weight"].dtype == "F32"


@pytest.mark.parametrize(
    ("name", "stored"),
    [
        ("qwen3.5:9b", "linear_attn.in_proj_qkv.weight.q5_k"),
        ("granite4:3b", "shared_mlp.output_linear.weight.q6_k"),
        ("gpt-oss:20b-mxfp4-gguf", "mlp.experts.31.down_proj.weight.mxfp4"),
        ("gpt-oss:20b-mxfp4-gguf", "self_attn.q_proj.weight.q8_0"),
    ],
)
def test_types_in_gguf_files(name: str, stored: str) -> None:
    entry = load_catalog().find_entry(name)
    assert entry is not None
    assert f"model.layers.0.{stored}" in entry.describe_weights().tensors
