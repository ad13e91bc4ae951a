"""What a quantized checkpoint says of itself is checked, and bounded by its config."""

import json
import math
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from molink.checkpoint.header import TensorSpan
from molink.checkpoint.prequantized import (
    STATE,
    companions,
    parse_quantized,
    parse_state,
    stored_tensors,
)
from molink.checkpoint.stored import FLOATS, MAX_STATE_BYTES, Stored
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
    plain = {name: Stored(FLOATS, shape) for name, shape in shapes.items()}
    assert stored_tensors(shapes, "none", {NAME: span("U8")}) == plain
    assert stored_tensors(shapes, "nf4", {NAME: span("BF16")}) == plain
    assert stored_tensors(shapes, "int8", {}) == plain


def test_int8_weights() -> None:
    scales, layout, *_ = companions(NAME)
    wanted = {NAME: Stored(("I8",), SHAPE), scales: Stored(("F32",), (64,))}
    assert stored_tensors({NAME: SHAPE}, "int8", {NAME: span("I8")}) == wanted
    found = {NAME: span("I8"), layout: span("U8", ())}
    assert stored_tensors({NAME: SHAPE}, "int8", found) == wanted | {layout: Stored(("U8",), ())}
    assert scales == "model.layers.0.self_attn.q_proj.SCB"


def test_nf4_weights() -> None:
    wanted = {
        NAME: Stored(("U8",), (64 * 512 // 2, 1)),
        f"{NAME}.absmax": Stored(("F32",), (512,)),
        f"{NAME}.quant_map": Stored(("F32",), (16,)),
        f"{NAME}.{STATE}": Stored(("U8",), (-1,)),
    }
    assert stored_tensors({NAME: SHAPE}, "nf4", {NAME: span("U8")}) == wanted
    found = {NAME: span("U8"), f"{NAME}.absmax": span("U8")}
    assert stored_tensors({NAME: SHAPE}, "nf4", found) == wanted | {
        f"{NAME}.absmax": Stored(("U8",), (512,)),
        f"{NAME}.nested_absmax": Stored(("F32",), (2,)),
        f"{NAME}.nested_quant_map": Stored(("F32",), (256,)),
    }
    assert {NAME, *companions(NAME)} > set(stored_tensors({NAME: SHAPE}, "nf4", found))


def test_blocks_that_are_not_whole() -> None:
    with pytest.raises(UnsupportedModel, match=r"q_proj.*\[3, 5\]"):
        stored_tensors({NAME: (3, 5)}, "nf4", {NAME: span("U8")})


def test_what_the_state_may_take_is_bounded() -> None:
    stored = Stored(("U8",), (-1,))
    assert stored.fits((1,))
    assert stored.fits((MAX_STATE_BYTES,))
    assert not stored.fits((MAX_STATE_BYTES + 1,))
    assert not stored.fits((0,))
    assert not stored.fits(())
    assert not stored.fits((1, 1))


def state(**changes: object) -> bytes:
    fields = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [64, 512]}
    return json.dumps(fields | changes).encode()


def test_states() -> None:
    assert parse_state(state(), SHAPE, "t") == 0
    nested = state(nested_blocksize=256, nested_dtype="float32", nested_offset=0.0625)
    assert parse_state(nested, SHAPE, "t") == 0.0625


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=8,
)
known = st.sampled_from(["quant_type", "blocksize", "shape", "nested_blocksize", "nested_offset"])


@given(st.binary(max_size=64) | st.dictionaries(known, values).map(lambda some: state(**some)))
def test_any_state_is_a_number_or_refused(raw: bytes) -> None:
    with suppress(MolinkError):
        assert abs(parse_state(raw, SHAPE, "t")) < math.inf


def test_blocks_of_gguf_are_bounded_by_the_config() -> None:
    name = f"{NAME}.q4_k"
    found = {name: span("U8", (64, 2 * 144))}
    assert stored_tensors({NAME: SHAPE}, "none", found) == {name: Stored(("U8",), (64, 2 * 144))}
    with pytest.raises(BrokenModel, match="none of blocks of q4_k"):
        stored_tensors({NAME: (64, 500)}, "none", found)
    # A kind that isn't known is as if there were nothing.
    odd = {f"{NAME}.q9_k": span("U8")}
    assert stored_tensors({NAME: SHAPE}, "none", odd) == {NAME: Stored(FLOATS, SHAPE)}
