"""Results of products with weights in GGUF blocks, on every kind of arithmetic."""

from functools import cache

import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from gguf.quants import dequantize
from torch import Tensor

from molink.gguf.block_formats import (
    BLOCK_FORMATS,
    HALF_BITS,
    MXFP4_BLOCK,
    BlockFormat,
    float4_format,
    locate_pair,
    resident_bytes,
)
from molink.gguf.ggml_types import PACKED_TYPES, dequantize_rows
from molink.stage.cpu_kernels import compiler, create
from molink.stage.cpu_kernels.arithmetic import Arithmetic, DotBf16, WidenedBf16
from molink.stage.cpu_kernels.block_matmul import BlockMatMul
from molink.stage.cpu_kernels.create import create_block_matmul, supports_block_weights
from molink.stage.cpu_kernels.repack import (
    BlockCodes,
    pack_blocks,
    packed_scales,
    parse_blocks,
    unpack_rows,
)
from molink.stage.linear.quantized import quantized_format
from molink.stage.torch_dtypes import TORCH_DTYPES
from tests.support.gguf_models import random_rows
from tests.support.kernels import check_segments, require

_CPUS: dict[str, tuple[Arithmetic, tuple[str, ...], str | None]] = {
    "AVX512-BF16": (DotBf16(), ("avx512bf16", "avx512f"), None),
    "AVX512": (WidenedBf16(lanes=16, tile=10), ("avx512f", "f16c"), None),
    "AVX2": (WidenedBf16(), ("avx2", "fma", "f16c"), "+avx,+avx2,+fma,+f16c"),
}
_ROWS = 96

_NAMES = [name for name, form in BLOCK_FORMATS.items() if form.fits_cpu]

cpus = pytest.mark.parametrize("cpu", _CPUS)
names = pytest.mark.parametrize("name", _NAMES)


def is_worth_compiling(cpu: str, number: int) -> bool:
    """A part of the formats for "AVX512", whose code is that of "AVX2" with wider vectors."""
    return cpu != "AVX512" or number % 3 == 0


@cache
def product(cpu: str, form: BlockFormat, threads: int = 1) -> BlockMatMul:
    arithmetic, wanted, features = _CPUS[cpu]
    openmp = require(wanted, threads)
    return BlockMatMul(form, arithmetic, openmp, threads, features)


def stored(name: str, blocks: int) -> tuple[Tensor, Tensor]:
    """Bytes of 96 rows, and their weights."""
    kind = Kind[name.upper()]
    rows = random_rows(kind, (_ROWS, blocks * PACKED_TYPES[name].block_size))
    return torch.from_numpy(rows), torch.from_numpy(dequantize(rows, kind))


@names
@pytest.mark.parametrize("columns", [16, 32])
def test_weights_are_what_they_were(name: str, columns: int) -> None:
    rows, exact = stored(name, 3)
    packed = pack_blocks(BLOCK_FORMATS[name], parse_blocks(name, rows), columns)
    assert packed.numel() == resident_bytes(BLOCK_FORMATS[name], exact.shape)
    assert packed.numel() <= 1.03 * rows.numel()
    wanted = torch.tensor([0, 95, 7, 7, 64])
    assert torch.equal(unpack_rows(BLOCK_FORMATS[name], packed, columns, wanted), exact[wanted])
    numbers = packed_scales(BLOCK_FORMATS[name], packed, columns)
    assert numbers.numel() == _ROWS * 3 * (1 + BLOCK_FORMATS[name].has_minimum)
    assert numbers[:, :, 0].abs().max() <= exact.abs().max()


@pytest.mark.parametrize("bits", [4, 5, 6])
def test_no_bit_of_a_word_belongs_to_two_codes(bits: int) -> None:
    form = next(one for one in BLOCK_FORMATS.values() if one.bits == bits)
    found = [
        (piece.word, bit)
        for index in range(form.group // 2)
        for piece in locate_pair(bits, index)
        for bit in range(piece.source_bit, piece.source_bit + piece.bits)
    ]
    assert sorted(found) == [
        (word, bit) for word in range(form.words_per_group) for bit in range(HALF_BITS)
    ]


@pytest.mark.parametrize(
    ("cpu", "name"),
    [
        (cpu, name)
        for cpu in _CPUS
        for number, name in enumerate(_NAMES)
        if is_worth_compiling(cpu, number)
    ],
)
def test_results_equal_a_float32_product(cpu: str, name: str) -> None:
    multiply = product(cpu, BLOCK_FORMATS[name])
    for blocks in (1, 3):
        rows, exact = stored(name, blocks)
        weight = pack_blocks(multiply.form, parse_blocks(name, rows), multiply.columns)
        check(multiply, weight, exact)


def check(multiply: BlockMatMul, weight: Tensor, exact: Tensor) -> None:
    """Compare products of ``weight`` with those of its numbers ``exact``."""
    generator = torch.Generator().manual_seed(0)
    bias = torch.randn(_ROWS, generator=generator)
    # The rows' sums are far from 0, so that an error in the weights' offsets shows.
    given = torch.randn(31, exact.shape[1], generator=generator).add(0.5).to(multiply.dtype)
    wide = given.double() @ exact.double().T + bias
    peak = float(wide.abs().max())
    within = 1e-6
    if multiply.dtype is torch.bfloat16:
        # Values of a codebook are rounded, too.
        within = 2**-7 if multiply.form.codebook else 2**-8
    for count in (0, 1, 2, 3, 5, 11, 31):
        result = multiply(weight, given[:count], bias)
        assert result.dtype is multiply.dtype
        torch.testing.assert_close(result.double(), wide[:count], rtol=within, atol=within * peak)
    # Many rows take another code path.
    few = torch.cat(
        [multiply(weight, rows, bias) for rows in given.split(multiply.unpack_min_rows - 1)]
    )
    assert torch.equal(multiply(weight, given, bias), few)


#: Formats of checkpoints other than GGUF: several runs per group, scales of both types, zero
#: points.
_OTHERS = (
    BlockFormat(4, 8, 128, 128, has_shifts=True),
    BlockFormat(4, 8, 64, 64, number_dtype="bf16"),
    BlockFormat(8, 0, 128, 128, has_shifts=True, number_dtype="bf16"),
    BlockFormat(8, 0, 64, 64),
    quantized_format("int8", 384, on_gpu=False),
    quantized_format("nf4", 64, on_gpu=False),
)


@pytest.mark.parametrize(
    ("cpu", "form"),
    [
        (cpu, form)
        for cpu in _CPUS
        for number, form in enumerate(_OTHERS)
        if is_worth_compiling(cpu, number)
    ],
)
def test_groups_of_other_checkpoints(cpu: str, form: BlockFormat) -> None:
    multiply, generator = product(cpu, form), torch.Generator().manual_seed(0)
    groups, low = 3, 0 if form.bits == 4 else -128
    high = low + 2**form.bits
    codes = torch.randint(low, high, (_ROWS, groups, form.group), generator=generator)
    scale = torch.rand(_ROWS, groups, generator=generator).to(TORCH_DTYPES[form.number_dtype])
    # Zero points from the lowest to the highest code.
    shift = torch.randint(-(2 ** (form.bits - 1)), 2 ** (form.bits - 1), scale.shape)
    shift *= form.has_shifts
    halves = (scale, shift.to(scale.dtype)) if form.has_shifts else (scale,)
    values = codes - form.offset + shift[:, :, None]
    if form.codebook:
        values = torch.tensor(form.codebook)[codes]
    exact = values * scale[:, :, None].double()
    blocks = BlockCodes(codes.to(torch.int8).view(torch.uint8), halves)
    weight = pack_blocks(form, blocks, multiply.columns)
    assert weight.numel() == resident_bytes(form, (_ROWS, groups * form.group))
    rows = torch.tensor([0, 95, 7, 64])
    assert torch.equal(
        unpack_rows(form, weight, multiply.columns, rows), exact[rows].flatten(1).float()
    )
    check(multiply, weight, exact.flatten(1))


@cpus
def test_mxfp4(cpu: str) -> None:
    form = float4_format(MXFP4_BLOCK, 320, "e8m0")
    rows = torch.from_numpy(random_rows(Kind.MXFP4, (_ROWS, 320)))
    exact = torch.from_numpy(dequantize_rows(PACKED_TYPES["mxfp4"], rows.numpy()))
    multiply = product(cpu, form)
    weight = pack_blocks(form, parse_blocks("mxfp4", rows), multiply.columns)
    assert weight.numel() == resident_bytes(form, (_ROWS, 320)) == rows.numel() + 4 * _ROWS
    assert torch.equal(unpack_rows(form, weight, multiply.columns, torch.arange(_ROWS)), exact)
    check(multiply, weight, exact.double())


@cpus
@pytest.mark.parametrize(("name", "blocks"), [("q4_k", 2), ("q6_k", 3), ("q5_1", 19), ("q8_0", 64)])
def test_results_do_not_depend_on_other_rows(cpu: str, name: str, blocks: int) -> None:
    alone, shared = product(cpu, BLOCK_FORMATS[name]), product(cpu, BLOCK_FORMATS[name], 3)
    stored_rows, exact = stored(name, blocks)
    weight = pack_blocks(alone.form, parse_blocks(name, stored_rows), alone.columns)
    rows, bias = torch.randn(30, exact.shape[1]).to(alone.dtype), torch.randn(_ROWS)
    together = alone(weight, rows, bias)
    assert torch.equal(shared(weight, rows, bias), together)
    for count in (1, 2, 5, 7, 13, 25):
        assert torch.equal(alone(weight, rows[:count], bias), together[:count])
    assert torch.equal(alone(weight, rows[29:], bias), together[29:])


@cpus
@pytest.mark.parametrize("name", ["q4_k", "q6_k", "q8_0"])
@pytest.mark.parametrize("threads", [1, 3])
def test_segments_have_weights_of_their_own(cpu: str, name: str, threads: int) -> None:
    multiply = product(cpu, BLOCK_FORMATS[name], threads)
    stored_rows, exact = stored(name, 2)
    weight = pack_blocks(multiply.form, parse_blocks(name, stored_rows), multiply.columns)
    check_segments(multiply, weight, exact.shape[1])


@cpus
def test_rows_of_a_larger_tensor(cpu: str) -> None:
    multiply = product(cpu, BLOCK_FORMATS["q8_0"])
    rows, exact = stored("q8_0", 1)
    weight = pack_blocks(multiply.form, parse_blocks("q8_0", rows), multiply.columns)
    strided = torch.ones(3, 40, dtype=multiply.dtype)[:, 4:36]
    expected = exact.sum(1).expand(3, -1)
    torch.testing.assert_close(
        multiply(weight, strided, torch.zeros(_ROWS)).float(), expected, rtol=2**-7, atol=0.05
    )


def test_a_cpu_without_the_instructions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "host_features", lambda: {"avx2": True, "fma": True})
    assert not supports_block_weights()
    assert create_block_matmul.__wrapped__(BLOCK_FORMATS["q4_0"], torch.float32, 1) is None


def test_a_product_that_is_wrong_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    if not supports_block_weights():
        pytest.skip("this CPU has no product that could be wrong")
    assert create_block_matmul.__wrapped__(BLOCK_FORMATS["q6_k"], torch.float32, 1) is not None

    def off(form: object, packed: Tensor, columns: int, rows: Tensor) -> Tensor:
        return unpack_rows(BLOCK_FORMATS["q6_k"], packed, columns, rows) * 1.001

    monkeypatch.setattr(create, "unpack_rows", off)
    assert create_block_matmul.__wrapped__(BLOCK_FORMATS["q6_k"], torch.float32, 1) is None
