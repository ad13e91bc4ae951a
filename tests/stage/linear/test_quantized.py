"""Quantized projections of every kind, type and shape give their dequantized weights' results."""

from collections.abc import Collection, Iterator
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from molink.checkpoint.quantized_size import quantized_bytes
from molink.facts.kernels import INTEGER_KERNELS
from molink.facts.model import Quantize
from molink.facts.profile import MAX_CHUNK_ROWS
from molink.stage.cpu_kernels.create import supports_block_weights
from molink.stage.linear import BlockLinear, ProjectionFactory, int8, nf4, quantized, timing
from molink.stage.linear.int8 import CudaProduct, Int8Linear, has_onednn_int8, quantize_int8
from molink.stage.linear.nf4 import NF4_VALUES, CudaNf4Linear, PackedNf4Linear
from molink.stage.linear.quantized import QuantizedProjectionFactory, QuantizedWeight
from molink.stage.linear.timing import Sides
from molink.stage.linear.unpacked import UnpackedLinear, rows_per_unpack
from tests.support.kernels import NOT_COMPILED

CPU = torch.device("cpu")
SHAPES = [(96, 128), (64, 96), (100, 96), (33, 64)]
#: Tolerance relative to a row's largest result: the rounding of the rows' type.
TOLERANCE = {torch.float32: 5e-4, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}


@pytest.fixture(autouse=True)
def same_numbers() -> Iterator[None]:
    """A fixed seed, since a weight halfway between two codes may become either."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


def dequantized(mode: str, weight: torch.Tensor) -> torch.Tensor:
    """The quantization formats, step by step."""
    if mode == "int8":
        scales = weight.abs().amax(1, keepdim=True)
        return (weight * (127 / scales)).round().double() * scales.double() / 127
    blocks = weight.view(-1, 64)
    scales = blocks.abs().amax(1, keepdim=True)
    codes = torch.tensor(NF4_VALUES)
    nearest = (blocks / scales).unsqueeze(-1).sub(codes).abs().argmin(-1)
    return (codes[nearest].double() * scales).view(weight.shape)


def fill(mode: str, weight: torch.Tensor, device: torch.device = CPU) -> QuantizedWeight:
    made = QuantizedWeight.create_empty(mode, tuple(weight.shape), device)
    step = min(rows_per_unpack(weight.shape[1]), 64)
    for first in range(0, len(weight), step):
        made.quantize_rows(first, weight[first : first + step].to(device))
    return made


def rows_with_outliers(width: int, dtype: torch.dtype) -> torch.Tensor:
    rows = torch.randn(21, width)
    rows[1] = 0
    rows[2, 3] = 1e4
    rows[3] *= 1e-4
    # Rows have both signs. A GPU has the 16 codes in the rows' type; if all terms had the same
    # factor, their roundings would add up while the terms themselves cancel.
    rows[4, ::2], rows[4, 1::2] = 1e4, -1e4
    return rows.to(dtype)


def compare(
    found: torch.Tensor, rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor
) -> None:
    assert found.dtype is rows.dtype
    assert bool(torch.isfinite(found).all())
    exact = rows.double().cpu() @ weight.t() + bias.double().cpu()
    largest = exact.abs().amax(1, keepdim=True)
    assert bool(((found.double().cpu() - exact).abs() <= TOLERANCE[rows.dtype] * largest).all())


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("mode", ["int8", "nf4"])
@torch.inference_mode()
def test_a_projection_is_that_of_its_dequantized_weight(
    mode: str, fast: bool, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    weight = torch.randn(shape) * 0.05
    bias = torch.randn(shape[0]).to(dtype)
    factory = (
        QuantizedProjectionFactory.probe_device(mode, dtype, CPU)
        if fast
        else QuantizedProjectionFactory(False, False)
    )
    projection = factory.create_projection(fill(mode, weight), bias)
    rows = rows_with_outliers(shape[1], dtype)
    for count in (21, 5, 1):
        compare(projection(rows[:count]), rows[:count], dequantized(mode, weight), bias)
    many = rows.repeat(13, 1)  # more than are multiplied at once
    compare(projection(many), many, dequantized(mode, weight), bias)
    assert projection.nbytes <= quantized_bytes(shape, mode, 4) + bias.nbytes


def multiply_in_place(disabled_kernels: Collection[str] = ()) -> QuantizedProjectionFactory:
    if not supports_block_weights():
        pytest.skip(NOT_COMPILED["f32"])
    blocks = ProjectionFactory.probe_device(torch.float32, CPU, disabled_kernels)
    return QuantizedProjectionFactory(False, False, blocks)


@pytest.mark.parametrize("shape", [(96, 128), (64, 192), (32, 64), (160, 96), (128, 896)])
@pytest.mark.parametrize("mode", ["int8", "nf4"])
@torch.inference_mode()
def test_a_cpu_multiplies_in_place(mode: Quantize, shape: tuple[int, int]) -> None:
    weight, bias = torch.randn(shape) * 0.05, torch.randn(shape[0])
    fits = mode == "int8" or shape[1] % 64 == 0
    exact, rows = dequantized(mode, weight), torch.randn(70, shape[1])
    expected = rows.double() @ exact.T + bias
    for disabled, within in ((INTEGER_KERNELS, 2e-6), ((), 2e-2)):
        made = multiply_in_place(disabled).create_projection(fill(mode, weight), bias)
        assert isinstance(made, BlockLinear) is fits
        for count in (1, 2, 7, 16, 33, 70):
            error = (made(rows[:count]) - expected[:count]).abs().max()
            assert error < within * expected.abs().max()
        assert made.nbytes <= quantized_bytes(shape, mode, 4) * 1.13 + bias.nbytes


@pytest.mark.parametrize("mode", ["int8", "nf4"])
@torch.inference_mode()
def test_products_in_place_may_be_disabled(mode: Quantize) -> None:
    blocks = multiply_in_place().blocks
    for disabled, kind in (((mode,), BlockLinear), ((mode, "quantized-blocks"), UnpackedLinear)):
        factory = QuantizedProjectionFactory.probe_device(
            mode, torch.float32, CPU, disabled, blocks
        )
        made = factory.create_projection(fill(mode, torch.randn(64, 128)), None)
        assert isinstance(made, kind)


@pytest.mark.parametrize("shape", [(33, 128), (64, 72)])
@pytest.mark.parametrize("mode", ["int8", "nf4"])
@torch.inference_mode()
def test_odd_shapes_are_unpacked(mode: Quantize, shape: tuple[int, int]) -> None:
    made = multiply_in_place().create_projection(fill(mode, torch.randn(shape)), None)
    assert isinstance(made, UnpackedLinear)


@pytest.mark.parametrize(
    ("few", "many", "slow"), [(0.5, 1.05, False), (1.2, 0.5, True), (0.5, 1.2, True)]
)
@pytest.mark.parametrize("mode", ["int8", "nf4"])
def test_products_in_place_must_be_faster(
    monkeypatch: pytest.MonkeyPatch, mode: Quantize, few: float, many: float, slow: bool
) -> None:
    multiply_in_place()
    given: list[list[list[str]]] = []

    def time_sides(sides: Sides, _: object) -> tuple[float, float]:
        given.append([[type(one).__name__ for one in side] for side in sides])
        return few, many

    monkeypatch.setattr(timing, "time_sides", time_sides)
    assert quantized.has_slow_blocks.__wrapped__(torch.float32, mode) is slow
    ours, others = given[0]
    assert set(ours) == {"BlockLinear"}
    assert "BlockLinear" not in others


def test_a_cpu_without_products_in_place_has_slow_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ProjectionFactory, "keeps_format", lambda *_: False)
    assert quantized.has_slow_blocks.__wrapped__(torch.float32, "nf4")


@pytest.mark.parametrize("mode", ["int8", "nf4"])
@torch.inference_mode()
def test_a_layer_with_zeros_only(mode: str) -> None:
    factory = QuantizedProjectionFactory.probe_device(mode, torch.bfloat16, CPU)
    projection = factory.create_projection(fill(mode, torch.zeros(64, 128)), None)
    assert not projection(torch.randn(3, 128).bfloat16()).any()


@pytest.mark.parametrize("mode", ["int8", "nf4"])
@torch.inference_mode()
def test_merged_projections_are_the_parts_side_by_side(mode: str) -> None:
    parts = [torch.randn(rows, 64) for rows in (96, 32, 32)]
    factory = QuantizedProjectionFactory.probe_device(mode, torch.float32, CPU)
    rows = torch.randn(4, 64)
    whole = factory.create_projection(fill(mode, torch.cat(parts)), None)(rows)
    each = [factory.create_projection(fill(mode, part), None)(rows) for part in parts]
    torch.testing.assert_close(whole, torch.cat(each, 1), rtol=1e-6, atol=1e-5)


@torch.inference_mode()
def test_int8_weights_are_those_of_bitsandbytes() -> None:
    from molink.stage.linear.nf4 import load_library

    library = load_library()
    weight = torch.randn(64, 128).half()
    data, scales = quantize_int8(weight)
    theirs, their_scales, _ = library.functional.int8_vectorwise_quant(weight)
    assert (data.int() - theirs.int()).abs().max() <= 1  # ties may be rounded either way
    assert (data != theirs).float().mean() < 0.01
    assert torch.equal(scales, their_scales)


def test_fast_kernels_that_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.ops, "onednn", object())
    monkeypatch.setattr(torch.ops, "bitsandbytes", object())
    assert not int8.has_onednn_int8()
    monkeypatch.setattr(
        nf4, "quantize_nf4", lambda weight: (torch.zeros(4096).byte(), torch.ones(128))
    )
    monkeypatch.setattr(nf4, "dequantize_nf4", lambda *_: torch.zeros(64, 128))
    assert not nf4.has_nf4_kernel()


def test_products_that_saturate_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    exact = int8.OneDnnProduct.__call__
    monkeypatch.setattr(
        int8.OneDnnProduct,
        "__call__",
        lambda self, planes: exact(self, planes).clamp(-(2**15), 2**15),
    )
    assert not int8.has_onednn_int8()


@torch.inference_mode()
def test_weights_too_wide_for_32_bit_sums_are_unpacked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantized, "MAX_INT8_WIDTH", 64)
    factory = QuantizedProjectionFactory(True, True)
    assert isinstance(
        factory.create_projection(fill("int8", torch.randn(8, 128)), None), UnpackedLinear
    )


@torch.inference_mode()
def test_which_kind_is_chosen() -> None:
    fast = QuantizedProjectionFactory(has_onednn_int8(), True)
    if fast.int8:
        made = fast.create_projection(fill("int8", torch.randn(33, 64)), None)
        assert isinstance(made, Int8Linear)
    weight = fill("nf4", torch.randn(64, 64))
    assert isinstance(fast.create_projection(weight, None), PackedNf4Linear)
    assert isinstance(
        fast.create_projection(fill("nf4", torch.randn(33, 64)), None), UnpackedLinear
    )
    assert isinstance(
        fast.create_projection(fill("nf4", torch.randn(32, 96)), None), UnpackedLinear
    )


@torch.inference_mode()
def test_the_product_of_a_gpu_with_bitsandbytes_on_a_cpu() -> None:
    from molink.stage.linear.nf4 import load_library

    load_library()
    weight = torch.randn(96, 128)
    made = fill("int8", weight)
    projection = Int8Linear(CudaProduct.from_weight(made.data, made.scales))
    rows = rows_with_outliers(128, torch.bfloat16)
    compare(projection(rows), rows, dequantized("int8", weight), torch.zeros(96))


@pytest.mark.parametrize(("device", "products"), [("cpu", 5), ("meta", 1)])
def test_a_gpu_multiplies_a_whole_step_at_once(device: str, products: int) -> None:
    """A GPU would spend more time on launching dozens of small kernels than on arithmetic."""
    asked: list[int] = []

    class Product:
        nbytes = 0

        def __call__(self, planes: Tensor) -> Tensor:
            asked.append(len(planes))
            return planes.new_zeros(len(planes), 8)

    rows = torch.ones(MAX_CHUNK_ROWS + 64, 64, device=device)
    assert Int8Linear(Product())(rows).shape == (len(rows), 8)
    assert len(asked) == products
    assert sum(asked) == 2 * len(rows)


@pytest.mark.parametrize(("shape", "kind"), [((100, 128), Int8Linear), ((33, 128), UnpackedLinear)])
def test_the_integer_product_of_a_gpu_takes_multiples_of_4(
    shape: tuple[int, int], kind: type[Int8Linear] | type[UnpackedLinear]
) -> None:
    there = SimpleNamespace(device=torch.device("cuda:0"))  # the numbers don't matter
    weight = QuantizedWeight("int8", shape, there, torch.ones(shape[0]))
    assert isinstance(QuantizedProjectionFactory(True, True).create_projection(weight, None), kind)


@torch.inference_mode()
def test_the_nf4_projection_of_a_gpu_with_bitsandbytes_on_a_cpu() -> None:
    weight = torch.randn(96, 128)
    made = fill("nf4", weight)
    projection = CudaNf4Linear(made.data.view(-1, 1), made.scales, made.shape)
    rows = rows_with_outliers(128, torch.bfloat16)
    compare(projection(rows), rows, dequantized("nf4", weight), torch.zeros(96))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", [(96, 128), (64, 96), (100, 96), (33, 61 * 64)])
@pytest.mark.parametrize("mode", ["int8", "nf4"])
@torch.inference_mode()
def test_on_a_gpu(mode: str, shape: tuple[int, int], dtype: torch.dtype) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device; run `pytest -m gpu` on a PC that has one")
    device = torch.device("cuda", 0)
    # The products of outliers and larger weights would exceed float16.
    weight = torch.randn(shape) * 0.4 / shape[1] ** 0.5
    bias = torch.randn(shape[0], device=device).to(dtype)
    factory = QuantizedProjectionFactory.probe_device(mode, dtype, device)
    projection = factory.create_projection(fill(mode, weight, device), bias)
    rows = rows_with_outliers(shape[1], dtype).to(device)
    for count in (21, 5, 1):
        compare(projection(rows[:count]), rows[:count], dequantized(mode, weight), bias)
