"""``python -m molink.stage.diagnostics.stage_bench``, in this process."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from molink.stage.diagnostics import stage_bench as bench
from molink.stage.diagnostics import stage_bench as limits


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    monkeypatch.setattr(limits, "_READ_BYTES", 1 << 20)
    monkeypatch.setattr(limits, "_CPU_SIZE", 64)
    monkeypatch.setattr(limits, "_SECONDS", 0.01)


@pytest.fixture(scope="module")
def folder(make_model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made: Path = make_model(tmp_path_factory.mktemp("bench"))
    return made


def run(folder: Path, *more: str) -> int:
    given = ["--model-dir", str(folder), "--device", "cpu", "--seconds", "0.2", *more]
    return bench.main(given)


@pytest.mark.parametrize(("first", "last", "dtype"), [(0, 3, "auto"), (1, 2, "bf16")])
def test_it_prints_one_object(folder: Path, capsys: Any, first: int, last: int, dtype: str) -> None:
    options = ["--first", str(first), "--last", str(last), "--dtype", dtype, "--threads", "1"]
    assert run(folder, *options) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["layers"] == [first, last]
    assert printed["dtype"] == ("bf16" if dtype == "bf16" else "f32")
    assert (printed["device"], printed["threads"], printed["quantize"]) == ("cpu", 1, "none")
    for kind in ("decode", "prefill"):
        for point in printed[kind]:
            assert point["tokens_per_s"] == point["rows"] / point["seconds"]
    read, compute = printed["read"], printed["compute"]
    assert read["share"] == read["bytes_per_s"] / read["peak_bytes_per_s"]
    assert read["bytes_per_s"] == pytest.approx(read["bytes"] / printed["decode"][0]["seconds"])
    assert compute["share"] == compute["flops_per_s"] / compute["peak_flops_per_s"]
    assert compute["rows"] in [point["rows"] for point in printed["prefill"]]


def test_errors_have_their_own_exit_codes(folder: Path, capsys: Any) -> None:
    assert run(folder, "--first", "0", "--last", "9") == 2
    assert "has layers 1-3" in capsys.readouterr().err
    assert run(folder / "nowhere", "--first", "0", "--last", "1") == 5


def test_running_out_of_memory_is_said(
    folder: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(bench.Stage, "load_layers", load)
    assert run(folder, "--first", "0", "--last", "3") == 1
    assert "doesn't fit the memory of cpu: CUDA out of memory" in capsys.readouterr().err
