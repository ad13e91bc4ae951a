"""Maps architectures to traits that the decoder implements.

Supported ``architectures``:

- ``LlamaForCausalLM``: Llama 2 and 3.x
- ``GraniteForCausalLM``: Granite 3; factors of embeddings, scores, residuals and logits
- ``GraniteMoeForCausalLM``: the same with experts
- ``GraniteMoeHybridForCausalLM``: Granite 4; Mamba-2 in most layers
- ``SeedOssForCausalLM``
- ``OlmoHybridForCausalLM``: OLMo 2 with the gated delta rule in most layers
- ``Exaone4ForCausalLM``: OLMo's norms, RoPE in layers with windows only
- ``SmolLM3ForCausalLM``: some layers without RoPE
- ``Olmo2ForCausalLM``, ``Olmo3ForCausalLM``: norms after attention and MLP only, query and key
  norms over all heads; OLMo 3 with windows
- ``MistralForCausalLM``, ``MinistralForCausalLM``: sliding windows
- ``FalconH1ForCausalLM``: attention in parallel to Mamba-2 in each layer, factors
- ``NemotronHForCausalLM``: layers that are Mamba-2, attention, an MLP or experts
- ``InternLM3ForCausalLM``: Llama with other names of its biases
- ``PhimoeForCausalLM`` (Phi-3.5-MoE): LayerNorm, biases of logits, experts chosen one after the
  other
- ``Ministral3ForCausalLM``, ``Mistral4ForCausalLM``: queries scaled by position; the latter with
  latent attention
- ``MiMoForCausalLM``: Qwen2 with an MTP layer
- ``Qwen2ForCausalLM`` (also 2.5), ``Qwen3ForCausalLM``: windows in some layers
- ``Phi3ForCausalLM``: Phi-3, Phi-3.5, Phi-4 and Phi-4-mini; merged projections, LongRoPE
- ``Llama4ForCausalLM``: chunked attention in layers with RoPE, experts whose input is scaled
- ``MixtralForCausalLM``, ``Qwen2MoeForCausalLM``, ``Qwen3MoeForCausalLM``: experts
- ``Qwen3NextForCausalLM``, ``Qwen3_5ForCausalLM``, ``Qwen3_5MoeForCausalLM``: gated delta rule in
  most layers, gated attention in the others
- ``Lfm2ForCausalLM``, ``Lfm2MoeForCausalLM``: short convolutions in most layers
- ``CohereForCausalLM``, ``Cohere2ForCausalLM``: LayerNorm, attention and MLP in parallel; Cohere 2
  has windows, and RoPE only in layers with a window
- ``GptOssForCausalLM``: attention sinks, a clamped gate, experts in MXFP4
- ``GlmForCausalLM``, ``Glm4ForCausalLM``: partial, interleaved RoPE
- ``Glm4MoeForCausalLM``: GLM-4.5 to 4.7; experts with sigmoid scores, some shared
- ``DeepseekV2ForCausalLM``, ``DeepseekV3ForCausalLM``, ``Glm4MoeLiteForCausalLM``: latent attention
- ``DeepseekV32ForCausalLM``, ``GlmMoeDsaForCausalLM`` (GLM-5): the same, over selected positions
- ``KimiLinearForCausalLM``: a delta rule with a decay per channel in most layers, latent attention
  without RoPE in the others
- ``Dots1ForCausalLM``: Qwen3 with such experts
- ``MiniMaxM2ForCausalLM``: the same scores without groups and shared experts
- ``Ernie4_5ForCausalLM``, ``Ernie4_5_MoeForCausalLM``: interleaved RoPE
- ``HunYuanDenseV1ForCausalLM``, ``HunYuanMoEV1ForCausalLM``: norms of rotated queries and keys
- ``Gemma2ForCausalLM``, ``Gemma3ForCausalLM``: four norms a layer, soft-capped scores, separate
  RoPE for sliding-window layers
- ``Gemma4ForCausalLM``: the same with other heads in layers without windows, and experts in
  parallel to an MLP
- the text models of the multimodal ones in :mod:`molink.checkpoint.multimodal`

Only this module, :mod:`molink.checkpoint.family_traits`, :mod:`molink.checkpoint.gemma4_traits` and
:mod:`molink.checkpoint.mixture_traits` know families.
"""

from collections.abc import Callable
from typing import Any, Literal

from molink.checkpoint import family_traits, gemma4_traits, mixture_traits
from molink.checkpoint.config_fields import ConfigFields
from molink.checkpoint.rope import check_rope
from molink.checkpoint.traits import FamilyTraits, HeadShape
from molink.errors import BrokenModel

Family = Literal[
    "llama",
    "granite",
    "granitemoe",
    "granitemoehybrid",
    "seed_oss",
    "smollm3",
    "mistral",
    "olmo2",
    "olmo3",
    "exaone4",
    "mimo",
    "qwen2",
    "qwen3",
    "phi3",
    "mixtral",
    "qwen2_moe",
    "qwen3_moe",
    "lfm2",
    "lfm2_moe",
    "qwen3_next",
    "qwen3_5_text",
    "qwen3_5_moe_text",
    "gemma2",
    "gemma3_text",
    "glm",
    "glm4",
    "glm4_moe",
    "deepseek_v2",
    "deepseek_v3",
    "glm4_moe_lite",
    "dots1",
    "minimax_m2",
    "ernie4_5",
    "ernie4_5_moe",
    "hunyuan_v1_dense",
    "hunyuan_v1_moe",
    "gpt_oss",
    "cohere",
    "cohere2",
    "ministral",
    "ministral3",
    "mistral4",
    "internlm3",
    "phimoe",
    "nemotron_h",
    "olmo_hybrid",
    "falcon_h1",
    "llama4_text",
    "deepseek_v32",
    "glm_moe_dsa",
    "gemma4_text",
    "kimi_linear",
]

#: ``architectures`` entry → family, which is also its ``model_type``.
ARCHITECTURES: dict[str, Family] = {
    "LlamaForCausalLM": "llama",
    "Llama4ForCausalLM": "llama4_text",
    "GraniteForCausalLM": "granite",
    "GraniteMoeForCausalLM": "granitemoe",
    "GraniteMoeHybridForCausalLM": "granitemoehybrid",
    "SeedOssForCausalLM": "seed_oss",
    "SmolLM3ForCausalLM": "smollm3",
    "Olmo2ForCausalLM": "olmo2",
    "Olmo3ForCausalLM": "olmo3",
    "Exaone4ForCausalLM": "exaone4",
    "MistralForCausalLM": "mistral",
    "MiMoForCausalLM": "mimo",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Phi3ForCausalLM": "phi3",
    "MixtralForCausalLM": "mixtral",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "Lfm2ForCausalLM": "lfm2",
    "Lfm2MoeForCausalLM": "lfm2_moe",
    "Qwen3NextForCausalLM": "qwen3_next",
    "Qwen3_5ForCausalLM": "qwen3_5_text",
    "Qwen3_5MoeForCausalLM": "qwen3_5_moe_text",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3_text",
    "Gemma4ForCausalLM": "gemma4_text",
    "Gemma4UnifiedForCausalLM": "gemma4_text",
    "Qwen2MoeForCausalLM": "qwen2_moe",
    "GlmForCausalLM": "glm",
    "Glm4ForCausalLM": "glm4",
    "Glm4MoeForCausalLM": "glm4_moe",
    "DeepseekV2ForCausalLM": "deepseek_v2",
    "DeepseekV3ForCausalLM": "deepseek_v3",
    "DeepseekV32ForCausalLM": "deepseek_v32",
    "GlmMoeDsaForCausalLM": "glm_moe_dsa",
    "Glm4MoeLiteForCausalLM": "glm4_moe_lite",
    "KimiLinearForCausalLM": "kimi_linear",
    "Dots1ForCausalLM": "dots1",
    "MiniMaxM2ForCausalLM": "minimax_m2",
    "Ernie4_5ForCausalLM": "ernie4_5",
    "Ernie4_5_MoeForCausalLM": "ernie4_5_moe",
    "HunYuanDenseV1ForCausalLM": "hunyuan_v1_dense",
    "HunYuanMoEV1ForCausalLM": "hunyuan_v1_moe",
    "GptOssForCausalLM": "gpt_oss",
    "CohereForCausalLM": "cohere",
    "Cohere2ForCausalLM": "cohere2",
    "MinistralForCausalLM": "ministral",
    "Ministral3ForCausalLM": "ministral3",
    "Mistral4ForCausalLM": "mistral4",
    "InternLM3ForCausalLM": "internlm3",
    "NemotronHForCausalLM": "nemotron_h",
    "FalconH1ForCausalLM": "falcon_h1",
    "OlmoHybridForCausalLM": "olmo_hybrid",
    # Spelled as on the hub, and as in transformers.
    "PhiMoEForCausalLM": "phimoe",
    "PhimoeForCausalLM": "phimoe",
}
_GLM_DEFAULTS = {
    "head_dim": 128,
    "rms_norm_eps": 1.5625e-7,
    "partial_rotary_factor": 0.5,
    "eos_token_id": [151329, 151336, 151338],
}
_DEEPSEEK_V3 = {
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "n_group": 8,
    "topk_group": 4,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 3,
    "num_nextn_predict_layers": 1,
}
_MISTRAL_YARN = {
    "rope_type": "yarn",
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
#: Family-specific defaults of absent config fields.
CONFIG_DEFAULTS: dict[Family, dict[str, Any]] = {
    "olmo2": {"rms_norm_eps": 1e-5},
    "olmo3": {"rms_norm_eps": 1e-5},
    "exaone4": {"rms_norm_eps": 1e-5},
    "qwen2_moe": {
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
    },
    "lfm2": {"norm_eps": 1e-5, "block_auto_adjust_ff_dim": True},
    "lfm2_moe": {
        "norm_eps": 1e-5,
        "num_experts": 32,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1792,
        "norm_topk_prob": True,
    },
    "qwen3_next": {
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "norm_topk_prob": True,
    },
    "qwen3_5_moe_text": {
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        # No layer has a plain MLP.
        "intermediate_size": 512,
        "norm_topk_prob": True,
    },
    "glm": _GLM_DEFAULTS,
    "glm4": _GLM_DEFAULTS,
    "glm4_moe": {
        "rms_norm_eps": 1e-5,
        "partial_rotary_factor": 0.5,
        "n_routed_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 1408,
        "first_k_dense_replace": 1,
        "num_nextn_predict_layers": 1,
    },
    "deepseek_v2": {
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "moe_intermediate_size": 1407,
    },
    "deepseek_v3": _DEEPSEEK_V3,
    "deepseek_v32": _DEEPSEEK_V3,
    "glm_moe_dsa": _DEEPSEEK_V3
    | {
        "rms_norm_eps": 1e-5,
        "n_group": 1,
        "topk_group": 1,
        "q_lora_rank": 2048,
        "qk_nope_head_dim": 192,
        "v_head_dim": 256,
    },
    "glm4_moe_lite": {
        "rms_norm_eps": 1e-5,
        "n_routed_experts": 64,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1536,
        "routed_scaling_factor": 1.8,
        "first_k_dense_replace": 1,
        "q_lora_rank": 768,
        "qk_nope_head_dim": 192,
        "v_head_dim": 256,
        "num_nextn_predict_layers": 1,
    },
    "kimi_linear": {
        "rms_norm_eps": 1e-5,
        "n_routed_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 1024,
        "routed_scaling_factor": 2.446,
        "first_k_dense_replace": 1,
        "q_lora_rank": None,
    },
    "dots1": {"moe_intermediate_size": 1408, "norm_topk_prob": False},
    "ernie4_5": {"rms_norm_eps": 1e-5},
    "ernie4_5_moe": {"rms_norm_eps": 1e-5, "moe_intermediate_size": 1536},
    "minimax_m2": {"num_local_experts": 256, "num_experts_per_tok": 8},
    "hunyuan_v1_dense": {"rms_norm_eps": 1e-5},
    "hunyuan_v1_moe": {"rms_norm_eps": 1e-5},
    "internlm3": {"rms_norm_eps": 1e-5},
    "falcon_h1": {"rms_norm_eps": 1e-5},
    "nemotron_h": {
        "layer_norm_epsilon": 1e-5,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 7688,
        "num_key_value_heads": 8,
    },
    "phimoe": {"rms_norm_eps": 1e-5, "num_local_experts": 16},
    "llama4_text": {
        "rms_norm_eps": 1e-5,
        "intermediate_size": 8192,
        "intermediate_size_mlp": 16384,
    },
    "ministral3": {
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "rope_scaling": _MISTRAL_YARN | {"factor": 16.0, "original_max_position_embeddings": 16384},
    },
    "mistral4": {
        "n_routed_experts": 128,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 2048,
        "kv_lora_rank": 256,
        "q_lora_rank": 1024,
        "qk_nope_head_dim": 64,
        "rope_scaling": _MISTRAL_YARN | {"factor": 128.0, "original_max_position_embeddings": 8192},
    },
    "cohere": {"layer_norm_eps": 1e-5},
    "cohere2": {"layer_norm_eps": 1e-5},
    "gpt_oss": {
        "head_dim": 64,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150_000.0,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 32.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
        "sliding_window": 128,
    },
    "gemma4_text": {
        "head_dim": 256,
        "sliding_window": 512,
        "num_key_value_heads": 4,
        "rope_parameters": {
            "full_attention": {
                "rope_type": "proportional",
                "rope_theta": 1e6,
                "partial_rotary_factor": 0.25,
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    },
    "gemma3_text": {
        "vocab_size": 262_208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "max_position_embeddings": 131_072,
    },
}
#: Families' own names of config fields, and the usual ones.
CONFIG_NAMES: dict[Family, dict[str, str]] = {
    "kimi_linear": {
        "model_max_length": "max_position_embeddings",
        "num_experts": "n_routed_experts",
        "num_experts_per_token": "num_experts_per_tok",
        "num_shared_experts": "n_shared_experts",
        "num_expert_group": "n_group",
        "moe_renormalize": "norm_topk_prob",
    },
}
_FAMILIES: dict[Family, Callable[[ConfigFields, int], FamilyTraits]] = {
    "llama": family_traits.llama,
    "granite": family_traits.granite,
    "granitemoe": mixture_traits.granite_moe,
    "granitemoehybrid": mixture_traits.granite_hybrid,
    "seed_oss": family_traits.seed_oss,
    "smollm3": family_traits.smollm3,
    "olmo2": family_traits.olmo2,
    "olmo3": family_traits.olmo3,
    "exaone4": family_traits.exaone4,
    "mistral": family_traits.mistral,
    "mimo": family_traits.mimo,
    "qwen2": family_traits.qwen2,
    "qwen3": family_traits.qwen3,
    "phi3": family_traits.phi3,
    "llama4_text": mixture_traits.llama4,
    "mixtral": mixture_traits.mixtral,
    "qwen2_moe": mixture_traits.qwen2_moe,
    "qwen3_moe": mixture_traits.qwen3_moe,
    "lfm2": family_traits.lfm2,
    "lfm2_moe": mixture_traits.lfm2_moe,
    "qwen3_next": mixture_traits.qwen3_next,
    "qwen3_5_text": family_traits.qwen3_5,
    "qwen3_5_moe_text": mixture_traits.qwen3_5_moe,
    "glm": family_traits.glm,
    "glm4": family_traits.glm4,
    "glm4_moe": mixture_traits.glm4_moe,
    "deepseek_v2": mixture_traits.deepseek_v2,
    "deepseek_v3": mixture_traits.deepseek_v3,
    "glm4_moe_lite": mixture_traits.glm4_moe_lite,
    "deepseek_v32": mixture_traits.deepseek_v32,
    "glm_moe_dsa": mixture_traits.glm_moe_dsa,
    "kimi_linear": mixture_traits.kimi_linear,
    "dots1": mixture_traits.dots1,
    "minimax_m2": mixture_traits.minimax_m2,
    "ernie4_5": family_traits.ernie4_5,
    "ernie4_5_moe": mixture_traits.ernie4_5_moe,
    "hunyuan_v1_dense": family_traits.hunyuan_dense,
    "hunyuan_v1_moe": mixture_traits.hunyuan_moe,
    "gpt_oss": mixture_traits.gpt_oss,
    "cohere": family_traits.cohere,
    "cohere2": family_traits.cohere2,
    "ministral": family_traits.ministral,
    "ministral3": family_traits.ministral3,
    "mistral4": mixture_traits.mistral4,
    "internlm3": family_traits.internlm3,
    "phimoe": mixture_traits.phimoe,
    "nemotron_h": mixture_traits.nemotron_h,
    "falcon_h1": family_traits.falcon_h1,
    "olmo_hybrid": family_traits.olmo_hybrid,
    "gemma2": family_traits.gemma2,
    "gemma3_text": family_traits.gemma3,
    "gemma4_text": gemma4_traits.gemma4,
}
_MAX_HEAD_DIM = 1024


def parse_traits(family: Family, fields: ConfigFields, layers: int) -> FamilyTraits:
    """Parse the traits of a ``family`` from its config.

    Raises:
        UnsupportedModel: a feature is not implemented.
        BrokenModel: a field is missing or invalid.
    """
    traits = _FAMILIES[family](fields, layers)
    for shape in filter(None, (HeadShape(traits.kv_heads, traits.head_dim), traits.full_heads)):
        _check_heads(traits.heads, shape, fields.where)
    for rope, head_dim in zip(traits.rope_configs, traits.rope_head_dims, strict=True):
        check_rope(rope, head_dim, fields.where)
    return traits


def _check_heads(heads: int, shape: HeadShape, where: str) -> None:
    if heads % shape.kv_heads:
        raise BrokenModel(
            f"{where}: num_attention_heads {heads} is not a multiple of num_key_value_heads "
            f"{shape.kv_heads}"
        )
    if shape.head_dim % 2 or shape.head_dim > _MAX_HEAD_DIM:
        raise BrokenModel(
            f"{where}: head_dim {shape.head_dim} must be even and at most {_MAX_HEAD_DIM}"
        )
