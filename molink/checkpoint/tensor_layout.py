"""Names and shapes of a decoder's tensors, and which of them a stage needs."""

from molink.checkpoint.adapters import adapter_tensor_names
from molink.checkpoint.config import ModelConfig
from molink.checkpoint.experts import ExpertsConfig
from molink.checkpoint.recurrent import RecurrentShape
from molink.checkpoint.traits import LatentShape, MtpShape
from molink.errors import BrokenModel

EMBEDDING_NAME = "model.embed_tokens.weight"
FINAL_NORM_NAME = "model.norm"
OUTPUT_HEAD_NAME = "lm_head.weight"
OUTPUT_BIAS_NAME = "lm_head.bias"
SINKS_NAME = "self_attn.sinks"
LAYER_SCALE_NAME = "layer_scalar"
#: Norms of a layer with an MLP and experts in parallel: before and after each of the two.
PAIRED_NORMS = (
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm_1",
    "pre_feedforward_layernorm_2",
    "post_feedforward_layernorm_2",
)
#: Weights of the router's norm, and factors of the experts' routing weights.
ROUTER_SCALE_NAME, EXPERT_SCALES_NAME = "mlp.router.scale", "mlp.router.per_expert_scale"
#: Latent attention: norms of latents, and projections from latents to queries, keys and values.
QUERY_NORM_NAME, KEY_NORM_NAME = "self_attn.q_a_layernorm", "self_attn.kv_a_layernorm"
QUERY_NAME, KEY_VALUE_NAME = "self_attn.q_b_proj", "self_attn.kv_b_proj"
#: Keys and values projected by two tensors instead of one.
KEY_NAME, VALUE_NAME = "self_attn.k_b_proj", "self_attn.v_b_proj"
#: Sparse attention's indexer: projections to index queries and keys, the keys' norm, and the
#: projection to weights.
INDEX_QUERY_NAME, INDEX_KEY_NAME = "self_attn.indexer.wq_b", "self_attn.indexer.wk"
INDEX_NORM_NAME, INDEX_WEIGHT_NAME = (
    f"self_attn.indexer.{name}" for name in ("k_norm", "weights_proj")
)

TensorShapes = dict[str, tuple[int, ...]]
#: Projection (without ``.weight``) → shape ``[out, in]``, and whether it has a bias.
_Projections = dict[str, tuple[tuple[int, int], bool]]


def layer_tensors(config: ModelConfig, layer: int) -> TensorShapes:
    """Tensors of a decoder layer with their shapes (``[out, in]`` for projections).

    Raises:
        BrokenModel: an adapter changes more than :func:`adaptable_projections`.
    """
    prefix = config.layer_prefix(layer)
    shapes = {f"{prefix}{name}": shape for name, shape in _small_tensors(config, layer).items()}
    experts = config.layer_experts(layer)
    if experts is not None and experts.is_corrected:
        shapes[f"{prefix}{experts.correction_name}"] = experts.correction_shape
    mlp: _Projections = {}
    if config.has_mlp(layer):
        hidden = config.hidden_size
        mlp = _mlp_tensors(config) if experts is None else _expert_tensors(experts, hidden)
    for name, (shape, biased) in (_mixer_tensors(config, layer) | mlp).items():
        shapes[f"{prefix}{name}.weight"] = shape
        if biased:
            shapes[f"{prefix}{name}.bias"] = shape[:1]
    return shapes | _adapter_tensors(config, layer)


def adaptable_projections(config: ModelConfig, layer: int) -> dict[str, tuple[int, int]]:
    """Projections of a layer that an adapter may change, with their shapes ``[out, in]``.

    They are those of attention and of a plain MLP, not those of experts, routers, recurrent layers
    and latent attention. There are none if outputs have factors.
    """
    found: _Projections = {}
    if config.output_factors is not None:
        return {}
    if config.has_attention(layer) and config.latent is None:
        found |= _attention_tensors(config, layer)
    if config.has_mlp(layer) and config.layer_experts(layer) is None:
        found |= _mlp_tensors(config)
    return {name: shape for name, (shape, _) in found.items()}


def _adapter_tensors(config: ModelConfig, layer: int) -> TensorShapes:
    """List the matrices of a layer's adapters."""
    shapes: TensorShapes = {}
    known = adaptable_projections(config, layer) if config.adapters else {}
    for number, adapter in enumerate(config.adapters, 1):
        for each in adapter.modules:
            if layer not in each.layers:
                continue
            if each.module not in known:
                raise BrokenModel(
                    f"adapter {adapter.name} changes {each.module} of layer {layer + 1}, of which "
                    f"only {', '.join(known) or 'nothing'} can be changed"
                )
            outputs, inputs = known[each.module]
            names = adapter_tensor_names(f"model.layers.{layer}.{each.module}", number)
            shapes |= zip(names, ((each.rank, inputs), (outputs, each.rank)), strict=True)
    return shapes


def attention_projections(config: ModelConfig, layer: int) -> tuple[str, ...]:
    """Name a layer's projections of a row, in order: q, k and v, or those to latents."""
    if config.latent is not None:
        return latent_projections(config.latent)
    names: tuple[str, ...] = ("qkv",) if config.merged_qkv else ("q", "k", "v")
    names = names[:2] if config.keys_are_values(layer) else names
    return tuple(f"self_attn.{name}_proj" for name in names)


def latent_projections(latent: LatentShape) -> tuple[str, str]:
    """Name the projections of a row to queries or their latents, and to latents of keys."""
    query = "q_a_proj" if latent.query_rank else "q_proj"
    return f"self_attn.{query}", "self_attn.kv_a_proj_with_mqa"


def attention_output(config: ModelConfig) -> str:
    """Name the projection from attention heads to rows."""
    return f"self_attn.{config.output_name}"


def mlp_projections(config: ModelConfig) -> tuple[tuple[str, ...], str]:
    """Name a plain MLP's gate and up projections, in order, and its down projection."""
    names = config.mlp_names
    both = (names.gate_up,) if config.merged_gate_up else (names.gate, names.up)
    both = both if config.is_gated else (names.up,)
    return tuple(f"{names.module}.{name}" for name in both), f"{names.module}.{names.down}"


def _small_tensors(config: ModelConfig, layer: int) -> TensorShapes:
    """List a layer's tensors other than projections and corrections, by full name."""
    shapes: TensorShapes = {}
    for name in config.layer_norms(layer).present_names:
        shapes |= _norm_tensors(config, name)
    if config.scaled_layers:
        shapes[LAYER_SCALE_NAME] = (1,)
    experts = config.layer_experts(layer)
    if experts is not None and experts.is_paired:
        for name in PAIRED_NORMS:
            shapes |= _norm_tensors(config, name)
        shapes[ROUTER_SCALE_NAME] = (config.hidden_size,)
        shapes[EXPERT_SCALES_NAME] = (experts.num_experts,)
    if config.recurrent is not None and layer in config.recurrent_layers:
        shapes |= config.recurrent.small_tensors
    return shapes | (_small_attention_tensors(config, layer) if config.has_attention(layer) else {})


def _small_attention_tensors(config: ModelConfig, layer: int) -> TensorShapes:
    shapes: TensorShapes = {}
    if config.sinks:
        shapes[SINKS_NAME] = (config.heads,)
    if config.latent is not None:
        shapes[f"{KEY_NORM_NAME}.weight"] = (config.latent.rank,)
        if config.latent.query_rank:
            shapes[f"{QUERY_NORM_NAME}.weight"] = (config.latent.query_rank,)
        if config.latent.index is not None:
            for kind in ("weight", "bias"):
                shapes[f"{INDEX_NORM_NAME}.{kind}"] = (config.latent.index.dim,)
    if config.qk_norm not in ("none", "each unweighted head"):
        both = config.heads, config.head_shape(layer).kv_heads
        for name, heads in zip(config.qk_norm_names, both, strict=True):
            shapes[f"self_attn.{name}.weight"] = _head_norm_shape(config, layer, heads)
    return shapes


def _norm_tensors(config: ModelConfig, name: str) -> TensorShapes:
    """List the tensors of a norm."""
    kinds = ("weight", "bias") if config.norm_kind == "biased layer" else ("weight",)
    return dict.fromkeys((f"{name}.{kind}" for kind in kinds), (config.hidden_size,))


def _head_norm_shape(config: ModelConfig, layer: int, heads: int) -> tuple[int, ...]:
    head_dim = config.head_shape(layer).head_dim
    match config.qk_norm:
        case "all heads":
            return (head_dim * heads,)
        case "each centered head":
            return heads, head_dim
    return (head_dim,)


def _mixer_tensors(config: ModelConfig, layer: int) -> _Projections:
    """List the projections of a layer's attention or recurrence."""
    made: _Projections = {}
    if config.recurrent is not None and layer in config.recurrent_layers:
        made = _recurrent_tensors(config.recurrent, config.hidden_size)
    return made | (_attention_tensors(config, layer) if config.has_attention(layer) else {})


def _recurrent_tensors(shape: RecurrentShape, hidden: int) -> _Projections:
    output, inputs = shape.output_projection
    made: _Projections = {
        name: ((size, hidden), shape.is_biased)
        for name, size in (shape.projections | shape.rate_projections).items()
    }
    made |= {name: (sizes, shape.is_biased) for name, sizes in shape.inner_projections.items()}
    return made | {output: ((hidden, inputs), shape.is_biased)}


def _attention_tensors(config: ModelConfig, layer: int) -> _Projections:
    hidden, biased = config.hidden_size, config.attention_bias
    if config.latent is not None:
        return _latent_tensors(config, config.latent)
    shape = config.head_shape(layer)
    heads, keys = config.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    queries = 2 * heads if config.gated_heads else heads
    names = attention_projections(config, layer)
    rows = [queries + 2 * keys] if config.merged_qkv else [queries, keys, keys][: len(names)]
    made: _Projections = {
        name: ((count, hidden), biased) for name, count in zip(names, rows, strict=True)
    }
    return made | {attention_output(config): ((hidden, heads), config.output_bias)}


def _latent_tensors(config: ModelConfig, latent: LatentShape) -> _Projections:
    hidden, biased, heads = config.hidden_size, config.attention_bias, config.heads
    queries = heads * (latent.plain_dim + latent.rope_dim)
    query, key = latent_projections(latent)
    made: _Projections = {
        query: ((latent.query_rank or queries, hidden), biased),
        key: ((latent.rank + latent.rope_dim, hidden), biased),
        attention_output(config): ((hidden, heads * latent.value_dim), config.output_bias),
    }
    if latent.query_rank:
        made[QUERY_NAME] = (queries, latent.query_rank), False
    if latent.index is not None:
        index = latent.index
        made[INDEX_QUERY_NAME] = (index.heads * index.dim, latent.query_rank), False
        made[INDEX_KEY_NAME] = (index.dim, hidden), False
        made[INDEX_WEIGHT_NAME] = (index.heads, hidden), False
    if latent.is_split:
        made[KEY_NAME] = (heads * latent.rank, latent.plain_dim), False
        made[VALUE_NAME] = (heads * latent.value_dim, latent.rank), False
    else:
        rows = heads * (latent.plain_dim + latent.value_dim)
        made[KEY_VALUE_NAME] = (rows, latent.rank), False
    return made


def _mlp_tensors(config: ModelConfig) -> _Projections:
    hidden, inner, biased = config.hidden_size, config.intermediate_size, config.mlp_bias
    both, down = mlp_projections(config)
    rows = (1 + config.is_gated) * inner // len(both)
    made: _Projections = dict.fromkeys(both, ((rows, hidden), biased))
    return made | {down: ((hidden, inner), biased)}


def _expert_tensors(experts: ExpertsConfig, hidden: int) -> _Projections:
    made: _Projections = {experts.router_name: ((experts.num_experts, hidden), experts.has_bias)}
    latents = experts.latent_size or hidden
    if experts.latent_size:
        entry, output = experts.latent_names
        made |= {entry: ((latents, hidden), False), output: ((hidden, latents), False)}
    every = [
        (experts.expert_projections(index), experts.intermediate_size, latents)
        for index in range(experts.num_experts)
    ]
    if experts.shared_intermediate_size:
        if experts.shared_gate_name is not None:
            made[experts.shared_gate_name] = (1, hidden), False
        every.append((experts.shared_projections, experts.shared_intermediate_size, hidden))
    for (both, down), inner, width in every:
        rows = (1 + experts.is_gated) * inner // len(both)
        made |= dict.fromkeys(both, ((rows, width), experts.has_bias))
        made[down] = (width, inner), experts.has_bias
    return made


def first_stage_tensors(config: ModelConfig) -> TensorShapes:
    """List tensors that the first stage needs besides its layers and a vision tower."""
    return {EMBEDDING_NAME: (config.vocab_size, config.hidden_size)}


def vision_tensors(config: ModelConfig) -> TensorShapes:
    """List tensors of the vision tower and its connector, which the first stage also holds."""
    return {} if config.vision is None else config.vision.tensors


def last_stage_tensors(config: ModelConfig) -> TensorShapes:
    """List tensors that the last stage needs besides layers.

    With tied weights or MTP, they include the embedding.
    """
    norm = _norm_tensors(config, FINAL_NORM_NAME)
    if not config.has_output_head:
        return norm
    head = EMBEDDING_NAME if config.tied_embeddings else OUTPUT_HEAD_NAME
    bias: TensorShapes = {OUTPUT_BIAS_NAME: (config.vocab_size,)} if config.head_bias else {}
    found = norm | {head: (config.vocab_size, config.hidden_size)} | bias
    return found if config.mtp is None else found | _mtp_tensors(config, config.mtp)


def _mtp_tensors(config: ModelConfig, mtp: MtpShape) -> TensorShapes:
    """List tensors of an MTP module besides those of its layer.

    Copies of the embedding and the output head, which some checkpoints have, are not read.
    """
    shapes: TensorShapes = first_stage_tensors(config)
    for name in mtp.norm_names:
        shapes |= _norm_tensors(config, name)
    return shapes | {f"{mtp.projection_name}.weight": (config.hidden_size, 2 * config.hidden_size)}


def mtp_layers(config: ModelConfig) -> range:
    """Return the index of the MTP module's layer, if there is one."""
    return range(config.layers, config.layers + (config.mtp is not None))


def stage_tensors(config: ModelConfig, first: int, last: int) -> TensorShapes:
    """Tensors of layers ``first … last - 1``, and of the model's ends."""
    shapes: TensorShapes = {}
    if first == 0:
        shapes |= first_stage_tensors(config) | vision_tensors(config)
    layers = [*range(first, last), *(mtp_layers(config) if last == config.layers else ())]
    for layer in layers:
        shapes |= layer_tensors(config, layer)
    if last == config.layers:
        shapes |= last_stage_tensors(config)
    return shapes
