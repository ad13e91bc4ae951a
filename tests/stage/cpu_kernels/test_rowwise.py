"""Compiled norms, gates and rotations give torch's float32 results, rounded once."""

from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import rms_norm

from molink.checkpoint.traits import Activation
from molink.stage.cpu_kernels import compiler
from molink.stage.cpu_kernels.create import create_rowwise
from molink.stage.cpu_kernels.kernel_shape import supports_rowwise
from molink.stage.cpu_kernels.rowwise import RowwiseKernels
from molink.stage.decoder.mlp import create_gate
from molink.stage.decoder.rotary import rotate_half
from tests.support.kernels import require

_KINDS: dict[str, tuple[torch.dtype, tuple[str, ...], str | None]] = {
    "bf16": (torch.bfloat16, ("avx512bf16", "avx512f"), None),
    "float32, AVX512": (torch.float32, ("avx512f",), None),
    "float32, AVX2": (torch.float32, ("avx2", "fma"), "+avx,+avx2,+fma"),
}
kinds = pytest.mark.parametrize("kind", _KINDS)
teams = pytest.mark.parametrize("threads", [1, 3])
sizes = given(rows=st.integers(0, 20), vectors=st.integers(1, 9), seed=st.integers(0, 9))


@cache
def rowwise(kind: str, threads: int, activation: Activation = "silu") -> RowwiseKernels:
    dtype, wanted, features = _KINDS[kind]
    openmp = require(wanted, threads)
    return RowwiseKernels(dtype, 1e-5, activation, openmp, threads, features)


def within(made: RowwiseKernels) -> dict[str, float]:
    """Tolerances: the rounding of the kernels' type."""
    rounding = 2**-7 if made.dtype is torch.bfloat16 else 1e-5
    return {"rtol": rounding, "atol": 1e-6}


@kinds
@teams
@settings(deadline=None, max_examples=30)
@sizes
def test_norms(kind: str, threads: int, rows: int, vectors: int, seed: int) -> None:
    made, generator = rowwise(kind, threads), torch.Generator().manual_seed(seed)
    given = torch.randn(rows, 16 * vectors, generator=generator).mul(seed + 1).to(made.dtype)
    weight = torch.randn(16 * vectors, generator=generator)
    exact = rms_norm(given.float(), weight.shape, weight, 1e-5)
    result = made.normalize_rows(given, weight)
    assert result.dtype is made.dtype
    torch.testing.assert_close(result.float(), exact, **within(made))


@kinds
@teams
@settings(deadline=None, max_examples=30)
@sizes
def test_norms_of_heads(kind: str, threads: int, rows: int, vectors: int, seed: int) -> None:
    made, generator = rowwise(kind, threads), torch.Generator().manual_seed(seed)
    heads = torch.randn(rows, 5, 16 * vectors, generator=generator).mul(seed + 1).to(made.dtype)
    weight = torch.randn(3, 16 * vectors, generator=generator)
    exact = heads.float()
    exact[:, :3] = rms_norm(exact[:, :3], weight.shape[1:], None, 1e-5) * weight
    made.normalize_heads(heads[:, :3], weight)
    torch.testing.assert_close(heads.float(), exact, **within(made))


@kinds
@teams
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@settings(deadline=None, max_examples=30)
@sizes
def test_gates(
    kind: str, threads: int, activation: Activation, rows: int, vectors: int, seed: int
) -> None:
    made, generator = rowwise(kind, threads, activation), torch.Generator().manual_seed(seed)
    given = torch.randn(rows, 32 * vectors, generator=generator).mul(4 * seed + 1).to(made.dtype)
    exact = create_gate(activation)(given.double()).float()
    torch.testing.assert_close(made.apply_gate(given).float(), exact, **within(made))


@kinds
def test_gates_of_what_is_far_out(kind: str) -> None:
    made = rowwise(kind, 1)
    far = torch.tensor([[-3e38, -1e4, -90.0, 90.0, 1e4, 3e38, 0.0, 1.0] * 2 + [1.0] * 16])
    given = far.to(made.dtype)
    exact = create_gate("silu")(given.float())
    torch.testing.assert_close(made.apply_gate(given).float(), exact, **within(made))


@kinds
@teams
@pytest.mark.parametrize("rotary", [32, 64])
def test_rotations_leave_alone_what_is_beyond(kind: str, threads: int, rotary: int) -> None:
    made = rowwise(kind, threads)
    every = torch.randn(50, 9, 64).to(made.dtype)
    angles = torch.randn(50, 1, 2, rotary).to(made.dtype)
    exact = every.float().clone()
    rotate_half(exact[:, :7], angles.float())
    made.rotate_heads(every[:, :7], angles)
    rounding = within(made)["rtol"]
    torch.testing.assert_close(every.float(), exact, rtol=rounding, atol=2 * rounding)


def test_which_widths_fit() -> None:
    assert supports_rowwise([64, 2816], [64, 96])
    assert not supports_rowwise([64, 2820], [64])
    assert not supports_rowwise([64], [64, 48])


def test_types_and_cpus_without_norms(monkeypatch: pytest.MonkeyPatch) -> None:
    assert create_rowwise(torch.float16, 1e-5, "silu", 1) is None
    monkeypatch.setattr(compiler, "host_features", lambda: {"sse2": True})
    assert create_rowwise.__wrapped__(torch.float32, 1e-5, "silu", 1) is None
