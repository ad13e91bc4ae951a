"""Fields of configurations of model families, as published on the hub, but small."""

from molink.checkpoint.families import ARCHITECTURES

SIZES = {
    "vocab_size": 1000,
    "hidden_size": 96,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
}


SLIDING, FULL, LINEAR = "sliding_attention", "full_attention", "linear_attention"


LISTS = {"short_factor": [1.0] * 9, "long_factor": [4.0] * 9}


PHI4_MINI = {
    "partial_rotary_factor": 0.75,
    "max_position_embeddings": 131072,
    "original_max_position_embeddings": 4096,
    "sliding_window": 262144,
    "tie_word_embeddings": True,
    "rope_scaling": {"type": "longrope", **LISTS},
}


NAMES = {family: architecture for architecture, family in ARCHITECTURES.items()}


#: DeepSeek V3.2 as released, shrunk.
DEEPSEEK_V32 = {
    "index_head_dim": 128,
    "index_n_heads": 64,
    "index_topk": 2048,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 128,
    "first_k_dense_replace": 3,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "num_nextn_predict_layers": 1,
}


#: Gemma 4's larger models as released, shrunk.
GEMMA4 = {
    "attention_k_eq_v": True,
    "global_head_dim": 64,
    "head_dim": 32,
    "hidden_size_per_layer_input": 0,
    "num_global_key_value_heads": 1,
    "num_kv_shared_layers": 0,
    "sliding_window": 1024,
    "layer_types": [SLIDING, SLIDING, SLIDING, FULL],
    "use_bidirectional_attention": "vision",
}


#: Expert settings of GLM-4.5-Air.
GLM_AIR = {
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 1408,
    "n_group": 1,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_experts_per_tok": 8,
    "num_nextn_predict_layers": 1,
    "routed_scaling_factor": 1.0,
    "topk_group": 1,
}


#: Attention settings of DeepSeek-V3.
DEEPSEEK = {
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "num_key_value_heads": 4,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "max_position_embeddings": 163840,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
}
