"""The trial of fused operators passes if they are right, and finds each one that is wrong."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from molink.checkpoint.model_folder import ModelFolder
from molink.facts.dtypes import WeightDType
from molink.stage.attention.base import AttentionShape
from molink.stage.decoder.norm import RmsNorm
from molink.stage.decoder.operators import create_operators
from molink.stage.diagnostics import kernel_trials as trials
from molink.stage.diagnostics.kernel_trials import KernelTrial, kernel_chains
from molink.stage.diagnostics.trial_shapes import USUAL_SHAPES, TrialShapes
from molink.stage.stage import Stage
from tests.support.models import MakeModel
from tests.support.triton_device import DEVICE, needs_triton

#: Small shapes, for the interpreter.
SHAPES = replace(
    USUAL_SHAPES,
    hidden=72,
    inner=(40,),
    rotary=(8,),
    attention=AttentionShape(kv_heads=1, groups=2, head_dim=24, scale=1.0, windows=(0,)),
)
CUDA = torch.device("cuda", 0)


def trial_of(dtype: WeightDType, shapes: TrialShapes = SHAPES) -> KernelTrial:
    (found,) = (
        trial
        for chain in kernel_chains(shapes, dtype, "none", CUDA)
        for trial in chain
        if trial.kernel == "compiled-rows"
    )
    return found


@pytest.fixture
def placed(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """The devices that trials make current; operators run on the tests' device."""
    from molink.stage.decoder import fused_check

    entered: list[torch.device] = []
    compare = fused_check._compare_operators

    class Entered:
        def __init__(self, device: torch.device) -> None:
            entered.append(device)

        def __enter__(self) -> None: ...

        def __exit__(self, *_: object) -> None: ...

    monkeypatch.setattr(torch.cuda, "device", Entered)
    monkeypatch.setattr(
        fused_check, "_compare_operators", lambda shapes, dtype, _: compare(shapes, dtype, DEVICE)
    )
    return entered


@needs_triton
@pytest.mark.parametrize("dtype", ["f32", "f16"])
def test_operators_pass(placed: list[torch.device], dtype: WeightDType) -> None:
    outcome = trial_of(dtype).run_trial()
    assert outcome["state"] == "ok", outcome
    assert placed == [CUDA]


def spoil_last(result: Any) -> Any:
    """Change the last element by a tenth of the largest."""
    changed = result.clone()
    changed.view(-1)[-1] += result.abs().max().item() / 10
    return changed


def spoil_gate(rows: Tensor, *given: Any) -> Tensor:
    from molink.stage.gpu_kernels.row_kernels import apply_gate

    return spoil_last(apply_gate(rows, *given))


def spoil_bounded_gate(rows: Tensor, *given: Any) -> tuple[Tensor, Tensor]:
    from molink.stage.gpu_kernels.row_kernels import apply_bounded_gate

    gated, factors = apply_bounded_gate(rows, *given)
    return gated, 1.1 * factors


def spoil_sum(*given: Any) -> tuple[Tensor, Tensor]:
    from molink.stage.gpu_kernels.row_kernels import add_and_norm

    total, normed = add_and_norm(*given)
    return spoil_last(total), normed


def spoil_norm(*given: Any) -> tuple[Tensor, Tensor]:
    from molink.stage.gpu_kernels.row_kernels import add_and_norm

    total, normed = add_and_norm(*given)
    return total, spoil_last(normed)


def spoil_heads(*given: Any) -> Tensor:
    from molink.stage.gpu_kernels.row_kernels import append_heads

    return spoil_last(append_heads(*given))


def spoil_pages(*given: Any) -> Tensor:
    """Also write to a slot that belongs to no row."""
    from molink.stage.gpu_kernels.row_kernels import append_heads

    keys, values = given[5]
    values[0, 0] = keys[0, 0] = 1
    return append_heads(*given)


@needs_triton
@pytest.mark.parametrize(
    ("name", "broken"),
    [
        ("apply_gate", spoil_gate),
        ("apply_bounded_gate", spoil_bounded_gate),
        ("add_and_norm", spoil_sum),
        ("add_and_norm", spoil_norm),
        ("append_heads", spoil_heads),
        ("append_heads", spoil_pages),
    ],
)
def test_each_broken_operator_is_found(
    placed: list[torch.device],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    broken: Callable[..., Any],
) -> None:
    from molink.stage.decoder import fused, fused_check

    monkeypatch.setattr(fused, name, broken)
    monkeypatch.setattr(fused_check, "_ROWS", (7,))  # the others take long
    outcome = trial_of("f16").run_trial()
    assert outcome["state"] == "wrong", outcome
    assert outcome["error"] > 0.01


@needs_triton
@pytest.mark.parametrize("fault", ["", "wrong", "raises"])
def test_a_process_checks_operators_before_it_uses_them(
    make_model: MakeModel,
    tmp_path: Path,
    placed: list[torch.device],
    monkeypatch: pytest.MonkeyPatch,
    fault: str,
) -> None:
    from molink.stage.decoder import fused, fused_check

    def fail(*_: Any) -> Any:
        raise RuntimeError("no such instruction")

    fused_check.check_fused_rows.cache_clear()
    monkeypatch.setattr(fused_check, "_ROWS", (2,))
    if fault:
        broken = fail if fault == "raises" else spoil_norm
        monkeypatch.setattr(fused, "add_and_norm", broken)
    config = ModelFolder.open(make_model(tmp_path, "llama", 1)).config
    norm = create_operators(config, torch.float32, CUDA).norm(torch.ones(config.hidden_size))
    fused_check.check_fused_rows.cache_clear()
    assert isinstance(norm, RmsNorm if fault else fused.FusedRmsNorm)
    assert placed == [CUDA]


def test_without_triton_or_with_wide_rows_they_are_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trials, "find_triton_problem", lambda: "")
    outcome = trial_of("bf16", replace(SHAPES, hidden=1 << 15)).run_trial()
    assert (outcome["state"], outcome["reason"]) == (
        "absent",
        "rows of this size are not supported",
    )
    monkeypatch.setattr(trials, "find_triton_problem", lambda: "it is not installed")
    outcome = trial_of("bf16").run_trial()
    assert (outcome["state"], outcome["reason"]) == (
        "absent",
        "Triton can't be used: it is not installed",
    )


def test_a_stage_makes_its_device_current_before_its_trials(
    make_model: MakeModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton launches kernels on the thread's current device."""
    stage = Stage.load_layers(ModelFolder.open(make_model(tmp_path, "llama", 1)), (0, 1))
    stage.device = torch.device("cuda", 1)

    class Made(Exception): ...

    def make(device: torch.device) -> None:
        raise Made(device)

    monkeypatch.setattr(torch.cuda, "set_device", make)
    with pytest.raises(Made, match="cuda:1"):
        stage.allocate_kv_pool(2, 8)


@pytest.mark.gpu
@pytest.mark.parametrize("hidden", [64, 2880, 4096, 8192, 16384])
@pytest.mark.parametrize("dtype", ["f16", "bf16", "f32"])
def test_operators_pass_on_the_card(dtype: WeightDType, hidden: int) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device; run `pytest -m gpu` on a PC that has one")
    shapes = replace(USUAL_SHAPES, hidden=hidden, inner=(96, 14336), rotary=(64, 32))
    outcome = trial_of(dtype, shapes).run_trial()
    assert outcome["state"] == "ok", outcome
