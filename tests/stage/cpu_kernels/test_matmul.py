"""Results of compiled products, on every kind of arithmetic that this CPU has."""

import sys
from functools import cache

import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from molink.stage.cpu_kernels import compiler
from molink.stage.cpu_kernels.arithmetic import Arithmetic, DotBf16, WidenedBf16, WidenedF16
from molink.stage.cpu_kernels.create import create_matmul
from molink.stage.cpu_kernels.matmul import MatMul
from molink.stage.cpu_kernels.openmp import OpenMp
from tests.support.kernels import require

_AVX2 = ("avx2", "fma")
_KINDS: dict[str, tuple[Arithmetic, tuple[str, ...], str | None]] = {
    "AVX512-BF16": (DotBf16(), ("avx512bf16", "avx512f"), None),
    "AVX512": (WidenedBf16(lanes=16, tile=10), ("avx512f",), None),
    "AVX2": (WidenedBf16(), _AVX2, "+avx,+avx2,+fma"),
    "AVX512, float16": (WidenedF16(lanes=16, tile=10), ("avx512f", "f16c"), None),
    "AVX2, float16": (WidenedF16(), (*_AVX2, "f16c"), "+avx,+avx2,+fma,+f16c"),
}


@cache
def product(kind: str, threads: int) -> MatMul:
    arithmetic, wanted, features = _KINDS[kind]
    openmp = require(wanted, threads)
    return MatMul(arithmetic, openmp, threads, features)


kinds = pytest.mark.parametrize("kind", _KINDS)
teams = pytest.mark.parametrize("threads", [1, 3])


@kinds
@teams
@settings(deadline=None, max_examples=40)
@given(
    rows=st.integers(0, 40),
    blocks=st.integers(1, 5),
    pairs=st.integers(1, 70),
    seed=st.integers(0, 9),
)
def test_results_equal_a_float32_product(
    kind: str, threads: int, rows: int, blocks: int, pairs: int, seed: int
) -> None:
    multiply, generator = product(kind, threads), torch.Generator().manual_seed(seed)
    weight = torch.randn(blocks * 32, pairs * 2, generator=generator).to(multiply.weight_dtype)
    matrix = torch.randn(rows, pairs * 2, generator=generator).to(multiply.dtype)
    bias = torch.randn(blocks * 32, generator=generator)
    assert multiply.supports_weight(weight)
    result = multiply(multiply.pack_weight(weight), matrix, bias)
    assert result.dtype is multiply.dtype
    exact = matrix.double() @ weight.double().T + bias
    within = 2**-7 if multiply.dtype is torch.bfloat16 else 1e-5
    torch.testing.assert_close(result.double(), exact, rtol=within, atol=within)


@kinds
@teams
@pytest.mark.parametrize("depth", [96, 2048])  # row strides are padded at 2048
def test_results_do_not_depend_on_other_rows(kind: str, threads: int, depth: int) -> None:
    multiply = product(kind, threads)
    weight = multiply.pack_weight(torch.randn(128, depth).to(multiply.weight_dtype))
    rows, bias = torch.randn(30, depth).to(multiply.dtype), torch.randn(128)
    together = multiply(weight, rows, bias)
    for count in (1, 2, 7, 13):
        assert torch.equal(multiply(weight, rows[:count], bias), together[:count])
    assert torch.equal(multiply(weight, rows[29:], bias), together[29:])


@kinds
def test_nothing_is_written_beyond_the_result(kind: str) -> None:
    multiply = product(kind, 1)
    weight, bias = (
        multiply.pack_weight(torch.ones(32, 4).to(multiply.weight_dtype)),
        torch.zeros(32),
    )
    multiply(weight, torch.ones(3, 4, dtype=multiply.dtype), bias)
    strided = torch.ones(3, 9, dtype=multiply.dtype)[:, 1:5]
    assert torch.equal(multiply(weight, strided, bias), torch.full((3, 32), 4.0).to(multiply.dtype))


@kinds
def test_packed_columns_are_had_again(kind: str) -> None:
    multiply, numbers = product(kind, 1), torch.tensor([95, 0, 17, 17, 40])
    weight = torch.arange(96 * 20).view(96, 20).remainder(251).to(multiply.weight_dtype)
    found = multiply.gather_columns(multiply.pack_weight(weight), numbers)
    assert torch.equal(found, weight[numbers].to(multiply.dtype))


def test_float16_is_exact_to_its_smallest_and_largest_numbers() -> None:
    """Also those with fewer bits of precision: F16C converts them exactly."""
    multiply = product("AVX2, float16", 1)
    weight = torch.arange(2**16).to(torch.uint16).view(torch.float16)
    weight = torch.where(weight.isfinite(), weight, 0).view(-1, 32)
    rows = torch.eye(32)
    given = multiply(multiply.pack_weight(weight), rows, torch.zeros(len(weight)))
    assert torch.equal(given.T, weight.float())


def test_shapes_that_do_not_fit() -> None:
    multiply = product("AVX2", 1)
    assert multiply.supports_weight(torch.empty(64, 6))
    assert not multiply.supports_weight(torch.empty(63, 6))
    assert not multiply.supports_weight(torch.empty(64, 5))


def test_an_unsupported_dtype_is_refused() -> None:
    assert create_matmul(torch.float16, 1) is None
    assert create_matmul(torch.bfloat16, 1, torch.float16) is None
    assert create_matmul(torch.float32, 1, torch.float32) is None


def test_without_llvm_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "molink.stage.cpu_kernels.compiler", None)
    assert create_matmul.__wrapped__(torch.float32, 1) is None


def test_a_product_that_is_wrong_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MatMul, "__call__", lambda *_: torch.zeros(29, 96))
    assert create_matmul.__wrapped__(torch.float32, 1) is None


def test_a_cpu_without_the_instructions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "host_features", lambda: {"sse2": True})
    assert create_matmul.__wrapped__(torch.float32, 1) is None
    assert create_matmul.__wrapped__(torch.bfloat16, 1) is None
    monkeypatch.setattr(compiler, "host_features", lambda: {"avx2": True, "fma": True})
    assert create_matmul.__wrapped__(torch.float32, 1, torch.float16) is None, "no F16C"


def test_a_system_that_hides_its_libraries_has_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise psutil.AccessDenied

    monkeypatch.setattr(psutil.Process, "memory_maps", refuse)
    assert OpenMp.find_loaded() is None
    assert create_matmul.__wrapped__(torch.float32, 2) is None
