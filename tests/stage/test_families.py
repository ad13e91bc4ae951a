"""Families other than Llama give transformers' results: whole, split, in chunks, in batches."""

import json
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load, save_file
from torch import Tensor

from molink.stage.batch import SequenceRows
from tests.support.models import MINISTRAL3, MISTRAL4, MakeModel, stack_experts
from tests.support.stage import Reference, Ring

SLIDING, FULL, LINEAR = "sliding_attention", "full_attention", "linear_attention"
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
    "long_factor": [1.0, 2.0, 4.0, 8.0, 12.0, 16.0],
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 1e6,
    "factor": 16.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 64,
}
PHI4_MINI = {
    "tie_word_embeddings": True,
    "rope_parameters": LONGROPE | {"partial_rotary_factor": 0.75},
    "sliding_window": None,
}
GEMMA3_ROPES = {
    SLIDING: {"rope_type": "default", "rope_theta": 10000.0},
    FULL: {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
}
WINDOWED = {"use_sliding_window": True, "sliding_window": 9}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "granite": ("granite", {}),
    "granite biased": ("granite", {"attention_bias": True, "mlp_bias": True}),
    "granitemoe": ("granitemoe", {}),
    "granitemoehybrid": ("granitemoehybrid", {"layer_types": [LINEAR, LINEAR, FULL, LINEAR]}),
    "granitemoehybrid dense": (
        "granitemoehybrid",
        {
            "layer_types": [LINEAR, FULL, FULL, LINEAR],
            "num_local_experts": 0,
            "position_embedding_type": "rope",
            "mamba_d_conv": 3,
            "mamba_n_groups": 1,
            "mamba_proj_bias": True,
            "mamba_conv_bias": False,
            "attention_bias": True,
        },
    ),
    "granitemoehybrid without states": (
        "granitemoehybrid",
        {"layer_types": [FULL] * 4, "num_local_experts": 0, "tie_word_embeddings": True},
    ),
    "seed_oss": ("seed_oss", {}),
    "seed_oss biased": (
        "seed_oss",
        {"attention_bias": False, "attention_out_bias": True, "mlp_bias": True, "head_dim": 24},
    ),
    "exaone4": ("exaone4", {"rope_parameters": LLAMA3_ROPE}),
    "exaone4 without windows": ("exaone4", {"sliding_window": None, "layer_types": [FULL] * 4}),
    "smollm3": ("smollm3", {}),
    "smollm3 by interval": ("smollm3", {"no_rope_layers": None, "no_rope_layer_interval": 3}),
    "olmo2": ("olmo2", {}),
    "olmo2 biased": ("olmo2", {"attention_bias": True, "head_dim": 24}),
    "olmo3": (
        "olmo3",
        {
            "layer_types": [SLIDING, SLIDING, FULL, SLIDING],
            "rope_parameters": {
                SLIDING: {"rope_type": "default", "rope_theta": 5e5},
                FULL: {"rope_type": "linear", "rope_theta": 5e5, "factor": 4.0},
            },
        },
    ),
    "mistral": ("mistral", {}),
    "mistral no window": ("mistral", {"sliding_window": None, "head_dim": 24}),
    "mistral window of two": ("mistral", {"sliding_window": 2}),
    "qwen2 upper layers windowed": ("qwen2", {**WINDOWED, "max_window_layers": 2}),
    "qwen3 listed windows": ("qwen3", {**WINDOWED, "layer_types": [FULL, SLIDING] * 2}),
    "phi3": ("phi3", {}),
    "phi3 longrope, long": ("phi3", PHI4_MINI | {"original_max_position_embeddings": 32}),
    "phi3 longrope, short": ("phi3", PHI4_MINI | {"original_max_position_embeddings": 256}),
    "mixtral": ("mixtral", {}),
    "mixtral windowed": ("mixtral", {"sliding_window": 8, "num_experts_per_tok": 1}),
    "qwen3_moe": ("qwen3_moe", {}),
    "qwen3_moe some dense": (
        "qwen3_moe",
        {"decoder_sparse_step": 2, "mlp_only_layers": [3], "norm_topk_prob": False},
    ),
    "qwen3_moe all experts": ("qwen3_moe", {"num_experts_per_tok": 8, "attention_bias": True}),
    "qwen2_moe": ("qwen2_moe", {}),
    "qwen2_moe some dense": (
        "qwen2_moe",
        {"decoder_sparse_step": 2, "norm_topk_prob": True, "qkv_bias": False},
    ),
    "glm": ("glm", {}),
    "glm4": ("glm4", {}),
    "glm4 all rotated": (
        "glm4",
        {
            "attention_bias": False,
            "rope_parameters": {"rope_theta": 5000.0, "partial_rotary_factor": 1.0},
        },
    ),
    "glm4_moe": ("glm4_moe", {}),
    "glm4_moe in groups": (
        "glm4_moe",
        {
            "n_group": 4,
            "topk_group": 2,
            "first_k_dense_replace": 3,
            "n_shared_experts": 2,
            "use_qk_norm": True,
            "attention_bias": False,
        },
    ),
    "deepseek_v2": (
        "deepseek_v2",
        {"rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 0.7}},
    ),
    "deepseek_v2 in groups": (
        "deepseek_v2",
        {
            "q_lora_rank": 24,
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 16.0,
        },
    ),
    "deepseek_v3": ("deepseek_v3", {"rope_parameters": YARN}),
    "deepseek_v3 without query latents": (
        "deepseek_v3",
        {"q_lora_rank": None, "rope_interleave": False},
    ),
    "glm4_moe_lite": ("glm4_moe_lite", {"attention_bias": True}),
    "deepseek_v32": ("deepseek_v32", {"rope_parameters": YARN}),
    "glm_moe_dsa": ("glm_moe_dsa", {"n_group": 1, "topk_group": 1, "index_topk": 60}),
    "dots1": ("dots1", {}),
    "dots1 windowed": (
        "dots1",
        {
            "sliding_window": 9,
            "max_window_layers": 2,
            "norm_topk_prob": False,
            "n_group": 2,
            "attention_bias": True,
        },
    ),
    "ernie4_5": ("ernie4_5", {"tie_word_embeddings": True}),
    "ernie4_5 biased": ("ernie4_5", {"use_bias": True, "head_dim": 24}),
    "ernie4_5_moe": ("ernie4_5_moe", {}),
    "ernie4_5_moe some dense": (
        "ernie4_5_moe",
        {"moe_layer_end_index": 2, "moe_layer_interval": 2, "moe_num_shared_experts": 0},
    ),
    "minimax_m2": ("minimax_m2", {}),
    "minimax_m2 all rotated": ("minimax_m2", {"rotary_dim": 16, "num_experts_per_tok": 8}),
    "hunyuan_v1_dense": ("hunyuan_v1_dense", {"tie_word_embeddings": True}),
    "hunyuan_v1_dense stretched": (
        "hunyuan_v1_dense",
        {
            "attention_bias": True,
            "rope_parameters": {
                "rope_type": "dynamic",
                "rope_theta": 10000.0,
                "alpha": 1000.0,
                "factor": 1.0,
            },
        },
    ),
    "hunyuan_v1_moe": ("hunyuan_v1_moe", {}),
    "lfm2": ("lfm2", {"block_multiple_of": 32, "block_ffn_dim_multiplier": 1.7}),
    "lfm2 biased": (
        "lfm2",
        {
            "conv_bias": True,
            "conv_L_cache": 5,
            "block_auto_adjust_ff_dim": False,
            "tie_word_embeddings": True,
        },
    ),
    "lfm2_moe": ("lfm2_moe", {}),
    "lfm2_moe uncorrected": (
        "lfm2_moe",
        {"use_expert_bias": False, "norm_topk_prob": False, "routed_scaling_factor": 2.0},
    ),
    "qwen3_next": ("qwen3_next", {}),
    "qwen3_next some dense": (
        "qwen3_next",
        {
            "decoder_sparse_step": 2,
            "mlp_only_layers": [3],
            "layer_types": None,
            "full_attention_interval": 2,
            "linear_num_key_heads": 4,
            "linear_num_value_heads": 4,
            "linear_conv_kernel_dim": 3,
            "attention_bias": True,
        },
    ),
    "qwen3_5": ("qwen3_5_text", {}),
    "qwen3_5 all rotated": (
        "qwen3_5_text",
        {
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_theta": 5e5, "partial_rotary_factor": 1.0},
        },
    ),
    "qwen3_5 that sees": ("qwen3_5", {}),
    "qwen3_vl as text": ("qwen3_vl", {}),
    "qwen3_vl_moe as text": ("qwen3_vl_moe", {}),
    "qwen2_5_vl as text": (
        "qwen2_5_vl",
        {"rope_parameters": {"rope_theta": 10000.0, "mrope_section": [2, 3, 3]}},
    ),
    "qwen3_5_moe": ("qwen3_5_moe_text", {}),
    "ministral": ("ministral", {"layer_types": [SLIDING, FULL, FULL, SLIDING]}),
    "ministral everywhere": ("ministral", {}),
    "phimoe": ("phimoe", {}),
    "phimoe unbiased": (
        "phimoe",
        {
            "attention_bias": False,
            "lm_head_bias": False,
            "router_jitter_noise": 0.01,
            "rope_parameters": LONGROPE
            | {
                "rope_theta": 10000.0,
                "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7],
                "long_factor": [1.0, 2.0, 4.0, 8.0, 12.0, 16.0, 20.0, 24.0],
                "short_mscale": 1.25,
                "long_mscale": 1.25,
                "original_max_position_embeddings": 256,
            },
        },
    ),
    "smolvlm": ("smolvlm", {}),
    "kimi_linear": ("kimi_linear", {}),
    "olmo_hybrid": ("olmo_hybrid", {}),
    "olmo_hybrid rotated": (
        "olmo_hybrid",
        {
            "layer_types": [LINEAR, FULL, LINEAR, FULL],
            "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
            "linear_allow_neg_eigval": False,
            "rms_norm_eps": 1e-3,
        },
    ),
    "falcon_h1": ("falcon_h1", {}),
    "falcon_h1 normed": (
        "falcon_h1",
        {
            "mamba_rms_norm": True,
            "mamba_norm_before_gate": False,
            "tie_word_embeddings": True,
            "mamba_proj_bias": True,
            "projectors_bias": True,
            "ssm_in_multiplier": 1.0,
        },
    ),
    "nemotron_h": ("nemotron_h", {}),
    "nemotron_h dense": (
        "nemotron_h",
        {
            "layers_block_type": ["linear_attention", "full_attention", "mlp", "linear_attention"],
            "use_bias": True,
            "mlp_bias": True,
            "use_conv_bias": False,
            "head_dim": 24,
            "tie_word_embeddings": True,
        },
    ),
    "nemotron_h latent": ("nemotron_h", {"moe_latent_size": 48}),
    "internlm3": ("internlm3", {"attention_bias": True, "mlp_bias": True}),
    "ministral3": ("ministral3", {}),
    "ministral3 windowed": ("ministral3", {"sliding_window": 9, "tie_word_embeddings": True}),
    "ministral3 that sees": ("mistral3", {**MINISTRAL3, "model_type": "ministral3"}),
    "mistral4": ("mistral3", MISTRAL4),
    "mistral4 in groups": (
        "mistral3",
        {**MISTRAL4, "n_group": 4, "topk_group": 2, "norm_topk_prob": False, "q_lora_rank": None},
    ),
    "cohere": ("cohere", {}),
    "cohere normed": (
        "cohere",
        {"use_qk_norm": True, "attention_bias": True, "tie_word_embeddings": True},
    ),
    "cohere2": ("cohere2", {}),
    "cohere2 listed": (
        "cohere2",
        {"layer_types": [FULL, SLIDING, SLIDING, FULL], "attention_bias": True},
    ),
    "cohere2 that sees": ("cohere2_vision", {}),
    "aya that sees": ("aya_vision", {}),
    "gpt_oss": ("gpt_oss", {}),
    "gpt_oss listed": (
        "gpt_oss",
        {
            "layer_types": [FULL, FULL, SLIDING, FULL],
            "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
            "num_experts_per_tok": 1,
        },
    ),
    "gemma2": ("gemma2", {"attn_logit_softcapping": 1.5, "final_logit_softcapping": 2.0}),
    "gemma2 unbounded": (
        "gemma2",
        {
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "tie_word_embeddings": False,
            "layer_types": [FULL, SLIDING, SLIDING, FULL],
        },
    ),
    "gemma3": ("gemma3_text", {"layer_types": [SLIDING, SLIDING, FULL, SLIDING]}),
    "gemma3 scaled": (
        "gemma3_text",
        {
            "layer_types": [SLIDING, FULL] * 2,
            "rope_parameters": GEMMA3_ROPES,
            "final_logit_softcapping": 2.0,
        },
    ),
    "gemma3 that sees": ("gemma3", {"layer_types": [SLIDING, SLIDING, FULL, SLIDING]}),
    "llama4": ("llama4_text", {}),
    "llama4 all experts": (
        "llama4_text",
        {
            "interleave_moe_layer_step": 1,
            "no_rope_layers": None,
            "no_rope_layer_interval": 2,
            "use_qk_norm": False,
            "attention_bias": True,
            "rope_parameters": LLAMA3_ROPE | {"high_freq_factor": 1.0},
        },
    ),
    "llama4 without temperature": (
        "llama4_text",
        {
            "moe_layers": [0, 1, 3],
            "attn_temperature_tuning": False,
            "layer_types": ["chunked_attention", FULL, "chunked_attention", FULL],
            "attention_chunk_size": 8,
        },
    ),
    "gemma4": ("gemma4_text", {}),
    "gemma4 with experts": (
        "gemma4_text",
        {
            "enable_moe_block": True,
            "num_experts": 6,
            "top_k_experts": 3,
            "moe_intermediate_size": 32,
            "layer_types": [SLIDING, SLIDING, FULL, FULL],
        },
    ),
    "gemma4 with values": (
        "gemma4_text",
        {"attention_k_eq_v": False, "layer_types": None, "final_logit_softcapping": None},
    ),
    "gemma4_unified": ("gemma4_unified_text", {}),
    "mistral3": ("mistral3", {}),
    "mistral3 tied": ("mistral3", {"tie_word_embeddings": True}),
}
#: One of each kind, for tests that needn't repeat every setting.
KINDS = (
    "granite",
    "exaone4",
    "smollm3",
    "olmo2",
    "mistral",
    "phi3",
    "mixtral",
    "qwen3_moe some dense",
    "qwen2_moe",
    "glm4",
    "glm4_moe",
    "glm4_moe_lite",
    "deepseek_v32",
    "glm_moe_dsa",
    "granitemoehybrid",
    "granitemoehybrid dense",
    "lfm2 biased",
    "lfm2_moe",
    "qwen3_next",
    "qwen3_5",
    "gemma2",
    "gemma3 scaled",
    "gpt_oss",
    "cohere normed",
    "cohere2",
    "ministral3",
    "mistral4",
    "phimoe",
    "nemotron_h",
    "nemotron_h dense",
    "nemotron_h latent",
    "olmo_hybrid",
    "kimi_linear",
    "falcon_h1",
    "llama4",
    "gemma4",
    "gemma4 with experts",
)
BLOCKS = (5, 0, 17, 3, 9, 30, 2, 40, 11, 12, 13, 21, 22, 23, 1, 4, 6, 7, 8, 10)
#: Tokens of a prompt, and of a greedy answer, which begins two new blocks.
LENGTH, ANSWER = 75, 32
MakeReference = Callable[[Path], Reference]


@pytest.fixture(scope="module")
def make_reference() -> MakeReference:
    """``make_reference(folder) -> Reference``; loaded once."""
    return cache(Reference)


@pytest.fixture(scope="module")
def folder_of(
    make_model: MakeModel, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Any]:
    """``folder_of(name, **fields)``: the folder of a model of ``MODELS``, made once."""
    made = {}

    def make(name: str, dtype: str = "float32") -> Path:
        if (name, dtype) not in made:
            family, fields = MODELS[name]
            path = tmp_path_factory.mktemp("model")
            made[name, dtype] = make_model(
                path, family, 3, **{"num_hidden_layers": 4, "dtype": dtype} | fields
            )
        return made[name, dtype]

    return make


@pytest.mark.parametrize("name", MODELS)
def test_logits_and_greedy_text(
    folder_of: Callable[..., Path],
    make_ring: type[Ring],
    make_reference: MakeReference,
    random_tokens: Callable[..., list[int]],
    name: str,
) -> None:
    folder = folder_of(name)
    tokens, reference = random_tokens(LENGTH), make_reference(folder)
    expected = reference.logits(tokens)
    greedy = reference.generate(tokens, ANSWER)
    for splits in ((), (1, 3)):
        ring = make_ring(folder, splits)
        logits = ring.run(tokens, [SequenceRows(0, LENGTH, BLOCKS)])
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)
        assert ring.generate(tokens, ANSWER, BLOCKS) == greedy


def test_internlm3_as_on_the_hub(
    make_model: MakeModel,
    tmp_path: Path,
    make_ring: type[Ring],
    random_tokens: Callable[..., list[int]],
) -> None:
    folder = make_model(tmp_path, "internlm3", 3, attention_bias=True, mlp_bias=True)
    tokens, rows = random_tokens(30), [SequenceRows(0, 30, BLOCKS)]
    expected = make_ring(folder, (1,)).run(tokens, rows)
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    assert config["architectures"] == ["LlamaForCausalLM"]
    config |= {"architectures": ["InternLM3ForCausalLM"], "qkv_bias": True, "bias": True}
    del config["attention_bias"], config["mlp_bias"]
    path.write_text(json.dumps(config), encoding="utf-8")
    assert torch.equal(make_ring(folder, (1,)).run(tokens, rows), expected)


def test_phi4_multimodal_without_what_sees_and_hears(
    make_model: MakeModel,
    tmp_path: Path,
    make_ring: type[Ring],
    make_reference: MakeReference,
    random_tokens: Callable[..., list[int]],
) -> None:
    folder = make_model(tmp_path, "phi3", 3, **PHI4_MINI, original_max_position_embeddings=256)
    tokens, rows = random_tokens(30), [SequenceRows(0, 30, BLOCKS)]
    expected = make_reference(folder).logits(tokens)
    weights, path = folder / "model.safetensors", folder / "config.json"
    stored = {"model.embed_tokens_extend.audio_embed.weight": torch.ones(3)}
    for name, tensor in load(weights.read_bytes()).items():
        module = name.removesuffix(".weight")
        if not module.endswith("_proj"):
            stored[name] = tensor
            continue
        stored[f"{module}.base_layer.weight"] = tensor
        for part in ("vision", "speech"):
            stored |= {f"{module}.lora_{side}.{part}.weight": torch.ones(2, 2) for side in "AB"}
    save_file(stored, weights, {"format": "pt"})
    config = json.loads(path.read_text(encoding="utf-8"))
    config |= {"architectures": ["Phi4MMForCausalLM"], "model_type": "phi4mm"}
    path.write_text(json.dumps(config), encoding="utf-8")
    logits = make_ring(folder, (1,)).run(tokens, rows)
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("name", "model", "prefix", "others"),
    [
        (
            "llama4",
            "Llama4",
            ("model.", "language_model.model."),
            ("vision_model.class_embedding", "multi_modal_projector.linear_1.weight"),
        ),
        (
            "gemma4_unified",
            "Gemma4Unified",
            ("model.", "model.language_model."),
            ("model.embed_vision.pos_embedding", "model.embed_audio.embedding_projection.weight"),
        ),
        (
            "gemma4 with experts",
            "Gemma4",
            ("model.", "model.language_model."),
            ("model.vision_tower.std_bias", "model.embed_vision.embedding_projection.weight"),
        ),
    ],
)
def test_text_models_as_on_the_hub(
    folder_of: Callable[..., Path],
    tmp_path: Path,
    make_ring: type[Ring],
    random_tokens: Callable[..., list[int]],
    name: str,
    model: str,
    prefix: tuple[str, str],
    others: tuple[str, ...],
) -> None:
    folder, tokens, rows = folder_of(name), random_tokens(40), [SequenceRows(0, 40, BLOCKS)]
    expected = make_ring(folder, (1,)).run(tokens, rows)
    stored = {
        each.replace(*prefix, 1) if each.startswith("model.") else f"language_model.{each}": tensor
        for each, tensor in load((folder / "model.safetensors").read_bytes()).items()
    }
    stored |= {each: torch.ones(3) for each in others}
    save_file(stored, tmp_path / "model.safetensors", {"format": "pt"})
    inner = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config = {"architectures": [f"{model}ForConditionalGeneration"], "text_config": inner}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    assert torch.equal(make_ring(tmp_path, (1,)).run(tokens, rows), expected)


def test_experts_in_stacks_are_those_of_separate_tensors(
    make_model: MakeModel,
    tmp_path: Path,
    make_ring: type[Ring],
    random_tokens: Callable[..., list[int]],
) -> None:
    made = [make_model(tmp_path / name, "qwen3_5_moe_text", 3) for name in ("apart", "stacked")]
    stack_experts(made[1])
    tokens, rows = random_tokens(30), [SequenceRows(0, 30, BLOCKS)]
    expected, found = (make_ring(folder, (1,)).run(tokens, rows) for folder in made)
    assert torch.equal(found, expected)


@pytest.mark.parametrize(
    "name", ["qwen3_next", "qwen3_5", "lfm2", "granitemoehybrid", "olmo_hybrid", "kimi_linear"]
)
def test_recurrent_layers_in_stages_of_one_layer(
    folder_of: Callable[..., Path],
    make_ring: type[Ring],
    make_reference: MakeReference,
    random_tokens: Callable[..., list[int]],
    name: str,
) -> None:
    # Three stages have no KV, and one has no state. The prompt is longer than a delta-rule chunk.
    folder, tokens = folder_of(name), random_tokens(150)
    reference, ring = make_reference(folder), make_ring(folder, (1, 2, 3))
    assert [stage.block_bytes(8) > 0 for stage in ring.stages] == [False, False, True, False]
    assert [stage.state_bytes > 0 for stage in ring.stages] == [True, True, False, True]
    logits = ring.run(tokens, [SequenceRows(0, 150, BLOCKS)])
    torch.testing.assert_close(logits, reference.logits(tokens), atol=1e-4, rtol=0)
    for stage in ring.stages:
        if states := stage._layer_pass.states:
            with torch.inference_mode():
                states.memories.fill_(torch.nan)
                states.conv_rows.fill_(torch.nan)
    # Another request in the same blocks and slot sees nothing of the first one.
    expected = reference.generate(tokens[:40], ANSWER)
    for chunk in (1024, 7, 1):
        assert ring.generate(tokens[:40], ANSWER, BLOCKS, chunk) == expected


def test_layers_that_keep_nothing_in_stages_of_one_layer(
    folder_of: Callable[..., Path],
    make_ring: type[Ring],
    make_reference: MakeReference,
    random_tokens: Callable[..., list[int]],
) -> None:
    folder, tokens = folder_of("nemotron_h"), random_tokens(40)
    ring = make_ring(folder, (1, 2, 3))
    assert [stage.block_bytes(8) > 0 for stage in ring.stages] == [False, False, True, False]
    assert [stage.state_bytes > 0 for stage in ring.stages] == [True, False, False, False]
    expected = make_reference(folder).generate(tokens, ANSWER)
    for chunk in (1024, 7, 1):
        assert ring.generate(tokens, ANSWER, BLOCKS, chunk) == expected


@pytest.mark.parametrize("name", KINDS)
def test_prefill_in_chunks(
    folder_of: Callable[..., Path],
    make_ring: type[Ring],
    make_reference: MakeReference,
    random_tokens: Callable[..., list[int]],
    name: str,
) -> None:
    folder, tokens = folder_of(name), random_tokens(LENGTH)
    expected = make_reference(folder).logits(tokens)
    for chunk in (1, 7, 32):
        ring, logits = make_ring(folder, (1,)), []
        for start in range(0, LENGTH, chunk):
            rows = tokens[start : start + chunk]
            logits.append(ring.run(rows, [SequenceRows(start, len(rows), BLOCKS)]))
        torch.testing.assert_close(torch.cat(logits), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", KINDS)
def test_rows_of_several_requests(
    folder_of: Callable[..., Path],
    make_ring: type[Ring],
    make_reference: MakeReference,
    random_tokens: Callable[..., list[int]],
    name: str,
) -> None:
    folder = folder_of(name)
    reference, ring = make_reference(folder), make_ring(folder, (2,), blocks=80, states=5)
    requests = [(30, 1), (0, 33), (3, 1), (41, 20), (60, 1)]
    prompts = [random_tokens(before + rows, seed) for seed, (before, rows) in enumerate(requests)]
    tables = [tuple(range(first, first + 10)) for first in range(0, 50, 10)]
    for slot, ((before, _), prompt) in enumerate(zip(requests, prompts, strict=True)):
        if before:
            rows = SequenceRows(0, before, tables[slot], state_slot=slot)
            ring.run(prompt[:before], [rows])
    now = [prompt[before:] for (before, _), prompt in zip(requests, prompts, strict=True)]
    logits = ring.run(
        [token for tokens in now for token in tokens],
        [
            SequenceRows(*request, table, state_slot=slot)
            for slot, (request, table) in enumerate(zip(requests, tables, strict=True))
        ],
    )
    expected = [
        reference.logits(prompt)[before:]
        for (before, _), prompt in zip(requests, prompts, strict=True)
    ]
    torch.testing.assert_close(logits, torch.cat(expected), atol=1e-4, rtol=0)


# Rounding changes which of many positions rows choose.
@pytest.mark.parametrize("name", [name for name in KINDS if name != "deepseek_v32"])
def test_16_bit_weights_stay_close(
    folder_of: Callable[..., Path],
    make_ring: type[Ring],
    make_reference: MakeReference,
    random_tokens: Callable[..., list[int]],
    name: str,
) -> None:
    folder, tokens = folder_of(name, dtype="bfloat16"), random_tokens(50)
    expected = make_reference(folder).logits(tokens)
    logits = make_ring(folder, (1, 2), dtype="bf16").run(tokens, [SequenceRows(0, 50, BLOCKS)])
    assert (logits - expected).abs().mean() < 0.05 * expected.std()


@pytest.mark.parametrize("chunk", [1, 16, 40, 100])
def test_longrope_depends_on_the_maximum_length(
    make_model: MakeModel,
    tmp_path: Path,
    make_ring: type[Ring],
    make_reference: MakeReference,
    random_tokens: Callable[..., list[int]],
    chunk: int,
) -> None:
    fields = PHI4_MINI | {"original_max_position_embeddings": 48}
    folder, tokens = make_model(tmp_path, "phi3", 7, **fields), random_tokens(LENGTH)
    expected = make_reference(folder).logits(tokens)
    bounds = [*range(0, LENGTH, chunk), LENGTH]

    def logits(reach: int) -> Tensor:
        ring = make_ring(folder, (1,))
        return torch.cat(
            [
                ring.run(tokens[start:end], [SequenceRows(start, end - start, BLOCKS, reach)])
                for start, end in pairwise(bounds)
            ]
        )

    torch.testing.assert_close(logits(LENGTH), expected, atol=1e-4, rtol=0)
    if chunk < LENGTH:
        assert (logits(0) - expected).abs().max() > 1e-2


def test_longrope_requests_of_both_lengths_in_a_batch(
    make_model: MakeModel,
    tmp_path: Path,
    make_ring: type[Ring],
    make_reference: MakeReference,
    random_tokens: Callable[..., list[int]],
) -> None:
    fields = PHI4_MINI | {"original_max_position_embeddings": 48}
    folder = make_model(tmp_path, "phi3", 8, **fields)
    reference, short, long = make_reference(folder), random_tokens(20, 1), random_tokens(60, 2)
    rows = [SequenceRows(0, 20, (3, 1, 0)), SequenceRows(0, 60, range(4, 12))]
    expected = torch.cat([reference.logits(short), reference.logits(long)])
    logits = make_ring(folder).run(short + long, rows)
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("name", KINDS)
def test_cuda_gives_what_the_cpu_gives(
    folder_of: Callable[..., Path],
    make_ring: type[Ring],
    random_tokens: Callable[..., list[int]],
    name: str,
) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device; run `pytest -m gpu` on a PC that has one")
    folder, tokens = folder_of(name), random_tokens(50)
    rows = [SequenceRows(0, 50, BLOCKS)]
    expected = make_ring(folder, (1,)).run(tokens, rows)
    logits = make_ring(folder, (1,), device="cuda:0").run(tokens, rows).cpu()
    torch.testing.assert_close(logits, expected, atol=2e-3, rtol=0)
