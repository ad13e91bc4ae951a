"""Low-bit weights in planes: their bytes, their values and their products."""

from collections.abc import Iterator
from dataclasses import replace
from unittest import mock

import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from gguf.quants import dequantize
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from molink.gguf.block_formats import (
    BLOCK_FORMATS,
    E2M1_VALUES,
    BlockFormat,
    fits_planes,
    resident_bytes,
)
from molink.gguf.ggml_types import PACKED_TYPES
from molink.stage.cpu_kernels.repack import BlockCodes, read_blocks
from molink.stage.gpu_kernels import block_product
from molink.stage.gpu_kernels.block_planes import BlockPlanes, PlaneLayout
from molink.stage.gpu_kernels.block_product import (
    choose_splits,
    dequantize_rows,
    find_planes_problem,
    multiply_blocks,
    multiply_fused,
)
from molink.stage.linear import planes_check
from molink.stage.linear.planes import PlanesLinear
from molink.stage.linear.planes_check import dequantize_codes, draw_codes, planes_error
from molink.stage.linear.quantized import quantized_format
from tests.support.gguf_models import random_rows
from tests.support.triton_device import DEVICE, needs_triton, widen_products

pytestmark = needs_triton

#: Integers of GPTQ, AWQ and compressed-tensors.
INTEGERS = (
    BlockFormat(4, 8, 128, 128, has_shifts=True),
    BlockFormat(8, 0, 64, 64, number_dtype="bf16"),
    BlockFormat(8, 0, 32, 32, has_shifts=True),
)
#: Formats of ``int8``, with a scale per row, and ``nf4``.
QUANTIZED = (quantized_format("int8", 256, on_gpu=True), quantized_format("nf4", 256, on_gpu=True))
#: FP8: a scale per row, and one per block of 128 rows and columns.
FLOATS = (
    BlockFormat(8, 0, 256, 256, number_dtype="bf16", is_float=True),
    BlockFormat(8, 0, 128, 128, number_dtype="f32", is_float=True, shared_rows=128),
)
#: NVFP4 and MXFP4.
FLOATS4 = tuple(
    BlockFormat(
        4, 0, group, 256,
        has_nested_scales=True, number_dtype="f32", codebook=E2M1_VALUES, step_kind=kind,
    )
    for group, kind in ((16, "e4m3"), (32, "e8m0"))
)  # fmt: skip
FORMATS = (*BLOCK_FORMATS.values(), *INTEGERS, *QUANTIZED, *FLOATS, *FLOATS4)
#: The interpreter truncates bf16 instead of rounding it.
TOLERANCES = {torch.float16: 2e-3, torch.bfloat16: 2**-6, torch.float32: 1e-5}


@pytest.fixture(scope="module", autouse=True)
def wide_products() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if DEVICE.type == "cpu":
            widen_products(patch)
        yield


def pack(form: BlockFormat, shape: tuple[int, int], seed: int = 0) -> tuple[BlockPlanes, Tensor]:
    """Random codes as planes, and their values in float64."""
    part = draw_codes(form, shape, torch.Generator().manual_seed(seed))
    planes = BlockPlanes.pack_blocks(PlaneLayout(form, shape), [part], DEVICE)
    return planes, dequantize_codes(form, part)


@pytest.mark.parametrize("name", BLOCK_FORMATS)
def test_gguf_weights_are_those_of_the_file_and_as_large(name: str) -> None:
    form, kind = BLOCK_FORMATS[name], PACKED_TYPES[name]
    rows = random_rows(Kind[name.upper()], (96, 512))
    exact = torch.from_numpy(dequantize(rows, Kind[name.upper()]))
    halves = torch.from_numpy(rows).split(64)
    parts = [part for half in halves for part in read_blocks(name, half)]
    planes = BlockPlanes.pack_blocks(PlaneLayout(form, (96, 512)), parts, DEVICE)
    found = dequantize_rows(planes, 0, 96, torch.float32)
    torch.testing.assert_close(found.cpu(), exact, atol=0, rtol=1e-6)
    assert torch.equal(dequantize_rows(planes, 30, 70, torch.float32), found[30:70])
    tokens = torch.tensor([95, 0, 33, 33], device=DEVICE)
    linear = PlanesLinear(planes, None, torch.float32)
    assert torch.equal(linear.look_up(tokens), found[tokens])
    assert linear.nbytes == resident_bytes(form, (96, 512))
    # A group's two six-bit numbers take a byte each.
    grown = {"q4_k": 4, "q5_k": 4, "iq4_xs": 2}.get(name, 0)
    assert linear.nbytes == 96 * 512 // kind.block_size * (kind.nbytes + grown)


@pytest.mark.parametrize(
    ("form", "of_file"),
    [
        (quantized_format("int8", 4096, on_gpu=True), 4096**2 + 4 * 4096),
        (quantized_format("nf4", 4096, on_gpu=True), 4096**2 * 9 // 16),
        (replace(FLOATS[0], group=4096, block=4096), 4096**2 + 2 * 4096),
        (FLOATS[1], 4096**2 + 4 * 32**2),
        (replace(FLOATS4[0], block=4096), 4096**2 * 9 // 16 + 4),
        (replace(FLOATS4[1], block=4096), 4096**2 * 17 // 32),
    ],
    ids=["int8", "nf4", "fp8 by row", "fp8 in blocks", "nvfp4", "mxfp4"],
)
def test_weights_of_checkpoints_are_as_large_as_in_files(form: BlockFormat, of_file: int) -> None:
    planes = BlockPlanes.create_empty(PlaneLayout(form, (4096, 4096)), DEVICE)
    assert of_file <= planes.nbytes <= 1.002 * of_file


@pytest.mark.parametrize("form", FORMATS, ids=str)
def test_a_device_is_proven_by_every_format(form: BlockFormat) -> None:
    dtype = torch.bfloat16 if form.has_minimum else torch.float16
    assert planes_error(form, 256, dtype, DEVICE) < TOLERANCES[dtype]


def test_a_check_of_wide_rows_fits_float16(monkeypatch: pytest.MonkeyPatch) -> None:
    """A regression: random Q6_K blocks are large, so sums over 1024 columns overflowed."""
    monkeypatch.setattr(planes_check, "_ROWS", (33,))
    monkeypatch.setattr(planes_check, "_SPLITS", (1,))
    error = planes_error(BLOCK_FORMATS["q6_k"], 1024, torch.float16, DEVICE)
    assert error < TOLERANCES[torch.float16]


@pytest.mark.parametrize("form", FORMATS, ids=str)
def test_few_and_many_rows(form: BlockFormat) -> None:
    planes, weight = pack(form, (max(64, form.shared_rows), 512))
    rows = torch.randn(65, 512, generator=torch.Generator().manual_seed(0))
    exact = rows.double() @ weight.t()
    for count in (1, 3, 16, 65):
        found = multiply_blocks(planes, rows[:count].to(DEVICE), None).double().cpu()
        assert (found - exact[:count]).abs().max() < 1e-5 * exact.abs().max()


@settings(max_examples=20)
@given(
    form=st.sampled_from(FORMATS),
    rows=st.integers(1, 64),
    outputs=st.integers(1, 80),
    blocks=st.integers(1, 3),
    dtype=st.sampled_from(list(TOLERANCES)),
    biased=st.booleans(),
    splits=st.integers(0, 3),
    tensor=st.booleans(),
    seed=st.integers(0, 99),
)
def test_products(
    form: BlockFormat,
    rows: int,
    outputs: int,
    blocks: int,
    dtype: torch.dtype,
    biased: bool,
    splits: int,
    tensor: bool,
    seed: int,
) -> None:
    columns = blocks * max(form.block, 32 if form.bits == 8 else 64)
    outputs = -(-outputs // form.shared_rows) * form.shared_rows
    planes, weight = pack(form, (outputs, columns), seed)
    generator = torch.Generator().manual_seed(seed)
    # Random blocks of some formats are large, but sums must fit float16.
    size = min(1.0, 1e4 / (float(weight.abs().max()) * columns**0.5))
    given_rows = (size * torch.randn(rows, columns, generator=generator)).to(dtype)
    bias = torch.randn(outputs, generator=generator).to(dtype) if biased else None
    exact = given_rows.double() @ weight.t() + (0 if bias is None else bias.double())
    added = None if bias is None else bias.to(DEVICE)
    with mock.patch.object(block_product, "has_tensor_products", return_value=tensor):
        found = multiply_fused(planes, given_rows.to(DEVICE), added, splits)
    assert (found.dtype, found.shape) == (dtype, (rows, outputs))
    # If there are few results, all may be small compared with their terms.
    largest = max(float(exact.abs().max()), size * float(weight.abs().max()) * columns**0.5)
    assert float((found.double().cpu() - exact).abs().max()) <= TOLERANCES[dtype] * largest


def test_many_rows_multiply_dequantized_weights_part_by_part(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    planes, weight = pack(BLOCK_FORMATS["q4_1"], (80, 256))
    rows, bias = torch.randn(65, 256).to(DEVICE), torch.randn(80).to(DEVICE)
    monkeypatch.setattr(block_product, "MAX_DEQUANTIZED", 33 * 256)
    monkeypatch.setattr(block_product, "multiply_fused", None)
    found = multiply_blocks(planes, rows, bias)
    exact = rows.double() @ weight.to(DEVICE).t() + bias.double()
    torch.testing.assert_close(found.double(), exact, atol=1e-3, rtol=1e-5)


def test_no_rows() -> None:
    planes, _ = pack(BLOCK_FORMATS["q8_0"], (32, 64))
    assert multiply_blocks(planes, torch.empty(0, 64, device=DEVICE), None).shape == (0, 32)


@pytest.mark.parametrize("number", [float("inf"), float("nan")])
def test_numbers_that_are_not_finite_are_found(number: float) -> None:
    planes, _ = pack(BLOCK_FORMATS["q4_k"], (32, 256))
    linear = PlanesLinear(planes, None, torch.float32)
    assert linear.is_finite(0, 32)
    planes.minima[0, 20] = number
    assert linear.is_finite(0, 20)
    assert not linear.is_finite(16, 32)


@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_floats_that_are_no_numbers_are_found(code: int) -> None:
    part = draw_codes(FLOATS[1], (256, 128), torch.Generator().manual_seed(0))
    part.codes[200, 0, 77] = code
    planes = BlockPlanes.pack_blocks(PlaneLayout(FLOATS[1], (256, 128)), [part], DEVICE)
    assert planes.is_finite(0, 128)
    assert not planes.is_finite(128, 256)


@pytest.mark.parametrize(("form", "step"), [(FLOATS4[0], 0x7F), (FLOATS4[1], 0xFF)])
def test_steps_that_are_no_numbers_are_found(form: BlockFormat, step: int) -> None:
    planes, _ = pack(form, (32, 256))
    assert planes.is_finite(0, 32)
    planes.scale_steps[1, 20, 3] = step
    assert planes.is_finite(0, 20)
    assert not planes.is_finite(16, 32)


def test_all_floats_of_8_bits() -> None:
    part = BlockCodes(torch.arange(256).byte().view(2, 1, 128), (torch.ones(2, 1),))
    form = BlockFormat(8, 0, 128, 128, number_dtype="f32", is_float=True)
    planes = BlockPlanes.pack_blocks(PlaneLayout(form, (2, 128)), [part], DEVICE)
    found = dequantize_rows(planes, 0, 2, torch.float32).flatten().cpu()
    exact = torch.arange(256).byte().view(torch.float8_e4m3fn).float()
    numbers = exact.isfinite()
    assert torch.equal(found[numbers], exact[numbers])


def test_rows_that_share_scales_arrive_in_any_slices() -> None:
    form, shape = FLOATS[1], (384, 256)
    part = draw_codes(form, shape, torch.Generator().manual_seed(0))
    slices = [
        BlockCodes(part.codes[first:last], (part.halves[0][first:last],))
        for first, last in ((0, 64), (64, 224), (224, 384))
    ]
    planes = BlockPlanes.pack_blocks(PlaneLayout(form, shape), slices, DEVICE)
    found = dequantize_rows(planes, 0, 384, torch.float32).cpu()
    torch.testing.assert_close(found.double(), dequantize_codes(form, part), rtol=1e-6, atol=0)
    assert planes.nbytes == 384 * 256 + 3 * 2 * 4


def test_rows_that_words_do_not_fill_stay_out() -> None:
    narrow, wide = BLOCK_FORMATS["q4_0"], BLOCK_FORMATS["q8_0"]
    assert [fits_planes(narrow, (32, width)) for width in (32, 64, 96, 128, 576)] == [0, 1, 0, 1, 1]
    assert [fits_planes(wide, (32, width)) for width in (16, 32, 48, 64, 96)] == [0, 1, 0, 1, 1]


def test_columns_are_split_until_a_device_is_busy() -> None:
    assert choose_splits(warps=32, steps=32, processors=64) == 8
    assert choose_splits(warps=200, steps=32, processors=64) == 4
    assert choose_splits(warps=2000, steps=32, processors=64) == 1
    assert choose_splits(warps=2, steps=15, processors=64) == 2
    assert choose_splits(warps=2, steps=3, processors=64) == 1


def test_only_gpus_from_turing_on_multiply(monkeypatch: pytest.MonkeyPatch) -> None:
    card = torch.device("cuda", 0)
    assert find_planes_problem(torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(block_product, "find_triton_problem", lambda: "")
    for capability, works in (((7, 0), False), ((7, 5), True), ((12, 0), True)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, of=capability: of)
        assert (find_planes_problem(card) == "") is works
    monkeypatch.setattr(block_product, "find_triton_problem", lambda: "it is not installed")
    assert "Triton" in find_planes_problem(card)
