"""Checkpoints quantized by bitsandbytes, and the tensors required in any quantized checkpoint.

A quantized ``x.weight`` has companions. int8: ``x.SCB`` (a scale per row). nf4: ``x.weight`` is
packed, ``x.weight.absmax`` has a scale per block of 64 (float32, or quantized again to 8 bits with
``nested_absmax`` and ``nested_quant_map``: "double quantization"), ``x.weight.quant_map`` the 16
values, and ``x.weight.quant_state.bitsandbytes__nf4`` a JSON object. Projections that were not
quantized are stored as usual.

Weights in GGUF blocks (:mod:`molink.gguf.ggml_types`), in formats of
:mod:`molink.checkpoint.low_bit`, and in expert stacks or MXFP4
(:mod:`molink.checkpoint.stacked_experts`) do not count as quantized: a stage dequantizes them
unless they stay in their format (:func:`molink.checkpoint.low_bit.find_resident_format`).
"""

import json
from collections.abc import Mapping
from math import prod
from typing import Any

from molink.checkpoint.config_fields import ConfigFields
from molink.checkpoint.low_bit import LOW_BIT_METHODS, LowBitScheme, can_be_low_bit
from molink.checkpoint.quantized_size import NF4_BLOCK, can_hold, is_quantizable
from molink.checkpoint.safetensors_header import (
    FLOAT_DTYPES,
    MAX_STATE_BYTES,
    TensorRequirement,
    TensorSpec,
)
from molink.checkpoint.stacked_experts import StackedExpert, find_stack
from molink.errors import BrokenModel, UnsupportedModel
from molink.facts.model import Quantize
from molink.gguf.ggml_types import GgmlType, find_packed, packed_name, packed_shape

#: Scales per block of the second quantization.
NESTED_BLOCK = 256
QUANT_STATE_SUFFIX = "quant_state.bitsandbytes__nf4"
_QUANT_METHOD = "bitsandbytes"


def parse_quantized(raw: Mapping[str, Any], where: str) -> Quantize:
    """Parse the bitsandbytes quantization of ``config.json``.

    Raises:
        UnsupportedModel: a variant is not implemented.
        BrokenModel: a field is invalid.
    """
    section = ConfigFields(raw, where).get_object("quantization_config")
    if not section:
        return "none"
    fields = ConfigFields(section, f"{where}: quantization_config")
    eight, four = (fields.get_boolean(f"load_in_{bits}bit", False) for bits in (8, 4))
    method = fields.get_string(
        "quant_method", _QUANT_METHOD if eight or four else "unnamed"
    ).lower()
    if method == "mxfp4" or method in LOW_BIT_METHODS:
        return "none"
    if method != _QUANT_METHOD:
        known = ", ".join((_QUANT_METHOD, *LOW_BIT_METHODS))
        raise UnsupportedModel(
            f"{fields.where}: weights quantized by {method!r} are not supported (only by {known}); "
            "take the model's bf16 or fp16 files and --quantize"
        )
    if eight == four:
        raise BrokenModel(f"{fields.where}: either load_in_8bit or load_in_4bit must be true")
    if eight:
        return "int8"
    for name, only in (("bnb_4bit_quant_type", "nf4"), ("bnb_4bit_quant_storage", "uint8")):
        # bitsandbytes' default type is fp4.
        value = fields.get_string(name, "fp4" if name == "bnb_4bit_quant_type" else only)
        if value != only:
            raise UnsupportedModel(f"{fields.where}: {name} {value!r} is not supported ({only} is)")
    return "nf4"


def required_tensors(
    shapes: Mapping[str, tuple[int, ...]],
    quantized: Quantize,
    found: Mapping[str, TensorSpec],
    low_bit: LowBitScheme | None = None,
) -> dict[str, TensorRequirement]:
    """Return the stored tensors that tensors of these shapes require.

    ``found`` decides which projections are quantized, and whether their scales are.

    Raises:
        UnsupportedModel: an nf4 weight has a partial block.
        BrokenModel: a weight in GGUF blocks has an impossible shape.
    """
    wanted: dict[str, TensorRequirement] = {}
    for name, shape in shapes.items():
        packed = find_packed(name, found) if quantized == "none" else None
        if packed is not None:
            wanted[packed_name(name, packed)] = _block_tensors(name, shape, packed)
            continue
        stack = find_stack(name, found)
        if stack is not None:
            # All experts share a stack; the last expert determines its shape.
            wanted |= _stack_tensors(name, shape, stack)
            continue
        if low_bit is not None and can_be_low_bit(name, shape) and low_bit.is_stored(name, found):
            wanted |= low_bit.required_tensors(name, (shape[0], shape[1]), found)
            continue
        span = found.get(name)
        left_out = span is None or span.dtype in FLOAT_DTYPES
        if quantized == "none" or left_out or not is_quantizable(name, shape):
            wanted[name] = TensorRequirement(FLOAT_DTYPES, shape)
        elif quantized == "int8":
            wanted |= _int8_tensors(name, shape, found)
        else:
            wanted |= _nf4_tensors(name, shape, found)
    return wanted


def companion_names(name: str) -> tuple[str, ...]:
    """Names of all tensors that may accompany a quantized weight ``name``."""
    module = name.removesuffix("weight")
    nested = ("absmax", "quant_map", "nested_absmax", "nested_quant_map", QUANT_STATE_SUFFIX)
    return (f"{module}SCB", f"{module}weight_format", *(f"{name}.{part}" for part in nested))


def _block_tensors(name: str, shape: tuple[int, ...], kind: GgmlType) -> TensorRequirement:
    found = packed_shape(kind, shape)
    if found is None:
        raise BrokenModel(
            f"tensor {name}: shape {list(shape)} is not a multiple of {kind.name} blocks"
        )
    return TensorRequirement(("U8",), found)


def _stack_tensors(
    name: str, shape: tuple[int, ...], stack: StackedExpert
) -> dict[str, TensorRequirement]:
    found = stack.stack_shapes(shape)
    if not found:
        raise BrokenModel(f"tensor {name}: shape {list(shape)} is not a multiple of MXFP4 blocks")
    dtypes = ("U8",) if stack.is_mxfp4 else FLOAT_DTYPES
    return {stored: TensorRequirement(dtypes, full) for stored, full in found.items()}


def _int8_tensors(
    name: str, shape: tuple[int, ...], found: Mapping[str, TensorSpec]
) -> dict[str, TensorRequirement]:
    scales, layout, *_ = companion_names(name)
    wanted = {
        name: TensorRequirement(("I8",), shape),
        scales: TensorRequirement(("F32",), shape[:1]),
    }
    if layout in found:
        wanted[layout] = TensorRequirement(("U8",), ())
    return wanted


def _nf4_tensors(
    name: str, shape: tuple[int, ...], found: Mapping[str, TensorSpec]
) -> dict[str, TensorRequirement]:
    if not can_hold("nf4", [shape]):
        raise UnsupportedModel(
            f"tensor {name}: nf4 weights of shape {list(shape)} are not supported (their number is "
            f"not a multiple of {NF4_BLOCK})"
        )
    blocks = prod(shape) // NF4_BLOCK
    span = found.get(f"{name}.absmax")
    nested = span is not None and span.dtype == "U8"
    wanted = {
        name: TensorRequirement(("U8",), (blocks * NF4_BLOCK // 2, 1)),
        f"{name}.absmax": TensorRequirement(("U8",) if nested else ("F32",), (blocks,)),
        f"{name}.quant_map": TensorRequirement(("F32",), (16,)),
        f"{name}.{QUANT_STATE_SUFFIX}": TensorRequirement(("U8",), (-1,)),
    }
    if nested:
        wanted[f"{name}.nested_absmax"] = TensorRequirement(("F32",), (-(-blocks // NESTED_BLOCK),))
        wanted[f"{name}.nested_quant_map"] = TensorRequirement(("F32",), (256,))
    return wanted


def parse_quant_state(raw: bytes, shape: tuple[int, ...], where: str) -> float:
    """Return the offset of doubly quantized scales, or 0, from the quantization state of an nf4
    weight.

    Raises:
        UnsupportedModel: block size or type is not implemented.
        BrokenModel: it is invalid.
    """
    try:
        state = json.loads(raw[:MAX_STATE_BYTES].decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise BrokenModel(f"{where}: its quantization state is not valid JSON: {error}") from error
    if not isinstance(state, dict):
        raise BrokenModel(f"{where}: its quantization state is not a JSON object")
    fields = ConfigFields(state, where)
    found = (
        fields.get_string("quant_type"),
        fields.get_integer("blocksize"),
        fields.get_integer("nested_blocksize", NESTED_BLOCK),
    )
    if found != ("nf4", NF4_BLOCK, NESTED_BLOCK):
        raise UnsupportedModel(
            f"{where}: {found[0][:20]} in blocks of {found[1]} (scales: {found[2]}) is not "
            f"supported; nf4 in blocks of {NF4_BLOCK} (scales: {NESTED_BLOCK}) is"
        )
    if state.get("shape") != list(shape):
        raise BrokenModel(
            f"{where}: its shape {str(state.get('shape'))[:80]} isn't {list(shape)}, which "
            "config.json demands"
        )
    return fields.get_number("nested_offset", 0.0)
