"""Results of products of quantized weights and 8-bit rows, on every instruction set."""

from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from llvmlite import ir
from torch import Tensor

from molink.gguf.block_formats import BLOCK_FORMATS, BlockFormat, float4_format
from molink.stage.cpu_kernels.arithmetic import Arithmetic, DotBf16, WidenedBf16
from molink.stage.cpu_kernels.block_integers import IntegerBlockMatMul
from molink.stage.cpu_kernels.create import _choose_integers, create_integer_matmul
from molink.stage.cpu_kernels.integer_dots import (
    IntegerInstructions,
    codebook_step,
    quad_order,
)
from molink.stage.cpu_kernels.repack import BlockCodes, pack_blocks
from molink.stage.linear.quantized import quantized_format
from molink.stage.torch_dtypes import TORCH_DTYPES
from tests.support.kernels import check_segments, require

_WIDE = WidenedBf16(lanes=16, tile=10)
#: Arithmetic of rows, integer instructions, required CPU features, and compilation target.
_CPUS: dict[str, tuple[Arithmetic, IntegerInstructions, tuple[str, ...], str | None]] = {
    "AVX2": (
        WidenedBf16(),
        IntegerInstructions(8),
        ("avx2", "fma", "f16c"),
        "+avx,+avx2,+fma,+f16c",
    ),
    "AVX512VL-VNNI": (
        WidenedBf16(),
        IntegerInstructions(8, vnni=True),
        ("avx512vl", "avx512vnni", "f16c"),
        None,
    ),
    "AVX512BW": (_WIDE, IntegerInstructions(16), ("avx512bw", "f16c"), None),
    "AVX512-VNNI": (_WIDE, IntegerInstructions(16, vnni=True), ("avx512vnni", "f16c"), None),
    "AVX512-VNNI, bf16 rows": (
        DotBf16(),
        IntegerInstructions(16, vnni=True),
        ("avx512vnni", "avx512bf16"),
        None,
    ),
}
_OUT, _WIDEST = 64, 9
_FORMATS = {
    **{name: form for name, form in BLOCK_FORMATS.items() if form.fits_cpu},
    "4 bits, 128, shifts": BlockFormat(4, 8, 128, 128, has_shifts=True),
    "4 bits, 64, bf16": BlockFormat(4, 8, 64, 64, number_dtype="bf16"),
    "8 bits, 128, shifts": BlockFormat(8, 0, 128, 128, has_shifts=True, number_dtype="bf16"),
    "8 bits, 64": BlockFormat(8, 0, 64, 64),
    "int8": quantized_format("int8", 384, on_gpu=False),
    "nf4": quantized_format("nf4", 64, on_gpu=False),
    "mxfp4": float4_format(32, 256, "e8m0"),
}

cpus = pytest.mark.parametrize("cpu", _CPUS)
formats = pytest.mark.parametrize("name", _FORMATS)
#: Every format on AVX2, and on two of the others, whose results have to equal AVX2's.
_PAIRS = [
    (cpu, name)
    for place, cpu in enumerate(_CPUS)
    for number, name in enumerate(_FORMATS)
    if cpu == "AVX2" or (place + number) % 2
]
pairs = pytest.mark.parametrize(("cpu", "name"), _PAIRS)


@cache
def product(cpu: str, name: str, threads: int = 1) -> IntegerBlockMatMul:
    arithmetic, instructions, wanted, features = _CPUS[cpu]
    openmp = require(wanted, threads)
    form = _FORMATS[name]
    return IntegerBlockMatMul(form, arithmetic, instructions, openmp, threads, features)


def stored(form: BlockFormat, blocks: int, fill: int | None = None) -> tuple[BlockCodes, Tensor]:
    """Random weights, or weights with every code ``fill``, and their values in float64."""
    generator = torch.Generator().manual_seed(blocks)
    low = -128 if form.bits == 8 else 0
    shape = (_OUT, blocks, form.block)
    codes = torch.randint(low, low + 2**form.bits, shape, generator=generator)
    if fill is not None:
        codes.fill_(fill)
    dtype = TORCH_DTYPES[form.number_dtype]
    halves = [torch.rand(_OUT, blocks, generator=generator).add(0.1).to(dtype)]
    if form.has_minimum:
        halves.append(torch.randn(_OUT, blocks, generator=generator).to(dtype))
    if form.has_shifts:
        shifts = torch.randint(-(2 ** (form.bits - 1)), 2 ** (form.bits - 1), (_OUT, blocks))
        halves.append(shifts.to(dtype))
    factors = [half.double()[:, :, None] for half in halves]
    whole: tuple[Tensor, ...] = ()
    if form.has_nested_scales:
        begin, end = (0, 64) if form.has_minimum else (-128, 128)
        if form.step_kind == "e8m0":
            begin, end = 117, 137
        groups = (_OUT, blocks, form.groups_per_block)
        whole = tuple(torch.randint(begin, end, groups, generator=generator) for _ in halves)
        steps = [each.double() for each in whole]
        if form.step_kind == "e8m0":
            steps = [(each - 127).exp2() for each in steps]
        factors = [a * b for a, b in zip(factors, steps, strict=True)]
    numbers = [each.expand(-1, -1, form.groups_per_block)[..., None] for each in factors]
    values = codes.double() - form.offset
    if form.codebook:  # rounded to 16 bits
        step = codebook_step(form)
        values = torch.tensor(form.codebook).double().div(step).round().mul(step)[codes]
    exact = values.unflatten(2, (form.groups_per_block, form.group))
    if form.has_shifts:
        exact = exact + numbers[1]
    exact = exact * numbers[0]
    if form.has_minimum:
        exact = exact + numbers[1]
    kept = tuple(each.to(torch.int8).view(torch.uint8) for each in whole)
    return BlockCodes(codes.to(torch.int8).view(torch.uint8), tuple(halves), kept), exact.flatten(1)


def rounded(rows: Tensor, group: int) -> Tensor:
    """Round rows to 8 bits with plain torch; returns float64."""
    groups = rows.float().unflatten(1, (-1, group))
    peaks = groups.abs().amax(2, keepdim=True)
    codes = torch.where(peaks >= 1e-30, groups * (127 / peaks), torch.zeros(())).round()
    assert codes.abs().max() <= 127
    return (codes.double() * (peaks / 127).double()).flatten(1)


def check(multiply: IntegerBlockMatMul, blocks: int, rows: Tensor, fill: int | None = None) -> None:
    codes, exact = stored(multiply.form, blocks, fill)
    weight = pack_blocks(multiply.form, codes, multiply.columns)
    bias = torch.randn(_OUT, generator=torch.Generator().manual_seed(1))
    expected = rounded(rows, multiply.form.group) @ exact.T + bias
    found = multiply(weight, rows, bias)
    assert found.dtype is multiply.dtype
    # Terms cancel, so errors are relative to the sum of magnitudes.
    scale = rounded(rows, multiply.form.group).abs() @ exact.abs().T + 4
    within = 2**-8 if multiply.dtype is torch.bfloat16 else 1e-6
    assert bool(((found.double() - expected).abs() <= within * scale).all())


@pairs
def test_products_equal_those_of_rounded_rows(cpu: str, name: str) -> None:
    multiply = product(cpu, name)
    for blocks in (1, 3):
        width = blocks * multiply.form.block
        rows = torch.randn(_WIDEST, width, generator=torch.Generator().manual_seed(2)).add(0.5)
        for count in (1, 2, 3, 5, _WIDEST):
            check(multiply, blocks, rows[:count].to(multiply.dtype))


@pairs
@pytest.mark.parametrize("row", [-1, 1])
def test_extremes_do_not_saturate(cpu: str, name: str, row: int) -> None:
    multiply = product(cpu, name)
    lowest = -128 if multiply.form.bits == 8 else 0
    for fill in (lowest, lowest + 2**multiply.form.bits - 1):
        check(
            multiply,
            2,
            torch.full((3, 2 * multiply.form.block), row * 3.0).to(multiply.dtype),
            fill,
        )


@settings(max_examples=25, deadline=None)
@given(
    st.sampled_from(sorted(_FORMATS)),
    st.sampled_from(["AVX2", "AVX512-VNNI"]),
    st.integers(1, 4),
    st.integers(1, 9),
    st.integers(-25, 25),
    st.integers(0, 2**32),
)
def test_rows_of_any_size(
    name: str, cpu: str, blocks: int, count: int, power: int, seed: int
) -> None:
    multiply = product(cpu, name)
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(count, blocks * multiply.form.block, generator=generator)
    # Zeros, and numbers of very different magnitudes.
    rows *= torch.randint(0, 2, rows.shape, generator=generator)
    check(multiply, blocks, (rows * 10.0**power).to(multiply.dtype))


# Threads divide columns, regardless of most properties of a format.
@cpus
@pytest.mark.parametrize("name", ["q4_k", "q8_0", "iq4_nl", "4 bits, 128, shifts", "mxfp4"])
def test_results_depend_on_their_row_only(cpu: str, name: str) -> None:
    alone, shared = product(cpu, name), product(cpu, name, 3)
    blocks = 1024 // alone.form.block
    codes, exact = stored(alone.form, blocks)
    weight = pack_blocks(alone.form, codes, alone.columns)
    rows = torch.randn(30, exact.shape[1]).to(alone.dtype)
    together = alone(weight, rows, torch.zeros(_OUT))
    assert torch.equal(shared(weight, rows, torch.zeros(_OUT)), together)
    for count in (1, 2, 5, 7, 13):
        assert torch.equal(alone(weight, rows[:count], torch.zeros(_OUT)), together[:count])
    assert torch.equal(alone(weight, rows[29:], torch.zeros(_OUT)), together[29:])


@cpus
@pytest.mark.parametrize("threads", [1, 3])
def test_segments_have_weights_of_their_own(cpu: str, threads: int) -> None:
    multiply = product(cpu, "q4_k", threads)
    codes, exact = stored(multiply.form, 2)
    check_segments(multiply, pack_blocks(multiply.form, codes, multiply.columns), exact.shape[1])


@formats
def test_results_are_the_same_by_all_instructions(name: str) -> None:
    form, found = _FORMATS[name], []
    codes, exact = stored(form, 2)
    rows = torch.randn(5, exact.shape[1])
    float32_rows = ("AVX2", "AVX512VL-VNNI", "AVX512BW", "AVX512-VNNI")
    for cpu in [cpu for cpu, other in _PAIRS if other == name and cpu in float32_rows]:
        multiply = product(cpu, name)
        weight = pack_blocks(form, codes, multiply.columns)
        found.append(multiply(weight, rows, torch.zeros(_OUT)))
    assert all(torch.equal(each, found[0]) for each in found)


@pairs
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_number_that_is_not_finite_spoils_its_row(cpu: str, name: str, bad: float) -> None:
    multiply = product(cpu, name)
    codes, exact = stored(multiply.form, 2)
    weight = pack_blocks(multiply.form, codes, multiply.columns)
    for place in (0, exact.shape[1] - 1):
        rows = torch.randn(3, exact.shape[1]).to(multiply.dtype)
        clean = multiply(weight, rows, torch.zeros(_OUT))
        rows[1, place] = bad
        found = multiply(weight, rows, torch.zeros(_OUT))
        assert bool(found[1].isnan().all())
        assert torch.equal(found[::2], clean[::2])


@cpus
def test_rows_of_a_larger_tensor(cpu: str) -> None:
    multiply = product(cpu, "q8_0")
    codes, exact = stored(multiply.form, 1)
    weight = pack_blocks(multiply.form, codes, multiply.columns)
    strided = torch.ones(3, 40, dtype=multiply.dtype)[:, 4:36]
    found = multiply(weight, strided, torch.zeros(_OUT))
    torch.testing.assert_close(found.double(), exact.sum(1).expand(3, -1), rtol=2**-7, atol=0.05)


@pytest.mark.parametrize("name", _FORMATS)
def test_rows_are_stored_in_an_order_of_all_depths(name: str) -> None:
    form = _FORMATS[name]
    assert sorted(quad_order(form)) == list(range(form.group))


def test_instructions_suit_the_cpu() -> None:
    assert _choose_integers(8, {}) == IntegerInstructions(8)
    assert _choose_integers(8, {"avxvnni": True}) == IntegerInstructions(8, vnni=True)
    assert _choose_integers(16, {}) is None
    assert _choose_integers(16, {"avx512bw": True}) == IntegerInstructions(16)
    both = {"avx512bw": True, "avx512vnni": True}
    assert _choose_integers(16, both) == IntegerInstructions(16, vnni=True)


def test_a_product_that_is_wrong_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    made = create_integer_matmul.__wrapped__(BLOCK_FORMATS["q4_k"], torch.float32, 1)
    if made is None:
        pytest.skip("this CPU has no product that could be wrong")

    def off(
        self: IntegerInstructions, builder: ir.IRBuilder, total: ir.Value, *_: ir.Value
    ) -> ir.Value:
        return total

    monkeypatch.setattr(IntegerInstructions, "add_pairs", off)
    monkeypatch.setattr(IntegerInstructions, "add_quads", off)
    assert create_integer_matmul.__wrapped__(BLOCK_FORMATS["q4_k"], torch.float32, 1) is None
