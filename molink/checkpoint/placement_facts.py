"""Computes what placement and memory planning need from a model's tensor shapes."""

import re
from collections.abc import Mapping, Sequence
from math import prod

from molink.checkpoint.config import ModelConfig
from molink.checkpoint.low_bit import find_resident_format
from molink.checkpoint.quantized_size import can_hold, is_quantizable, quantized_bytes
from molink.checkpoint.safetensors_header import TensorSpec
from molink.checkpoint.stacked_experts import find_stack
from molink.checkpoint.tensor_layout import (
    EMBEDDING_NAME,
    OUTPUT_HEAD_NAME,
    TensorShapes,
    attention_projections,
    first_stage_tensors,
    last_stage_tensors,
    layer_tensors,
    mtp_layers,
    vision_tensors,
)
from molink.facts.dtypes import DTYPE_SIZES, KV_SCALE_BYTES, OUTPUT_MULTIPLE, narrow_dtype
from molink.facts.kernels import MAX_KERNEL_HEAD_DIM
from molink.facts.model import (
    BlockWeights,
    ExpertFacts,
    LayerWeights,
    ModelFacts,
    NarrowWeights,
    Quantize,
)
from molink.gguf.block_formats import fits_planes, fits_rows, resident_bytes
from molink.gguf.ggml_types import find_packed

#: Tensors of attention and recurrent layers, which precede the MLP.
_MIXER = re.compile(r"\.(self_attn|linear_attn|conv|mamba)\.")


def model_facts(
    config: ModelConfig,
    name: str,
    tensors: Mapping[str, TensorSpec] | None = None,
    typical_layers: Sequence[int] = (),
) -> ModelFacts:
    """Compute facts of the model ``name``; if layers differ, the largest counts.

    ``tensors`` are known tensors of its files, possibly not all. If every layer is like one of
    ``typical_layers``, only these are examined.
    """
    size = DTYPE_SIZES[config.dtype]
    layers = [layer_tensors(config, layer) for layer in typical_layers or range(config.layers)]
    projections = [_quantizable_weights(shapes) for shapes in layers]
    inner = max(_mlp_width(config, shapes) for shapes in projections)
    shapes = [config.head_shape(layer) for layer in range(config.layers)]
    keys = max(shape.kv_heads * shape.head_dim for shape in shapes)
    return ModelFacts(
        name=name,
        layers=config.layers,
        layer_bytes=max(_count_elements(shapes) for shapes in layers) * size,
        first_bytes=_count_elements(first_stage_tensors(config)) * size,
        last_bytes=_count_elements(last_stage_tensors(config)) * size,
        vision_bytes=_count_elements(vision_tensors(config)) * size,
        image_elements=0 if config.vision is None else config.vision.image_elements,
        first_layers=config.first_layers,
        kv_bytes=config.kv_kinds * keys * size,
        int8_kv_bytes=config.kv_kinds
        * max(shape.kv_heads * (shape.head_dim + KV_SCALE_BYTES) for shape in shapes),
        recurrent_layers=tuple(sorted(config.recurrent_layers)),
        mlp_layers=tuple(sorted(config.mlp_layers or ())),
        parallel_states=config.parallel_states,
        state_bytes=config.slot_elements * DTYPE_SIZES["f32"],
        mtp_layers=len(mtp_layers(config)),
        max_model_len=config.max_model_len,
        element_bytes=size,
        projection_bytes=max(_count_elements(shapes) for shapes in projections) * size,
        block_weights=_count_block_bytes(config, layers, tensors or {}, on_gpu=False),
        plane_weights=_count_block_bytes(config, layers, tensors or {}, on_gpu=True),
        narrow=_narrow_weights(config, projections, tensors or {}),
        experts=_expert_facts(config, layers, tensors or {}),
        int8_bytes=max(_quantized_bytes(shapes, "int8") for shapes in projections),
        nf4_bytes=max(_quantized_bytes(shapes, "nf4") for shapes in projections),
        widest=max(config.hidden_size * 2 * inner, _widest_mixer(config, projections)),
        row_elements=_row_elements(config, inner),
        hidden=config.hidden_size,
        score_heads=config.heads if config.attention_softcap or config.sinks else 0,
        large_heads=config.heads
        if max(shape.head_dim for shape in shapes) > MAX_KERNEL_HEAD_DIM
        else 0,
        vocabulary=config.vocab_size,
        tied=config.tied_embeddings,
        quantized=config.quantized,
    )


def _expert_facts(
    config: ModelConfig, layers: Sequence[TensorShapes], tensors: Mapping[str, TensorSpec]
) -> ExpertFacts | None:
    """Compute facts of routed experts by layer; ``None`` if there are none."""
    every = [
        {name: shape for name, shape in shapes.items() if ".experts." in name} for shapes in layers
    ]
    found = [_layer_weights(config, shapes, tensors) for shapes in every if shapes]
    dense = [
        _layer_weights(config, shapes, tensors)
        for shapes, routed in zip(layers, every, strict=True)
        if not routed
    ]
    if config.experts is None or not found:
        return None

    def size(weights: LayerWeights) -> tuple[int, int]:
        return sum(weights.plane_bytes), weights.layer_bytes

    return ExpertFacts(
        num_experts=config.experts.num_experts,
        top_k=config.experts.top_k,
        least=min(found, key=size),
        most=max(found, key=size),
        dense_layers=tuple(
            layer for layer in range(config.layers) if config.layer_experts(layer) is None
        ),
        dense=max(dense, key=size, default=LayerWeights()),
    )


def _layer_weights(
    config: ModelConfig, shapes: TensorShapes, tensors: Mapping[str, TensorSpec]
) -> LayerWeights:
    projections = _quantizable_weights(shapes)
    narrow = _narrow_weights(config, [projections], tensors)
    return LayerWeights(
        layer_bytes=_count_elements(shapes) * DTYPE_SIZES[config.dtype],
        projection_bytes=_count_elements(projections) * DTYPE_SIZES[config.dtype],
        int8_bytes=_quantized_bytes(projections, "int8"),
        nf4_bytes=_quantized_bytes(projections, "nf4"),
        narrow_bytes=0 if narrow is None else narrow.layer,
        block_bytes=_split_bytes(shapes, config, tensors, on_gpu=False),
        plane_bytes=_split_bytes(shapes, config, tensors, on_gpu=True),
    )


def _narrow_weights(
    config: ModelConfig, layers: Sequence[TensorShapes], tensors: Mapping[str, TensorSpec]
) -> NarrowWeights | None:
    """Find projections that may stay in 16 bits; ``None`` if stored types differ."""
    dtype = narrow_dtype(
        {_stored_dtype(name, config, tensors) for shapes in layers for name in shapes}
    )
    if dtype is None or config.quantized != "none":
        return None
    head: TensorShapes = {
        name: shape
        for name, shape in last_stage_tensors(config).items()
        # An untied embedding is only looked up, never multiplied by.
        if len(shape) == 2
        and (config.tied_embeddings or name != EMBEDDING_NAME)
        and narrow_dtype({_stored_dtype(name, config, tensors)}) == dtype
    }

    def nbytes(shapes: TensorShapes) -> int:
        whole = {name: shape for name, shape in shapes.items() if shape[0] % OUTPUT_MULTIPLE == 0}
        return _count_elements(whole) * DTYPE_SIZES[config.dtype]

    return NarrowWeights(dtype=dtype, layer=max(map(nbytes, layers)), last=nbytes(head))


def _stored_dtype(name: str, config: ModelConfig, tensors: Mapping[str, TensorSpec]) -> str:
    """Return the stored type of a weight; ``U8`` for low-bit formats."""
    of_layer = name not in (EMBEDDING_NAME, OUTPUT_HEAD_NAME)
    if find_packed(name, tensors) or (of_layer and config.low_bit is not None):
        return "U8"
    stack = find_stack(name, tensors)
    found = tensors.get(name if stack is None else stack.names[0])
    return config.dtype.upper() if found is None else found.dtype


def _count_block_bytes(
    config: ModelConfig,
    layers: Sequence[TensorShapes],
    tensors: Mapping[str, TensorSpec],
    *,
    on_gpu: bool,
) -> BlockWeights | None:
    found = [
        _split_bytes(shapes, config, tensors, on_gpu=on_gpu)
        for shapes in (*layers, first_stage_tensors(config), last_stage_tensors(config))
    ]
    if not any(kept for kept, _ in found):
        return None
    return BlockWeights(layer=max(found[:-2], key=sum), first=found[-2], last=found[-1])


def _split_bytes(
    shapes: TensorShapes,
    config: ModelConfig,
    tensors: Mapping[str, TensorSpec],
    *,
    on_gpu: bool,
) -> tuple[int, int]:
    """Split bytes into those that stay low-bit and the rest."""
    kept = rest = 0
    for name, shape in shapes.items():
        form = find_resident_format(name, shape, tensors, config.low_bit)
        is_weight = name in (EMBEDDING_NAME, OUTPUT_HEAD_NAME) or is_quantizable(name, shape)
        stays = form is not None and (fits_planes if on_gpu else fits_rows)(form, shape)
        if form is not None and stays and is_weight:
            kept += resident_bytes(form, shape)
        else:
            rest += prod(shape) * DTYPE_SIZES[config.dtype]
    return kept, rest


def _quantizable_weights(shapes: TensorShapes) -> TensorShapes:
    """Select the quantizable weights of one layer."""
    return {name: shape for name, shape in shapes.items() if is_quantizable(name, shape)}


def _count_elements(shapes: TensorShapes) -> int:
    return sum(prod(shape) for shape in shapes.values())


def _quantized_bytes(shapes: TensorShapes, mode: Quantize) -> int:
    """Count projections' bytes in a mode; unsupported shapes count as unquantized float32."""
    return sum(
        quantized_bytes(shape, mode if can_hold(mode, [shape]) else "none", DTYPE_SIZES["f32"])
        for shape in shapes.values()
    )


def _mlp_width(config: ModelConfig, projections: TensorShapes) -> int:
    """Return the width of the MLP, or of one expert."""
    hidden = config.hidden_size
    widths = (
        shape[1]
        for name, shape in projections.items()
        if not _MIXER.search(name) and shape[0] == hidden
    )
    return max(widths, default=0)


def _widest_mixer(config: ModelConfig, layers: Sequence[TensorShapes]) -> int:
    """Count elements of the largest projection before an MLP.

    Projections that read the same row are merged into one.
    """
    recurrent = () if config.recurrent is None else config.recurrent.projections
    named = (attention_projections(config, layer) for layer in range(config.layers))
    together = (*max(named, key=len), *recurrent)
    widest = 0
    for projections in layers:
        found = {name: prod(shape) for name, shape in projections.items() if _MIXER.search(name)}
        merged = sum(
            size for name, size in found.items() if name.removesuffix(".weight").endswith(together)
        )
        widest = max(widest, merged, *found.values())
    return widest


def _row_elements(config: ModelConfig, inner: int) -> int:
    """Peak number of activation elements per row in a layer.

    They are the residual (twice: the caller keeps its own), its norm, the result and the rotations.
    Added to these is the larger of two sums: gate, up and their product; or q, k, v twice
    (rotated), the attention output and its merged copy. A GPU may hold gate, up and product of all
    chosen experts at once. Gates of heads count twice, too. With a parallel MLP, the attention
    output is held while the MLP runs.
    """
    shapes = {config.head_shape(layer) for layer in range(config.layers)}
    head_dim = max(shape.head_dim for shape in shapes)
    queries = config.heads * head_dim
    keys = max(shape.kv_heads * shape.head_dim for shape in shapes)
    attended = 2 * (queries + 2 * keys) + 2 * queries * (1 + config.gated_heads)
    gated, experts = 3 * inner, config.experts
    if experts is not None:
        chosen, outputs = (
            experts.top_k * size for size in (experts.intermediate_size, config.hidden_size)
        )
        # The sum of their outputs, and the shared expert's output.
        gated = max(gated, chosen + max(2 * chosen, outputs)) + 2 * config.hidden_size
    recurrent = _recurrent_row_elements(config)
    if config.parallel_states:
        # The attention output is held while states are updated.
        recurrent += config.hidden_size
    widest = max(gated, attended, recurrent)
    return (4 + config.parallel_mlp) * config.hidden_size + 4 * head_dim + widest


def _recurrent_row_elements(config: ModelConfig) -> int:
    """Peak number of activation elements per row in a recurrent layer."""
    if config.recurrent is None:
        return 0
    computed, wide = config.recurrent.row_elements
    return computed + wide * DTYPE_SIZES["f32"] // DTYPE_SIZES[config.dtype]
