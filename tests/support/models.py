"""Random small models in Hugging Face's format, each written once per test run."""

import copy
import hashlib
import json
import re
import shutil
import struct
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from molink.checkpoint.config import ModelConfig
from molink.checkpoint.tensor_layout import stage_tensors

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
#: Corrections of experts' scores, parameters in some models and buffers in others.
CORRECTIONS = ("e_score_correction_bias", "expert_bias")
#: Families whose norms have weights around 0.
ADD_ONE = ("gemma", "qwen3_next", "qwen3_5")
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
VOCABULARY = 320

GRANITE_FACTORS = {
    "attention_multiplier": 0.3,
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "logits_scaling": 0.1,
}
#: Latent attention; heads have no other size.
LATENT = {
    "q_lora_rank": 24,
    "kv_lora_rank": 48,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
    "num_key_value_heads": 4,
}
#: Sparse attention to fewer positions than tests have. Sums of few heads would often be equal.
SPARSE_LATENT = {
    **LATENT,
    "index_topk": 12,
    "index_n_heads": 8,
    "index_head_dim": 24,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "n_group": 4,
    "topk_group": 2,
}
#: Other heads in layers without windows, which have no projections to values.
GEMMA4: dict[str, Any] = {
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
    "num_hidden_layers": 4,
    "sliding_window": 9,
    "global_head_dim": 32,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 0,
    "final_logit_softcapping": 2.0,
    "tie_word_embeddings": True,
}
#: Layers with the gated delta rule, in an aperiodic order.
DELTA_RULE = {
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    "num_hidden_layers": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 20,
    "linear_conv_kernel_dim": 4,
    "rope_parameters": {"rope_theta": 10000.0, "partial_rotary_factor": 0.25},
}
#: Short convolutions in such layers.
SHORT_CONV = {"layer_types": ["conv", "conv", "full_attention", "conv"], "num_hidden_layers": 4}
#: Queries that grow every few positions.
MINISTRAL3: dict[str, Any] = {
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 16,
        "llama_4_scaling_beta": 0.4,
    }
}
#: Chunked attention, and experts in every other layer.
LLAMA4: dict[str, Any] = {
    "attention_chunk_size": 12,
    "no_rope_layers": [1, 1, 0, 1],
    "attn_scale": 0.4,
    "floor_scale": 8,
    "num_local_experts": 6,
    "interleave_moe_layer_step": 2,
    "intermediate_size": 32,
    "intermediate_size_mlp": 96,
    "num_hidden_layers": 4,
}
#: Transformers knows Mistral 4 as a text model of Mistral 3 only.
MISTRAL4 = {
    **LATENT,
    **MINISTRAL3,
    "model_type": "mistral4",
    "head_dim": 32,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
}
#: Of a Cohere 2 that sees; transformers leaves out its factor of logits.
COHERE2_TEXT = {"logit_scale": 1.0, "sliding_window": 9, "tie_word_embeddings": True}
#: Config fields by family, besides those common to all small models.
FAMILY_FIELDS: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": 12},
    "granite": GRANITE_FACTORS,
    "granitemoe": {
        **GRANITE_FACTORS,
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "intermediate_size": 32,
    },
    "granitemoehybrid": {
        **GRANITE_FACTORS,
        "layer_types": DELTA_RULE["layer_types"],
        "num_hidden_layers": 4,
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "intermediate_size": 32,
        "shared_intermediate_size": 48,
        "mamba_n_heads": 8,
        "mamba_n_groups": 2,
        "mamba_d_state": 24,
    },
    "olmo3": {"sliding_window": 9},
    "ministral": {"sliding_window": 9},
    "phimoe": {
        "num_local_experts": 6,
        "intermediate_size": 32,
        "attention_bias": True,
        "lm_head_bias": True,
        # Experts within half of the best one.
        "router_jitter_noise": 0.25,
    },
    "smolvlm": {"model_type": "llama"},
    "falcon_h1": {
        "num_hidden_layers": 4,
        "mamba_d_ssm": 96,
        "mamba_n_heads": 8,
        "mamba_n_groups": 2,
        "mamba_d_state": 24,
        "mlp_multipliers": [0.8, 1.3],
        "ssm_multipliers": [0.7, 1.2, 0.9, 1.1, 0.6],
        "embedding_multiplier": 3.0,
        "lm_head_multiplier": 1.5,
        "key_multiplier": 0.7,
        "attention_in_multiplier": 1.2,
        "attention_out_multiplier": 0.9,
        "ssm_in_multiplier": 1.25,
        "ssm_out_multiplier": 0.8,
    },
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "mlp", "full_attention", "moe"],
        "mamba_num_heads": 8,
        "mamba_head_dim": 12,
        "n_groups": 2,
        "ssm_state_size": 24,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 32,
        "moe_shared_expert_intermediate_size": 48,
        "routed_scaling_factor": 2.5,
    },
    "ministral3": MINISTRAL3,
    "llama4_text": LLAMA4,
    "cohere": {"logit_scale": 2.0},
    "cohere2": {"logit_scale": 2.0, "sliding_window": 9},
    "exaone4": {"sliding_window": 9},
    "smollm3": {"no_rope_layers": [1, 0, 1, 1]},
    "phi3": {"sliding_window": 24},
    "mixtral": {"num_local_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 48},
    "qwen3_moe": {
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
    },
    "qwen2_moe": {
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 64,
    },
    "glm4_moe": {
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 2.5,
        "attention_bias": True,
    },
    "deepseek_v2": {
        **LATENT,
        "q_lora_rank": None,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 1,
    },
    "deepseek_v3": {
        **LATENT,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 1,
        "n_group": 4,
        "topk_group": 2,
    },
    "deepseek_v32": SPARSE_LATENT,
    "glm_moe_dsa": SPARSE_LATENT,
    "glm4_moe_lite": {
        **LATENT,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 32,
    },
    "dots1": {
        "n_routed_experts": 8,
        "n_shared_experts": 2,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 2.5,
        "norm_topk_prob": True,
        "sliding_window": None,
    },
    "ernie4_5_moe": {
        "moe_num_experts": 8,
        "moe_k": 3,
        "moe_intermediate_size": 32,
        "moe_num_shared_experts": 2,
        "moe_layer_start_index": 1,
    },
    "minimax_m2": {
        "num_local_experts": 8,
        "num_experts_per_tok": 3,
        "intermediate_size": 32,
        "rotary_dim": 8,
    },
    "hunyuan_v1_moe": {"num_experts": 6, "moe_topk": 2, "intermediate_size": 32},
    "gpt_oss": {
        "num_local_experts": 6,
        "num_experts_per_tok": 3,
        "intermediate_size": 32,
        "sliding_window": 10,
        "swiglu_limit": 1.5,
    },
    "lfm2": SHORT_CONV,
    "lfm2_moe": {
        **SHORT_CONV,
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 32,
        "num_dense_layers": 1,
    },
    "qwen3_next": {
        **DELTA_RULE,
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 64,
    },
    "kimi_linear": {
        **{name: value for name, value in LATENT.items() if not name.startswith("rope")},
        "q_lora_rank": None,
        "layer_types": DELTA_RULE["layer_types"],
        "num_hidden_layers": 4,
        "linear_head_dim": 16,
        "linear_num_heads": 3,
        "num_experts": 8,
        "num_experts_per_token": 3,
        "moe_intermediate_size": 32,
    },
    # As many elements of queries, keys and values: transformers writes their convolutions so.
    "olmo_hybrid": {
        **DELTA_RULE,
        "linear_key_head_dim": 24,
        "linear_value_head_dim": 8,
        "rope_parameters": None,
    },
    "qwen3_5_text": DELTA_RULE,
    "qwen3_5": {**DELTA_RULE, "model_type": "qwen3_5_text"},
    "qwen3_5_moe_text": {
        **DELTA_RULE,
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 64,
    },
    "gemma2": {"sliding_window": 16, "query_pre_attn_scalar": 24, "tie_word_embeddings": True},
    "gemma3_text": {"sliding_window": 10, "query_pre_attn_scalar": 24, "tie_word_embeddings": True},
    "gemma3": {"sliding_window": 10, "query_pre_attn_scalar": 24, "tie_word_embeddings": True},
    "gemma4_text": GEMMA4,
    "gemma4": {**GEMMA4, "use_bidirectional_attention": "vision"},
    "gemma4_unified": {
        **{name: value for name, value in GEMMA4.items() if name != "hidden_size_per_layer_input"},
        "use_bidirectional_attention": "vision",
    },
    "gemma4_unified_text": {
        name: value for name, value in GEMMA4.items() if name != "hidden_size_per_layer_input"
    },
    "mistral3": {"sliding_window": None, "model_type": "mistral"},
    "qwen3_vl_moe": {
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 32,
    },
    "aya_vision": COHERE2_TEXT,
    "cohere2_vision": COHERE2_TEXT,
}

_DEEPSTACK = {"out_hidden_size": 64, "deepstack_visual_indexes": [0]}
#: Models that see images: the ``model_type`` of what sees, and what else its config says.
SIGHT: dict[str, dict[str, Any]] = {
    "gemma3": {"model_type": "siglip_vision_model", "image_size": 224},
    "mistral3": {"model_type": "pixtral", "image_size": 28, "head_dim": 16},
    "gemma4": {
        "model_type": "gemma4_vision",
        "num_key_value_heads": 2,
        "head_dim": 16,
        "position_embedding_size": 160,
    },
    "gemma4_unified": {
        "model_type": "gemma4_unified_vision",
        "mm_embed_dim": 64,
        "output_proj_dims": 64,
        "mm_posemb_size": 80,
    },
    "smolvlm": {"model_type": "smolvlm_vision", "image_size": 28},
    "aya_vision": {"model_type": "siglip_vision_model", "image_size": 28},
    "cohere2_vision": {"model_type": "siglip_vision_model", "image_size": 28},
    "qwen3_5": {"model_type": "qwen3_5_vision", "out_hidden_size": 64},
    "qwen2_5_vl": {"model_type": "qwen2_5_vl_vision", "out_hidden_size": 64},
    "qwen3_vl": {"model_type": "qwen3_vl_vision", **_DEEPSTACK},
    "qwen3_vl_moe": {"model_type": "qwen3_vl_moe_vision", **_DEEPSTACK},
}
_SMALL_SIGHT = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "patch_size": 14,
}

#: A small Llama with meaningless weights, written without torch.
PLAIN_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 16,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 32,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "eos_token_id": 2,
}


def write_tensors(path: Path, tensors: dict[str, bytes]) -> None:
    """A safetensors file of byte tensors."""
    header: dict[str, object] = {}
    end = 0
    for name, data in tensors.items():
        offsets = [end, end + len(data)]
        header[name] = {"dtype": "U8", "shape": [len(data)], "data_offsets": offsets}
        end += len(data)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(tensors.values()))


def _write_tokenizer(folder: Path) -> None:
    """A byte-level tokenizer: ids 0–255 are bytes, 256–258 the special tokens."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: index for index, letter in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL_TOKENS])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "chat_template": CHAT_TEMPLATE,
    }
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(settings, indent=2), encoding="utf-8")


def write_model(
    folder: Path,
    family: str = "qwen2",
    seed: int = 0,
    *,
    dtype: str = "float32",
    max_shard_size: str = "5GB",
    **overrides: Any,
) -> Path:
    """Write a random small Hugging Face model of ``family`` into ``folder`` and return it.

    ``overrides`` are fields of its config; of one that sees, ``vision_config`` and ``outer_config``
    are others'. Weights are large enough for logits to differ clearly.
    """
    if family == "mimo":  # transformers doesn't know it
        given = {"dtype": dtype, "max_shard_size": max_shard_size, **overrides}
        return make_mimo(add_draft_layer(write_model(folder, "qwen2", seed, **given)))
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    settings: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": 258,
        "pad_token_id": 256,
    }
    settings |= FAMILY_FIELDS.get(family, {}) | overrides
    kind: Any = AutoModelForCausalLM
    if family in SIGHT:
        tied = settings["tie_word_embeddings"]
        sight = _SMALL_SIGHT | SIGHT[family] | settings.pop("vision_config", {})
        outer = settings.pop("outer_config", {})
        settings = {"text_config": settings, "vision_config": sight, "tie_word_embeddings": tied}
        settings |= outer
        kind = AutoModelForImageTextToText
    # Config classes may change their arguments.
    config = AutoConfig.for_model(family, **copy.deepcopy(settings))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = kind.from_config(config)
        _randomize_weights(model, family)
    folder.mkdir(parents=True, exist_ok=True)
    model.to(getattr(torch, dtype)).save_pretrained(folder, max_shard_size=max_shard_size)
    if family == "kimi_linear":
        _name_dense_mlps(folder)
    _write_tokenizer(folder)
    return folder


def _name_dense_mlps(folder: Path) -> None:
    """Give MLPs that aren't experts their released names; transformers writes those of experts."""
    from safetensors.torch import load, save_file

    for path in folder.glob("*.safetensors"):
        tensors = {
            re.sub(r"\.block_sparse_moe\.(gate|up|down)_proj\.", r".mlp.\1_proj.", name): tensor
            for name, tensor in load(path.read_bytes()).items()
        }
        save_file(tensors, path, {"format": "pt"})


def _randomize_weights(model: Any, family: str) -> None:
    for name, parameter in model.named_parameters():
        if name.endswith(CORRECTIONS):
            parameter.data.normal_(0, 0.1)
        elif name.endswith(("bias", "sinks")):
            parameter.data.normal_(0, 0.2)
        elif name.endswith("A_log"):
            # States that last for some tens of tokens.
            parameter.data.normal_(-3, 1)
        elif parameter.dim() == 1:
            # Gemma and Qwen3.5 add 1 to the weights of their norms.
            offset = family.startswith(ADD_ONE) and not name.endswith("linear_attn.norm.weight")
            parameter.data.normal_(0 if offset else 1, 0.1)
        else:
            parameter.data.normal_(0, parameter.shape[-1] ** -0.5)
    for name, buffer in model.named_buffers():
        if name.endswith("layer_scalar"):
            buffer.normal_(0.8, 0.1)
        if name.endswith((*CORRECTIONS, "std_bias")):
            buffer.normal_(0, 0.1)
        elif name.endswith("std_scale"):
            buffer.uniform_(0.5, 1.5)


#: What MiMo and Qwen call the parts of such a layer.
MIMO_NAMES = {
    "enorm": "token_layernorm",
    "hnorm": "hidden_layernorm",
    "eh_proj": "input_proj",
    "shared_head.norm": "final_layernorm",
}
QWEN_NAMES = {
    "enorm": "pre_fc_norm_embedding",
    "hnorm": "pre_fc_norm_hidden",
    "eh_proj": "fc",
    "shared_head.norm": "norm",
}


def make_mimo(folder: Path) -> Path:
    """Turn a small Qwen2 with such a layer into a MiMo."""
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    config |= {
        "architectures": ["MiMoForCausalLM"],
        "model_type": "mimo",
        "num_nextn_predict_layers": 1,
    }
    path.write_text(json.dumps(config), encoding="utf-8")
    return _rename_draft_layer(folder, MIMO_NAMES, "model.mtp_layers.0.", "")


def name_qwen_drafts(folder: Path) -> Path:
    """Name such a layer of a small Qwen3-Next or Qwen3.5 as released."""
    return _rename_draft_layer(folder, QWEN_NAMES, "mtp.", "layers.0.")


def _rename_draft_layer(folder: Path, names: Mapping[str, str], prefix: str, layer: str) -> Path:
    """Move parts to ``prefix`` under their ``names``, others to ``layer`` below it."""
    from safetensors.torch import load, save_file

    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    old, renamed = f"model.layers.{config['num_hidden_layers']}.", {}
    for name, tensor in load((folder / "model.safetensors").read_bytes()).items():
        inner = name.removeprefix(old)
        if inner == name:
            renamed[name] = tensor
        elif not inner.startswith(("embed_tokens", "shared_head.head")):
            module = inner.removesuffix(".weight")
            inner = f"{names[module]}.weight" if module in names else f"{layer}{inner}"
            renamed[f"{prefix}{inner}"] = tensor
    save_file(renamed, folder / "model.safetensors", {"format": "pt"})
    return folder


def add_draft_layer(folder: Path) -> Path:
    """Add a random multi-token prediction layer to a small model of random weights.

    It is like the last one with attention, and named as in DeepSeek-V3 and GLM-4.5.
    """
    import torch
    from safetensors.torch import load, save_file

    tensors = load((folder / "model.safetensors").read_bytes())
    config = ModelConfig.load_folder(folder)
    attended = max(filter(config.has_attention, range(config.layers)))
    last, added = f"model.layers.{attended}.", f"model.layers.{config.layers}."
    generator = torch.Generator().manual_seed(9)

    def shuffle(tensor: Any) -> Any:
        order = torch.randperm(tensor.numel(), generator=generator)
        return tensor.flatten()[order].view(tensor.shape)

    made = {
        added + name.removeprefix(last): shuffle(tensor)
        for name, tensor in tensors.items()
        if name.startswith(last)
    }
    table, norm = tensors["model.embed_tokens.weight"], tensors["model.norm.weight"]
    made[f"{added}embed_tokens.weight"] = table.clone()
    made[f"{added}shared_head.head.weight"] = table.clone()
    joined = torch.randn(len(norm), 2 * len(norm), generator=generator)
    made[f"{added}eh_proj.weight"] = (joined * (2 * len(norm)) ** -0.5).to(norm.dtype)
    made |= {
        f"{added}{name}.weight": shuffle(norm) for name in ("enorm", "hnorm", "shared_head.norm")
    }
    save_file(tensors | made, folder / "model.safetensors", {"format": "pt"})
    return folder


def stack_experts(folder: Path) -> Path:
    """Stack the experts of a small model, as Qwen3.5's are released."""
    import torch
    from safetensors.torch import load, save_file

    tensors = load((folder / "model.safetensors").read_bytes())
    found: dict[tuple[str, str], list[torch.Tensor]] = {}
    for name in sorted(name for name in tensors if ".experts." in name):
        module, rest = name.split(".experts.")
        _, projection, _ = rest.split(".")
        found.setdefault((f"{module}.experts.", projection), []).append(tensors.pop(name))
    for (module, projection), experts in found.items():
        stacked = torch.stack(experts)
        if projection == "gate_proj":
            ups = torch.stack(found[module, "up_proj"])
            tensors[f"{module}gate_up_proj"] = torch.cat((stacked, ups), dim=1)
        elif projection == "down_proj":
            tensors[f"{module}down_proj"] = stacked
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def make_embedding_model(folder: Path) -> Path:
    """Turn a small model into one that embeds, as Qwen3-Embedding is released.

    Its tensors lack ``model.`` and the output head, and its tokenizer ends texts with a token.
    """
    from safetensors.torch import load, save_file
    from tokenizers import Tokenizer, processors

    weights = folder / "model.safetensors"
    tensors = load(weights.read_bytes())
    tensors.pop("lm_head.weight", None)
    bare = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    save_file(bare, weights, {"format": "pt"})
    parts = ("Transformer", "Pooling", "Normalize")
    write_modules(folder, parts, {"1_Pooling": {"pooling_mode_lasttoken": True}})
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    end = SPECIAL_TOKENS[0]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A {end}", special_tokens=[(end, tokenizer.token_to_id(end))]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def write_modules(
    folder: Path, names: Sequence[str], configs: Mapping[str, dict[str, Any]]
) -> Path:
    """Write sentence-transformers' ``modules.json``, and the config of some modules by path."""
    modules = [
        {
            "idx": index,
            "name": str(index),
            "path": f"{index}_{name}" if index else "",
            "type": f"sentence_transformers.models.{name}",
        }
        for index, name in enumerate(names)
    ]
    (folder / "modules.json").write_text(json.dumps(modules), encoding="utf-8")
    for path, config in configs.items():
        (folder / path).mkdir(exist_ok=True)
        (folder / path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


class MakeModel:
    """``make_model(folder, family, seed, **config_fields) -> folder``: see :func:`write_model`.

    Models that were asked for before are copied from ``cache``, which the processes of a parallel
    run share: each is written beside its place and then renamed, so that it is there whole.
    """

    def __init__(self, cache: Path) -> None:
        self._cache = cache

    def __call__(self, folder: Path, family: str = "qwen2", seed: int = 0, **fields: Any) -> Path:
        asked = json.dumps([family, seed, fields], sort_keys=True)
        made = self._cache / hashlib.sha256(asked.encode()).hexdigest()[:20]
        if not made.exists():
            self._cache.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=self._cache) as beside:
                written = write_model(Path(beside) / "model", family, seed, **fields)
                try:
                    written.rename(made)
                except OSError:
                    # Another process has written it meanwhile.
                    assert made.exists()
        return Path(shutil.copytree(made, folder, dirs_exist_ok=True))


def write_plain_model(folder: Path, *, tied: bool = False, seed: int = 0) -> Path:
    """Write it into a new ``folder``; the bytes depend on ``seed``."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(
        json.dumps({**PLAIN_CONFIG, "tie_word_embeddings": tied}), encoding="utf-8"
    )
    (folder / "tokenizer.json").write_text("{}", encoding="utf-8")
    (folder / "tokenizer_config.json").write_text('{"x": 1}', encoding="utf-8")
    _write_weights(folder, seed)
    return folder


def _write_weights(folder: Path, seed: int) -> None:
    """Two shards with bytes that depend on the tensor."""
    config = ModelConfig.load_folder(folder)
    names = list(stage_tensors(config, 0, config.layers).items())
    half = len(names) // 2
    for number, part in enumerate((names[:half], names[half:])):
        header: dict[str, object] = {}
        body = b""
        for name, shape in part:
            size = 4
            for extent in shape:
                size *= extent
            offsets = [len(body), len(body) + size]
            header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": offsets}
            body += bytes((i * 7 + len(name) + seed) % 256 for i in range(size))
        text = json.dumps(header).encode()
        data = struct.pack("<Q", len(text)) + text + body
        (folder / f"model-{number}.safetensors").write_bytes(data)
