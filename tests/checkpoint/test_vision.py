"""Vision towers of released configs: sizes, tensors, tokens per image, and refusals."""

import json
from math import prod
from pathlib import Path
from typing import Any

import pytest

from molink.checkpoint.config import ModelConfig
from molink.checkpoint.multimodal import rename_tensors
from molink.checkpoint.tensor_layout import stage_tensors
from molink.checkpoint.vision import VisionConfig
from molink.errors import BrokenModel, ModelError, UnsupportedModel
from tests.checkpoint.test_multimodal import GEMMA3_4B

#: From config.json of HuggingFaceTB/SmolVLM-256M-Instruct.
SMOLVLM_256M = {
    "architectures": ["Idefics3ForConditionalGeneration"],
    "scale_factor": 4,
    "text_config": {
        "hidden_size": 576,
        "head_dim": 64,
        "intermediate_size": 1536,
        "model_type": "llama",
        "num_attention_heads": 9,
        "num_hidden_layers": 30,
        "num_key_value_heads": 3,
        "vocab_size": 49280,
        "rope_theta": 100000,
    },
    "vision_config": {
        "hidden_size": 768,
        "image_size": 512,
        "intermediate_size": 3072,
        "model_type": "idefics3_vision",
        "num_attention_heads": 12,
        "patch_size": 16,
    },
}
#: mistralai/Mistral-Small-3.1-24B-Instruct-2503
MISTRAL_SMALL = {
    "architectures": ["Mistral3ForConditionalGeneration"],
    "multimodal_projector_bias": False,
    "projector_hidden_act": "gelu",
    "spatial_merge_size": 2,
    "vision_feature_layer": -1,
    "text_config": {
        "head_dim": 128,
        "hidden_size": 5120,
        "intermediate_size": 32768,
        "model_type": "mistral",
        "num_attention_heads": 32,
        "num_hidden_layers": 40,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05,
        "vocab_size": 131072,
    },
    "vision_config": {
        "head_dim": 64,
        "hidden_act": "silu",
        "hidden_size": 1024,
        "image_size": 1540,
        "intermediate_size": 4096,
        "model_type": "pixtral",
        "num_attention_heads": 16,
        "num_hidden_layers": 24,
        "patch_size": 14,
        "rope_theta": 10000.0,
    },
}
#: Qwen/Qwen2.5-VL-3B-Instruct, whose config has the text model's fields beside the tower's.
QWEN25_VL_3B = {
    "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    "hidden_size": 2048,
    "intermediate_size": 11008,
    "max_window_layers": 70,
    "model_type": "qwen2_5_vl",
    "num_attention_heads": 16,
    "num_hidden_layers": 36,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "vision_config": {
        "depth": 32,
        "fullatt_block_indexes": [7, 15, 23, 31],
        "hidden_act": "silu",
        "hidden_size": 1280,
        "intermediate_size": 3420,
        "num_heads": 16,
        "out_hidden_size": 2048,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "window_size": 112,
    },
    "vocab_size": 151936,
}
#: Qwen/Qwen3-VL-30B-A3B-Instruct
QWEN3_VL_30B = {
    "architectures": ["Qwen3VLMoeForConditionalGeneration"],
    "model_type": "qwen3_vl_moe",
    "text_config": {
        "decoder_sparse_step": 1,
        "head_dim": 128,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "mlp_only_layers": [],
        "model_type": "qwen3_vl_moe_text",
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "num_attention_heads": 32,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 48,
        "num_key_value_heads": 4,
        "rope_scaling": {
            "mrope_interleaved": True,
            "mrope_section": [24, 20, 20],
            "rope_type": "default",
        },
        "rope_theta": 5000000,
        "vocab_size": 151936,
    },
    "vision_config": {
        "deepstack_visual_indexes": [8, 16, 24],
        "depth": 27,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "model_type": "qwen3_vl_moe",
        "num_heads": 16,
        "num_position_embeddings": 2304,
        "out_hidden_size": 2048,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    },
}
#: google/gemma-4-31B-it
GEMMA4_31B = {
    "architectures": ["Gemma4ForConditionalGeneration"],
    "text_config": {
        "attention_k_eq_v": True,
        "global_head_dim": 512,
        "head_dim": 256,
        "hidden_size": 5376,
        "intermediate_size": 21504,
        "model_type": "gemma4_text",
        "num_attention_heads": 32,
        "num_global_key_value_heads": 4,
        "num_hidden_layers": 60,
        "num_key_value_heads": 16,
        "sliding_window": 1024,
        "use_bidirectional_attention": "vision",
        "vocab_size": 262144,
    },
    "vision_config": {
        "head_dim": 72,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "model_type": "gemma4_vision",
        "num_attention_heads": 16,
        "num_hidden_layers": 27,
        "num_key_value_heads": 16,
        "patch_size": 16,
        "pooling_kernel_size": 3,
        "position_embedding_size": 10240,
        "rms_norm_eps": 1e-06,
        "rope_parameters": {"rope_theta": 100.0, "rope_type": "default"},
        "standardize": True,
    },
}
#: google/gemma-4-12B-it
GEMMA4_12B = {
    "architectures": ["Gemma4UnifiedForConditionalGeneration"],
    "text_config": {
        **GEMMA4_31B["text_config"],
        "hidden_size": 3840,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
    },
    "vision_config": {
        "mm_embed_dim": 3840,
        "mm_posemb_size": 1120,
        "model_type": "gemma4_unified_vision",
        "output_proj_dims": 3840,
        "patch_size": 16,
        "pooling_kernel_size": 3,
    },
}


def tower(raw: dict[str, Any]) -> VisionConfig:
    vision = ModelConfig.parse_config(raw, "config.json").vision
    assert vision is not None
    return vision


@pytest.mark.parametrize(
    ("raw", "size", "rows", "tensors", "millions"),
    [
        (SMOLVLM_256M, (512, 512), 64, 198, 93),
        (GEMMA3_4B, (896, 896), 256, 439, 419),
        (MISTRAL_SMALL, (1540, 1512), 55 * 54, 222, 438),
        (QWEN25_VL_3B, (336, 448), 192, 390, 668),
        (QWEN3_VL_30B, (480, 640), 300, 351, 538),
        (GEMMA4_31B, (672, 960), 280, 356, 575),
        (GEMMA4_12B, (672, 960), 280, 10, 49),
    ],
    ids=[
        *("SmolVLM-256M", "Gemma 3 4B", "Mistral Small 3.1", "Qwen2.5-VL 3B", "Qwen3-VL 30B"),
        *("Gemma 4 31B", "Gemma 4 12B"),
    ],
)
def test_released_towers(
    raw: dict[str, Any], size: tuple[int, int], rows: int, tensors: int, millions: int
) -> None:
    vision = tower(raw)
    shapes = vision.tensors
    assert vision.count_rows(*size) == rows
    assert len(shapes) == tensors
    assert sum(map(prod, shapes.values())) // 1_000_000 == millions
    config = ModelConfig.parse_config(raw, "config.json")
    assert shapes.keys() <= stage_tensors(config, 0, 3).keys()
    assert not shapes.keys() & stage_tensors(config, 3, 5).keys()


@pytest.mark.parametrize("outer", ["vision_embedder", "embed_vision"])
def test_names_of_gemma4s_modules(outer: str) -> None:
    project = "embedding_projection.weight"
    inner = "multimodal_embedder." if outer == "embed_vision" else ""
    found = {
        **{f"model.{outer}.{name}": name for name in ("patch_dense.bias", "pos_embedding")},
        f"model.embed_vision.{inner}{project}": project,
        f"model.embed_audio.{project}": "audio",
    }
    named = rename_tensors(found, "model.safetensors")
    shapes = tower(GEMMA4_12B).tensors
    assert {name for name in named if name in shapes} == {
        *("vision.patch_dense.bias", "vision.pos_embedding", f"vision_connector.{project}")
    }


def test_a_flat_text_model_rotates_by_sections() -> None:
    config = ModelConfig.parse_config(QWEN25_VL_3B, "config.json")
    assert (config.family, config.layers, config.tied_embeddings) == ("qwen2", 36, True)
    assert (config.rope.kind, config.rope.axes) == ("default", (0,) * 16 + (1,) * 24 + (2,) * 24)


def test_sections_alternate_in_qwen3_vl() -> None:
    config = ModelConfig.parse_config(QWEN3_VL_30B, "config.json")
    assert (config.family, config.first_layers) == ("qwen3_moe", 3)
    assert config.rope.axes == (0, 1, 2) * 20 + (0,) * 4


@pytest.mark.parametrize(
    "after", [[8, 16, 27], [8, 8, 16], [-1, 3], list(range(27)) * 2, "8"], ids=str
)
def test_layers_that_a_tower_lacks_are_refused(after: Any) -> None:
    changed = QWEN3_VL_30B["vision_config"] | {"deepstack_visual_indexes": after}
    with pytest.raises(BrokenModel, match="deepstack_visual_indexes"):
        tower(QWEN3_VL_30B | {"vision_config": changed})


def test_a_decoder_with_fewer_layers_than_its_tower_adds_rows_to() -> None:
    text = QWEN3_VL_30B["text_config"] | {"num_hidden_layers": 2}
    with pytest.raises(BrokenModel, match="for more than 2 layers"):
        tower(QWEN3_VL_30B | {"text_config": text})


def test_rows_of_images_need_sections() -> None:
    text = QWEN3_VL_30B["text_config"] | {"rope_scaling": None}
    config = ModelConfig.parse_config(QWEN3_VL_30B | {"text_config": text}, "config.json")
    assert config.is_text_only
    assert any("not supported without mrope_section" in note for note in config.notes)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mm_tokens_per_image": 250}, "mm_tokens_per_image 250 does not fit"),
        (
            {"vision_config": GEMMA3_4B["vision_config"] | {"num_attention_heads": 7}},
            "not 7 whole heads",
        ),
        ({"vision_config": {"patch_size": 0}}, "patch_size must be a positive integer"),
        ({"vision_config": 3}, "vision_config must be an object"),
    ],
)
def test_contradictions_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(BrokenModel, match=message):
        tower(GEMMA3_4B | change)


@pytest.mark.parametrize(
    "raw",
    [
        MISTRAL_SMALL | {"vision_feature_layer": -2},
        MISTRAL_SMALL
        | {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 128}},
        GEMMA4_31B | {"vision_config": {"use_clipped_linears": True}},
        GEMMA4_31B | {"vision_config": GEMMA4_31B["vision_config"] | {"head_dim": 64}},
    ],
    ids=["another layer", "quantized", "clipped", "narrow heads"],
)
def test_other_towers_leave_the_text_model(raw: dict[str, Any]) -> None:
    config = ModelConfig.parse_config(raw, "config.json")
    assert config.is_text_only
    assert any("images are not supported" in note for note in config.notes)


@pytest.mark.parametrize(
    ("rules", "error", "message"),
    [
        ({"do_normalize": True}, UnsupportedModel, "do_normalize True is not supported"),
        ({"max_soft_tokens": 1 << 20}, BrokenModel, "max_soft_tokens"),
        ({"patch_size": 14}, BrokenModel, "cells of 42 pixels, in config.json 48"),
    ],
)
def test_rules_of_gemma4(
    tmp_path: Path, rules: dict[str, Any], error: type[ModelError], message: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(GEMMA4_31B), encoding="utf-8")
    path = tmp_path / "processor_config.json"
    path.write_text(json.dumps({"image_processor": {"max_soft_tokens": 560}}), encoding="utf-8")
    vision = ModelConfig.load_folder(tmp_path).vision
    assert vision is not None
    assert vision.rules.most_pixels == 560 * 48 * 48
    with pytest.raises(ValueError, match="pixels"):
        vision.count_rows(48 * 20, 48 * 30)
    path.write_text(json.dumps({"image_processor": rules}), encoding="utf-8")
    with pytest.raises(error, match=message):
        ModelConfig.load_folder(tmp_path)


def named(module: str) -> str:
    """Names of modules in Qwen's files."""
    return module.replace("vision_connector.", "visual.merger.").replace("vision.", "visual.")


@pytest.mark.parametrize(
    ("method", "listed", "sees"),
    [
        ({"quant_method": "awq", "bits": 4}, {"modules_to_not_convert": ["visual"]}, True),
        ({"quant_method": "fp8"}, {"modules_to_not_convert": [*range(3), "model.visual"]}, True),
        ({"quant_method": "fp8"}, {"modules_to_not_convert": "every"}, True),
        ({"quant_method": "fp8"}, {"modules_to_not_convert": "all but one"}, False),
        ({"quant_method": "fp8"}, {"modules_to_not_convert": ["visual.merger", "vis"]}, False),
        ({"quant_method": "awq", "bits": 4}, {"modules_to_not_convert": None}, False),
        ({"quant_method": "awq", "bits": 4}, {}, False),
    ],
)
def test_towers_that_quantized_checkpoints_leave_as_they_are(
    method: dict[str, Any], listed: dict[str, Any], sees: bool
) -> None:
    every = [named(module) for module in tower(QWEN3_VL_30B).projections]
    if isinstance(listed.get("modules_to_not_convert"), str):
        cut = None if sees else -1
        listed = {"modules_to_not_convert": every[:cut]}
    config = ModelConfig.parse_config(
        QWEN3_VL_30B | {"quantization_config": method | listed}, "config.json"
    )
    assert (config.vision is not None) == sees


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({"size": {"height": 448, "width": 448}}, "images of 448 pixels a side"),
        ({"image_std": [0.5, 0.0, 0.5]}, "image_std must be positive"),
        ({"image_mean": [0.5]}, "image_mean must have three numbers"),
    ],
)
def test_rules_that_contradict_the_tower(
    tmp_path: Path, rules: dict[str, Any], message: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(GEMMA3_4B), encoding="utf-8")
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(rules), encoding="utf-8")
    with pytest.raises(BrokenModel, match=message):
        ModelConfig.load_folder(tmp_path)
