"""What placement and memory plans have to know of a model, counted from its tensors' shapes."""

from math import prod

from molink.checkpoint.config import ModelConfig
from molink.checkpoint.layout import Shapes, first_tensors, last_tensors, layer_tensors
from molink.checkpoint.quantization import can_hold, is_quantizable, quantized_bytes
from molink.facts.dtypes import DTYPE_SIZES
from molink.facts.model import ModelFacts, Quantize


def model_facts(config: ModelConfig, name: str) -> ModelFacts:
    """The facts of a model called ``name``; of layers that differ, those of the largest."""
    size = DTYPE_SIZES[config.dtype]
    layers = [layer_tensors(config, layer) for layer in range(config.layers)]
    projections = [_projections(shapes) for shapes in layers]
    inner = max(_inner(config, shapes) for shapes in projections)
    queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
    return ModelFacts(
        name=name,
        layers=config.layers,
        layer_bytes=max(_elements(shapes) for shapes in layers) * size,
        first_bytes=_elements(first_tensors(config)) * size,
        last_bytes=_elements(last_tensors(config)) * size,
        kv_bytes=2 * keys * size,
        context=config.context,
        element_bytes=size,
        projection_bytes=max(_elements(shapes) for shapes in projections) * size,
        int8_bytes=max(_quantized(shapes, "int8") for shapes in projections),
        nf4_bytes=max(_quantized(shapes, "nf4") for shapes in projections),
        widest=config.hidden_size * max(2 * inner, queries + 2 * keys),
        row_elements=_row_elements(config, inner),
        hidden=config.hidden_size,
        score_heads=config.heads if config.attention_softcap or config.sinks else 0,
        vocabulary=config.vocab_size,
        tied=config.tied,
        quantized=config.quantized,
    )


def _projections(shapes: Shapes) -> Shapes:
    """The weights of one layer that can be quantized."""
    return {name: shape for name, shape in shapes.items() if is_quantizable(name, shape)}


def _elements(shapes: Shapes) -> int:
    return sum(prod(shape) for shape in shapes.values())


def _quantized(shapes: Shapes, mode: Quantize) -> int:
    """Bytes of projections in a mode; those that it can't hold stay, as f32 at most."""
    return sum(
        quantized_bytes(shape, mode if can_hold(mode, [shape]) else "none", DTYPE_SIZES["f32"])
        for shape in shapes.values()
    )


def _inner(config: ModelConfig, projections: Shapes) -> int:
    """Width of the MLP, or of one expert: what its last projection takes back to ``hidden``."""
    hidden = config.hidden_size
    return max(
        shape[1]
        for name, shape in projections.items()
        if ".self_attn." not in name and shape[0] == hidden
    )


def _row_elements(config: ModelConfig, inner: int) -> int:
    """Elements that exist at once for each row in a layer, at its widest point.

    The sum so far (twice: the caller keeps its own), its norm and the result, and the rotations,
    beside either gate, up and their product (and what each chosen expert gives), or q, k, v twice
    (turned), the attended rows and their merged copy.
    """
    queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
    given = 0 if config.experts is None else config.experts.chosen * config.hidden_size
    widest = max(3 * inner + given, 2 * (queries + 2 * keys) + 2 * queries)
    return 4 * config.hidden_size + 4 * config.head_dim + widest
