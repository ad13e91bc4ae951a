"""Describes the tensors that a checkpoint would store, given only a model's config and format.

Sizes match published files within a few percent: files also have headers, and may hold layers for
multi-token prediction. GGUF types are those that llama.cpp's ``llama-quantize`` chooses for a
16-bit model (``llama_tensor_get_type``) without ``--tensor-type``.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from molink.checkpoint.config import ModelConfig
from molink.checkpoint.low_bit import EIGHT_BIT_DTYPES, LowBitScheme, can_be_low_bit
from molink.checkpoint.prequantized import required_tensors
from molink.checkpoint.quantized_size import ROUTER_SUFFIXES
from molink.checkpoint.safetensors_header import DTYPE_BYTES, FLOAT_DTYPES, TensorSpec
from molink.checkpoint.tensor_layout import (
    EMBEDDING_NAME,
    OUTPUT_HEAD_NAME,
    TensorShapes,
    first_stage_tensors,
    last_stage_tensors,
    layer_tensors,
    mtp_layers,
)
from molink.gguf.ggml_types import PACKED_TYPES, GgmlType, packed_name, packed_shape

#: Formats, and the fields of ``config.json`` that they add.
STORAGE_CONFIGS: dict[str, dict[str, Any]] = {
    "bf16": {},
    "fp8": {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}},
    "mxfp4": {"quantization_config": {"quant_method": "mxfp4"}},
    "mxfp4-gguf": {},
    "q4_k_m": {},
    "q8_0": {},
}
#: Formats that are GGUF files.
GGUF_FORMATS = ("mxfp4-gguf", "q4_k_m", "q8_0")
#: Types that llama-quantize falls back to if a row's length is not a multiple of 256.
_FALLBACKS = {"q4_k": "q5_0", "q5_k": "q5_1", "q6_k": "q8_0"}
#: Projections that get more bits from llama-quantize in half of the layers.
_LARGER_SUFFIXES = (
    "down_proj.weight",
    "output_linear.weight",
    "w2.weight",
    "self_attn.v_proj.weight",
)
#: llama-quantize assumes that a model with 80 layers has 70 B parameters; values get 5 bits.
_SEVENTY_BILLION_LAYERS = 80


@dataclass(frozen=True, slots=True)
class DescribedTensor:
    """A stored tensor. ``dtype`` is the safetensors name."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return prod(self.shape) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class DescribedWeights:
    """Stored tensors of ``typical_layers`` and the model's ends.

    Each layer is like one of the typical ones. ``nbytes`` and ``parameters`` count all layers.
    """

    tensors: Mapping[str, DescribedTensor]
    typical_layers: tuple[int, ...]
    nbytes: int
    parameters: int


def describe_weights(config: ModelConfig, storage: str) -> DescribedWeights:
    """Describe the weights of a model in a format of :data:`STORAGE_CONFIGS`.

    Raises:
        BrokenModel: the shape is impossible in that format.
    """
    kinds: dict[tuple[bool, bool, bool, bool], list[int]] = {}
    for layer in range(config.layers):
        more = storage == "q4_k_m" and _gets_more_bits(layer, config.layers)
        kind = (
            layer in config.recurrent_layers,
            config.has_mlp(layer),
            config.layer_experts(layer) is None,
            more,
        )
        kinds.setdefault(kind, []).append(layer)
    ends = first_stage_tensors(config) | last_stage_tensors(config)
    for layer in mtp_layers(config):
        ends |= layer_tensors(config, layer)
    tensors = _stored_tensors(ends, config, storage, more_bits=False)
    nbytes = sum(tensor.nbytes for tensor in tensors.values())
    parameters = _count_elements(ends)
    for (*_, more), layers in kinds.items():
        shapes = layer_tensors(config, layers[0])
        stored = _stored_tensors(shapes, config, storage, more_bits=more)
        nbytes += len(layers) * sum(tensor.nbytes for tensor in stored.values())
        parameters += len(layers) * _count_elements(shapes)
        tensors |= stored
    return DescribedWeights(
        tensors, tuple(layers[0] for layers in kinds.values()), nbytes, parameters
    )


def _count_elements(shapes: TensorShapes) -> int:
    return sum(map(prod, shapes.values()))


def _stored_tensors(
    shapes: TensorShapes, config: ModelConfig, storage: str, *, more_bits: bool
) -> dict[str, DescribedTensor]:
    if storage in GGUF_FORMATS:
        return dict(
            _gguf_tensor(name, shape, config, storage, more_bits=more_bits)
            for name, shape in shapes.items()
        )
    found: dict[str, TensorSpec] = {}
    if storage == "mxfp4":
        found = _stack_marks(shapes)
    elif config.low_bit is not None:
        found = _low_bit_marks(shapes, config.low_bit)
    wanted = required_tensors(shapes, "none", found, config.low_bit)
    plain = config.dtype.upper()
    return {
        name: DescribedTensor(plain if one.dtypes == FLOAT_DTYPES else one.dtypes[0], one.shape)
        for name, one in wanted.items()
    }


def _stack_marks(shapes: TensorShapes) -> dict[str, TensorSpec]:
    """Return names of the stacks that hold experts, as in gpt-oss."""
    names = (name.split(".experts.") for name in shapes if ".experts." in name)
    stacks = {(before, after.split(".")[1]) for before, after in names}
    ends = ("_blocks", "_scales", "_bias")
    return {
        f"{before}.experts.{projection}{end}": DescribedTensor("U8", ())
        for before, projection in stacks
        for end in ends
    }


def _low_bit_marks(shapes: TensorShapes, scheme: LowBitScheme) -> dict[str, TensorSpec]:
    """Return names of the tensors that hold the numbers of all projections."""
    numbers = EIGHT_BIT_DTYPES[scheme.number_kind]
    return {
        scheme.numbers_name(name): DescribedTensor(numbers, shape)
        for name, shape in shapes.items()
        if can_be_low_bit(name, shape)
    }


def _gguf_tensor(
    name: str, shape: tuple[int, ...], config: ModelConfig, storage: str, *, more_bits: bool
) -> tuple[str, DescribedTensor]:
    """Describe a weight in a GGUF file; norms, biases and routers stay float32."""
    if len(shape) != 2 or name.endswith(ROUTER_SUFFIXES):
        return name, DescribedTensor("F32", shape)
    kind = PACKED_TYPES["q8_0"]
    if storage == "q4_k_m":
        kind = _choose_q4_k_m(name, config, more_bits=more_bits)
    elif storage == "mxfp4-gguf" and ".experts." in name:
        kind = PACKED_TYPES["mxfp4"]
    if packed_shape(kind, shape) is None:
        kind = PACKED_TYPES[_FALLBACKS.get(kind.name, kind.name)]
    packed = packed_shape(kind, shape)
    if packed is None:
        return name, DescribedTensor("F16", shape)
    return packed_name(name, kind), DescribedTensor("U8", packed)


def _choose_q4_k_m(name: str, config: ModelConfig, *, more_bits: bool) -> GgmlType:
    """Choose a matrix's type in Q4_K_M: six bits for some projections in half the layers."""
    output = EMBEDDING_NAME if config.tied_embeddings else OUTPUT_HEAD_NAME
    few_heads = config.heads == 8 * config.kv_heads
    if name == output:
        chosen = "q6_k"
    elif name.endswith(("self_attn.qkv_proj.weight", "linear_attn.in_proj_qkv.weight")):
        chosen = "q5_k"
    elif name.endswith(_LARGER_SUFFIXES) and more_bits:
        chosen = "q6_k"
    elif (
        name.endswith("self_attn.v_proj.weight")
        and few_heads
        and config.layers == _SEVENTY_BILLION_LAYERS
    ):
        chosen = "q5_k"
    else:
        chosen = "q4_k"
    return PACKED_TYPES[chosen]


def _gets_more_bits(layer: int, layers: int) -> bool:
    """Whether llama-quantize gives a layer's values and down projections six bits."""
    edge = layers // 8
    return layer < edge or layer >= 7 * layers // 8 or (layer - edge) % 3 == 2
