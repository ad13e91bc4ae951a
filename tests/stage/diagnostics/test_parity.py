"""The kernels' self-test passes if they work, and finds small errors."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from molink.facts.dtypes import WeightDType
from molink.stage.attention.base import AttentionShape
from molink.stage.attention.gather import GatherAttention
from molink.stage.cpu_kernels.create import create_rowwise
from molink.stage.cpu_kernels.matmul import MatMul
from molink.stage.cpu_kernels.rowwise import RowwiseKernels
from molink.stage.diagnostics import kernel_trials as trials
from molink.stage.diagnostics import parity
from molink.stage.diagnostics.kernel_trials import kernel_chains, supported_dtypes
from molink.stage.diagnostics.reference_attention import dense_attention
from molink.stage.diagnostics.trial_shapes import USUAL_SHAPES
from molink.stage.linear import quantized
from molink.stage.linear.dense import PlainLinear
from molink.stage.linear.quantized import QuantizedProjectionFactory
from molink.stage.linear.unpacked import UnpackedLinear
from molink.stage.torch_dtypes import DTYPE_NAMES
from tests.support.kernels import NOT_COMPILED
from tests.support.models import MakeModel

CPU = torch.device("cpu")


def results(*wanted: str) -> list[dict[str, Any]]:
    return [one.run_trial() for one in parity.run_trials(CPU) if one.kernel in wanted]


def test_all_kernels_of_this_cpu(
    make_model: MakeModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the shapes of a small model; those of usual ones: ``tests/e2e/test_pairing.py``."""
    folder = make_model(tmp_path, "llama", 3, head_dim=32)
    before = torch.get_num_threads()
    given = ["--device", "cpu", "--threads", "1", "--skip", "packed-linear,nf4"]
    try:
        parity.main([*given, "--model", str(folder)])
    finally:
        torch.set_num_threads(before)
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert lines[0]["about"]["torch"] == torch.__version__
    assert lines[1]["device"] == "cpu"
    assert lines[1]["name"]
    found = [line["result"] for line in lines if "result" in line]
    assert [line["begin"]["kernel"] for line in lines if "begin" in line] == [
        one["kernel"] for one in found
    ]
    names = {one["kernel"] for one in found}
    assert {"torch", "gather-attention", "compiled-linear", "int8"} <= names
    assert not names & {"packed-linear", "nf4"}
    assert [one for one in found if one["state"] == "wrong"] == []
    assert all(one["error"] <= one["tolerance"] for one in found if one["state"] == "ok")


@pytest.mark.parametrize(
    ("kernel", "where", "name"),
    [
        ("torch", PlainLinear, "__call__"),
        ("compiled-linear", MatMul, "__call__"),
        ("compiled-rows", RowwiseKernels, "apply_gate"),
        ("int8", UnpackedLinear, "__call__"),
    ],
)
@pytest.mark.parametrize("bad", [1.05, float("nan")])
def test_a_kernel_that_is_wrong(
    monkeypatch: pytest.MonkeyPatch, kernel: str, where: type, name: str, bad: float
) -> None:
    exact: Callable[..., Tensor] = getattr(where, name)
    monkeypatch.setattr(
        QuantizedProjectionFactory,
        "probe_device",
        lambda *_: QuantizedProjectionFactory(True, True),
    )
    monkeypatch.setattr(
        QuantizedProjectionFactory,
        "create_projection",
        lambda self, weight, bias: UnpackedLinear(
            weight.mode, weight.data, weight.scales, weight.shape, bias
        ),
    )
    assert {one["state"] for one in results(kernel)} <= {"ok", "absent"}
    monkeypatch.setattr(where, name, lambda *given: exact(*given) * bad)
    states = {one["state"] for one in results(kernel)}
    if states == {"absent"}:
        pytest.skip(f"this CPU has no {kernel}")
    assert "wrong" in states


def test_a_kernel_that_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("CUDA error: no kernel image is available")

    monkeypatch.setattr(GatherAttention, "prepare_layers", refuse)
    found = results("gather-attention")
    assert {one["state"] for one in found} == {"wrong"}
    assert "no kernel image" in found[0]["reason"]


def test_attention_of_one_head_by_hand() -> None:
    shape = AttentionShape(kv_heads=1, groups=1, head_dim=1, scale=1.0, windows=(0,))
    both = torch.tensor([[[[0.0]], [[1.0]]], [[[0.0]], [[3.0]]], [[[0.0]], [[8.0]]]])
    queries = torch.zeros(2, 1, 1)
    assert dense_attention(queries, both, shape, 0).tolist() == [[2.0], [4.0]]
    assert dense_attention(queries, both, shape, 1).tolist() == [[3.0], [8.0]]
    assert dense_attention(queries, both, shape, 1, torch.zeros(1)).tolist() == [[1.5], [4.0]]


@pytest.mark.parametrize("dtype", supported_dtypes(CPU))
@pytest.mark.parametrize("scores", [{"softcap": 30.0}, {"sinks": True}], ids=str)
def test_attention_as_the_model_has_it(dtype: WeightDType, scores: dict[str, Any]) -> None:
    shapes = replace(USUAL_SHAPES, attention=replace(USUAL_SHAPES.attention, **scores))
    found = {one.kernel: one.run_trial() for one in kernel_chains(shapes, dtype, "none", CPU)[-1]}
    assert found["gather-attention"]["state"] == "ok"
    assert found["compiled-attention"]["state"] in ("ok", "absent")


@pytest.mark.parametrize("mode", ["int8", "nf4"])
def test_products_of_a_gpu_that_are_wrong_are_not_used(
    monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    cuda = torch.device("cuda", 0)
    for error in (float("nan"), 1.0, 0.001):
        monkeypatch.setattr(quantized, "relative_error", lambda *_, error=error: error)
        made = QuantizedProjectionFactory.probe_device(mode, torch.float16, cuda)
        assert (made.int8, made.nf4) == ((mode == "int8", mode == "nf4") if error < 1 else (0, 0))
        assert QuantizedProjectionFactory.probe_device(
            mode, torch.float16, cuda, {mode}
        ) == QuantizedProjectionFactory(False, False)

    def missing(*_: object) -> float:
        raise RuntimeError("no such operator")

    monkeypatch.setattr(quantized, "relative_error", missing)
    assert QuantizedProjectionFactory.probe_device(
        mode, torch.float16, cuda
    ) == QuantizedProjectionFactory(False, False)


def test_a_gpus_products_are_tried_once_their_library_is_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[str] = []

    def error(*_: object) -> float:
        asked.append("product")
        return 0.0

    monkeypatch.setattr(trials, "supports_bf16", lambda _: True)
    monkeypatch.setattr(trials, "load_library", lambda: asked.append("library"))
    monkeypatch.setattr(trials, "relative_error", error)
    every = [one for one in parity.run_trials(torch.device("cuda", 0)) if one.kernel == "int8"]
    assert [one.run_trial()["state"] for one in every] == ["ok", "ok"]
    assert asked == ["library", "product"] * 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("part", ["normalize_rows", "apply_gate", "rotate_heads"])
def test_compiled_rows_that_are_wrong_are_not_used(
    monkeypatch: pytest.MonkeyPatch, part: str, dtype: torch.dtype
) -> None:
    if create_rowwise(dtype, 1e-5, "silu", 1) is None:
        pytest.skip(NOT_COMPILED[DTYPE_NAMES[dtype]])
    wrong = {
        "normalize_rows": lambda _, rows, __: rows,
        "apply_gate": lambda _, rows: rows[:, ::2],
        "rotate_heads": lambda *_: None,
    }
    monkeypatch.setattr(RowwiseKernels, part, wrong[part])
    assert create_rowwise.__wrapped__(dtype, 1e-5, "silu", 1) is None


def test_the_shapes_of_a_model(
    make_model: MakeModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[Any] = []
    for folder in (make_model(tmp_path, "qwen2", 2), tmp_path / "none"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(parity, "run_trials", lambda *given: asked.append(given[2]) or ())
            parity.main(["--device", "cpu", "--model", str(folder)])
    assert asked[0].hidden == 64
    assert asked[1] is USUAL_SHAPES
    assert "config.json" in capsys.readouterr().err
