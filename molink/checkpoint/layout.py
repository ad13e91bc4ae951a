"""Names and shapes of the tensors that a decoder has, and which of them a stage needs."""

from molink.checkpoint.config import ModelConfig
from molink.checkpoint.experts import Experts

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
OUTPUT_HEAD = "lm_head.weight"
#: Of a layer.
SINKS = "self_attn.sinks"

Shapes = dict[str, tuple[int, ...]]
#: Name of a projection (without ``.weight``) → its shape ``[out, in]``, and whether it has a bias.
_Projections = dict[str, tuple[tuple[int, int], bool]]


def layer_tensors(config: ModelConfig, layer: int) -> Shapes:
    """Tensors of one decoder layer with their shapes (``[out, in]`` for projections)."""
    prefix = f"model.layers.{layer}."
    shapes = {f"{prefix}{name}.weight": shape for name, shape in _norms(config).items()}
    if config.sinks:
        shapes[f"{prefix}{SINKS}"] = (config.heads,)
    experts = config.experts_of(layer)
    mlp = _mlp(config) if experts is None else _experts(experts, config.hidden_size)
    for name, (shape, biased) in (_attention(config) | mlp).items():
        shapes[f"{prefix}{name}.weight"] = shape
        if biased:
            shapes[f"{prefix}{name}.bias"] = shape[:1]
    return shapes


def attention_projections(config: ModelConfig) -> tuple[str, ...]:
    """Names of the projections that make q, k and v, in this order."""
    names = ("qkv",) if config.merged_qkv else ("q", "k", "v")
    return tuple(f"self_attn.{name}_proj" for name in names)


def mlp_projections(config: ModelConfig) -> tuple[str, ...]:
    """Names of the projections that make gate and up of a plain MLP, in this order."""
    names = ("gate_up",) if config.merged_gate_up else ("gate", "up")
    return tuple(f"mlp.{name}_proj" for name in names)


def _norms(config: ModelConfig) -> Shapes:
    shapes: Shapes = dict.fromkeys(config.norms.names, (config.hidden_size,))
    if config.qk_norm != "none":
        whole = config.qk_norm == "all heads"
        for name, heads in (("q", config.heads), ("k", config.kv_heads)):
            shapes[f"self_attn.{name}_norm"] = (config.head_dim * (heads if whole else 1),)
    return shapes


def _attention(config: ModelConfig) -> _Projections:
    hidden, biased = config.hidden_size, config.attention_bias
    queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
    rows = (queries + 2 * keys,) if config.merged_qkv else (queries, keys, keys)
    names = attention_projections(config)
    made: _Projections = {
        name: ((count, hidden), biased) for name, count in zip(names, rows, strict=True)
    }
    return made | {"self_attn.o_proj": ((hidden, queries), config.output_bias)}


def _mlp(config: ModelConfig) -> _Projections:
    hidden, inner, biased = config.hidden_size, config.intermediate_size, config.mlp_bias
    names = mlp_projections(config)
    rows = 2 * inner // len(names)
    made: _Projections = dict.fromkeys(names, ((rows, hidden), biased))
    return made | {"mlp.down_proj": ((hidden, inner), biased)}


def _experts(experts: Experts, hidden: int) -> _Projections:
    made: _Projections = {experts.router: ((experts.count, hidden), experts.biased)}
    every = [(experts.projections(index), experts.inner_size) for index in range(experts.count)]
    if experts.shared_size:
        made[experts.shared_gate] = (1, hidden), False
        every.append((experts.shared_projections, experts.shared_size))
    for (both, down), inner in every:
        rows = 2 * inner // len(both)
        made |= dict.fromkeys(both, ((rows, hidden), experts.biased))
        made[down] = (hidden, inner), experts.biased
    return made


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
