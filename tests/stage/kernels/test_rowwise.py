"""Compiled norms, gates and rotations give what torch gives in float32, rounded once."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import rms_norm

from molink.stage.decoder.mlp import create_gate
from molink.stage.decoder.rotary import rotate
from molink.stage.kernels.create import create_rowwise
from molink.stage.kernels.rowwise import Rowwise
from molink.stage.kernels.shape import fits_rowwise

WITHIN = {"rtol": 2**-7, "atol": 1e-6}
teams = pytest.mark.parametrize("threads", [1, 3])
sizes = given(rows=st.integers(0, 20), vectors=st.integers(1, 9), seed=st.integers(0, 9))


def rowwise(threads: int, activation: str = "silu") -> Rowwise:
    made = create_rowwise(1e-5, activation, threads)
    if made is None:
        pytest.skip("this CPU has no compiled norms")
    return made


@teams
@settings(deadline=None, max_examples=30)
@sizes
def test_norms(threads: int, rows: int, vectors: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    given = torch.randn(rows, 16 * vectors, generator=generator).mul(seed + 1).bfloat16()
    weight = torch.randn(16 * vectors, generator=generator)
    exact = rms_norm(given.float(), weight.shape, weight, 1e-5)
    torch.testing.assert_close(rowwise(threads).norm(given, weight).float(), exact, **WITHIN)


@teams
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@settings(deadline=None, max_examples=30)
@sizes
def test_gates(threads: int, activation: str, rows: int, vectors: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    given = torch.randn(rows, 32 * vectors, generator=generator).mul(4 * seed + 1).bfloat16()
    exact = create_gate(activation)(given.double()).float()
    torch.testing.assert_close(rowwise(threads, activation).gate(given).float(), exact, **WITHIN)


def test_gates_of_what_is_far_out() -> None:
    given = torch.tensor([[-3e38, -1e4, -90.0, 90.0, 1e4, 3e38, 0.0, 1.0] * 2 + [1.0] * 16])
    result = rowwise(1).gate(given.bfloat16()).float()
    exact = create_gate("silu")(given.bfloat16().float())
    torch.testing.assert_close(result, exact, rtol=2**-7, atol=1e-6)


@teams
@pytest.mark.parametrize("rotary", [32, 64])
def test_rotations_leave_alone_what_is_beyond(threads: int, rotary: int) -> None:
    every = torch.randn(50, 9, 64).bfloat16()
    angles = torch.randn(50, 1, 2, rotary).bfloat16()
    exact = every.float()
    rotate(exact[:, :7], angles.float())
    rowwise(threads).rotate(every[:, :7], angles)
    torch.testing.assert_close(every.float(), exact, rtol=2**-7, atol=2**-6)


def test_which_widths_fit() -> None:
    assert fits_rowwise([64, 2816], [64, 96])
    assert not fits_rowwise([64, 2820], [64])
    assert not fits_rowwise([64], [64, 48])


def test_norms_that_are_wrong_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    made = rowwise(1)
    monkeypatch.setattr(type(made), "norm", lambda _, rows, weight: rows)
    assert create_rowwise.__wrapped__(1e-5, "silu", 1) is None
