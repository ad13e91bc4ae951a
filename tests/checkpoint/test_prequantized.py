"""The metadata of a quantized checkpoint is checked, and bounded by its config."""

import json
import math
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from molink.checkpoint.prequantized import (
    QUANT_STATE_SUFFIX,
    companion_names,
    parse_quant_state,
    parse_quantized,
    required_tensors,
)
from molink.checkpoint.safetensors_header import (
    FLOAT_DTYPES,
    MAX_STATE_BYTES,
    TensorRequirement,
    TensorSpan,
)
from molink.errors import BrokenModel, MolinkError, UnsupportedModel

NAME = "model.layers.0.self_attn.q_proj.weight"
SHAPE = (64, 512)
FOUR = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}


def parse(**section: Any) -> str | None:
    return parse_quantized({"quantization_config": section or None}, "config.json")


def span(dtype: str, shape: tuple[int, ...] = SHAPE) -> TensorSpan:
    return TensorSpan("f", dtype, shape, 0, 0, "t")


def test_configs() -> None:
    assert parse_quantized({}, "config.json") == "none"
    assert parse() == "none"
    assert parse(quant_method="bitsandbytes", load_in_8bit=True) == "int8"
    assert parse(load_in_8bit=True, load_in_4bit=False, llm_int8_threshold=6.0) == "int8"
    assert parse(**FOUR, bnb_4bit_use_double_quant=True, llm_int8_skip_modules=["x"]) == "nf4"


@pytest.mark.parametrize("method", ["hqq", "modelopt", "torchao"])
def test_other_methods_are_named(method: str) -> None:
    with pytest.raises(UnsupportedModel, match=f"{method}.*bf16 or fp16"):
        parse(quant_method=method, bits=4)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"bnb_4bit_quant_type": "fp4"}, UnsupportedModel, "fp4"),
        ({"bnb_4bit_quant_type": None}, UnsupportedModel, "fp4"),
        ({"bnb_4bit_quant_storage": "bfloat16"}, UnsupportedModel, "bnb_4bit_quant_storage"),
        ({"load_in_8bit": True}, BrokenModel, "either"),
        ({"load_in_4bit": False}, BrokenModel, "either"),
        ({"load_in_4bit": "yes"}, BrokenModel, "load_in_4bit"),
        ({"quant_method": 4}, BrokenModel, "quant_method"),
        ({"quant_method": None, "load_in_4bit": False}, UnsupportedModel, "unnamed"),
    ],
)
def test_variants_are_named(
    changes: dict[str, Any], error: type[BrokenModel] | type[UnsupportedModel], message: str
) -> None:
    with pytest.raises(error, match=message):
        parse(**(FOUR | changes))


def test_a_section_that_is_no_object() -> None:
    with pytest.raises(BrokenModel, match="quantization_config"):
        parse_quantized({"quantization_config": [1]}, "config.json")


def test_plain_weights() -> None:
    shapes = {NAME: SHAPE, "model.norm.weight": (512,)}
    plain = {name: TensorRequirement(FLOAT_DTYPES, shape) for name, shape in shapes.items()}
    assert required_tensors(shapes, "none", {NAME: span("U8")}) == plain
    assert required_tensors(shapes, "nf4", {NAME: span("BF16")}) == plain
    assert required_tensors(shapes, "int8", {}) == plain


def test_int8_weights() -> None:
    scales, layout, *_ = companion_names(NAME)
    wanted = {NAME: TensorRequirement(("I8",), SHAPE), scales: TensorRequirement(("F32",), (64,))}
    assert required_tensors({NAME: SHAPE}, "int8", {NAME: span("I8")}) == wanted
    found = {NAME: span("I8"), layout: span("U8", ())}
    assert required_tensors({NAME: SHAPE}, "int8", found) == wanted | {
        layout: TensorRequirement(("U8",), ())
    }
    assert scales == "model.layers.0.self_attn.q_proj.SCB"


def test_nf4_weights() -> None:
    wanted = {
        NAME: TensorRequirement(("U8",), (64 * 512 // 2, 1)),
        f"{NAME}.absmax": TensorRequirement(("F32",), (512,)),
        f"{NAME}.quant_map": TensorRequirement(("F32",), (16,)),
        f"{NAME}.{QUANT_STATE_SUFFIX}": TensorRequirement(("U8",), (-1,)),
    }
    assert required_tensors({NAME: SHAPE}, "nf4", {NAME: span("U8")}) == wanted
    found = {NAME: span("U8"), f"{NAME}.absmax": span("U8")}
    assert required_tensors({NAME: SHAPE}, "nf4", found) == wanted | {
        f"{NAME}.absmax": TensorRequirement(("U8",), (512,)),
        f"{NAME}.nested_absmax": TensorRequirement(("F32",), (2,)),
        f"{NAME}.nested_quant_map": TensorRequirement(("F32",), (256,)),
    }
    assert {NAME, *companion_names(NAME)} > set(required_tensors({NAME: SHAPE}, "nf4", found))


def test_blocks_that_are_not_whole() -> None:
    with pytest.raises(UnsupportedModel, match=r"q_proj.*\[3, 5\]"):
        required_tensors({NAME: (3, 5)}, "nf4", {NAME: span("U8")})


def test_parser_state_is_bounded() -> None:
    stored = TensorRequirement(("U8",), (-1,))
    assert stored.accepts_shape((1,))
    assert stored.accepts_shape((MAX_STATE_BYTES,))
    assert not stored.accepts_shape((MAX_STATE_BYTES + 1,))
    assert not stored.accepts_shape((0,))
    assert not stored.accepts_shape(())
    assert not stored.accepts_shape((1, 1))


def state(**changes: object) -> bytes:
    fields = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [64, 512]}
    return json.dumps(fields | changes).encode()


def test_harmony_states() -> None:
    assert parse_quant_state(state(), SHAPE, "t") == 0
    nested = state(nested_blocksize=256, nested_dtype="float32", nested_offset=0.0625)
    assert parse_quant_state(nested, SHAPE, "t") == 0.0625


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=8,
)
known = st.sampled_from(["quant_type", "blocksize", "shape", "nested_blocksize", "nested_offset"])


@given(st.binary(max_size=64) | st.dictionaries(known, values).map(lambda some: state(**some)))
def test_any_state_is_a_number_or_refused(raw: bytes) -> None:
    with suppress(MolinkError):
        assert abs(parse_quant_state(raw, SHAPE, "t")) < math.inf


def test_blocks_of_gguf_are_bounded_by_the_config() -> None:
    name = f"{NAME}.q4_k"
    found = {name: span("U8", (64, 2 * 144))}
    assert required_tensors({NAME: SHAPE}, "none", found) == {
        name: TensorRequirement(("U8",), (64, 2 * 144))
    }
    with pytest.raises(BrokenModel, match="not a multiple of q4_k blocks"):
        required_tensors({NAME: (64, 500)}, "none", found)
    # Tensors of an unknown block kind are ignored.
    odd = {f"{NAME}.q9_k": span("U8")}
    assert required_tensors({NAME: SHAPE}, "none", odd) == {
        NAME: TensorRequirement(FLOAT_DTYPES, SHAPE)
    }
