"""Names and shapes of the tensors that a decoder has, and which of them a stage needs."""

from molink.model.config import ModelConfig

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
OUTPUT_HEAD = "lm_head.weight"

Shapes = dict[str, tuple[int, ...]]


def layer_tensors(config: ModelConfig, layer: int) -> Shapes:
    """Tensors of one decoder layer with their shapes (``[out, in]`` for projections)."""
    hidden, inner = config.hidden_size, config.intermediate_size
    queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
    projections = {
        "self_attn.q_proj": ((queries, hidden), config.attention_bias),
        "self_attn.k_proj": ((keys, hidden), config.attention_bias),
        "self_attn.v_proj": ((keys, hidden), config.attention_bias),
        "self_attn.o_proj": ((hidden, queries), config.output_bias),
        "mlp.gate_proj": ((inner, hidden), config.mlp_bias),
        "mlp.up_proj": ((inner, hidden), config.mlp_bias),
        "mlp.down_proj": ((hidden, inner), config.mlp_bias),
    }
    prefix = f"model.layers.{layer}."
    shapes: Shapes = {
        f"{prefix}input_layernorm.weight": (hidden,),
        f"{prefix}post_attention_layernorm.weight": (hidden,),
    }
    for name, (shape, biased) in projections.items():
        shapes[f"{prefix}{name}.weight"] = shape
        if biased:
            shapes[f"{prefix}{name}.bias"] = shape[:1]
    if config.qk_norm:
        shapes[f"{prefix}self_attn.q_norm.weight"] = (config.head_dim,)
        shapes[f"{prefix}self_attn.k_norm.weight"] = (config.head_dim,)
    return shapes


def first_tensors(config: ModelConfig) -> Shapes:
    """What the first stage needs beside its layers."""
    return {EMBEDDING: (config.vocab_size, config.hidden_size)}


def last_tensors(config: ModelConfig) -> Shapes:
    """What the last stage needs beside its layers; the embedding again if tied."""
    head = EMBEDDING if config.tied else OUTPUT_HEAD
    return {FINAL_NORM: (config.hidden_size,), head: (config.vocab_size, config.hidden_size)}


def stage_tensors(config: ModelConfig, first: int, last: int) -> Shapes:
    """Tensors of layers ``first … last - 1``, with what the ends of the model add."""
    shapes: Shapes = {}
    if first == 0:
        shapes |= first_tensors(config)
    for layer in range(first, last):
        shapes |= layer_tensors(config, layer)
    if last == config.layers:
        shapes |= last_tensors(config)
    return shapes
