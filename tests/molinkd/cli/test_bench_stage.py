"""``molink bench stage`` with real small models, each in its own process."""

import contextlib
import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from molinkd.cli import bench
from molinkd.cli.main import run
from molinkd.peer.agent.stage_bench import StageBench, StageBenchResult


@pytest.fixture(scope="module")
def folder(make_model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made: Path = make_model(tmp_path_factory.mktemp("bench") / "tiny")
    return made


def measure(folder: Path, *more: str) -> int:
    given = ["--model", str(folder), "--device", "cpu", "--threads", "1", "--seconds", "0.3"]
    return run(["bench", "stage", *given, *more])


@pytest.fixture(scope="module")
def measured(folder: Path) -> str:
    """The output for two layers, measured once."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert measure(folder, "--layers", "2-3", "--dtype", "f32", "--json") == 0
    return out.getvalue()


def test_json(measured: str) -> None:
    printed = json.loads(measured)
    assert (printed["model"], printed["layers"], printed["threads"]) == ("tiny", [1, 3], 1)
    assert (printed["device"], printed["dtype"], printed["quantize"]) == ("cpu", "f32", "none")
    assert printed["decode"][0]["rows"] == 1
    assert printed["prefill"][0]["rows"] == 8
    for what in ("read", "compute"):
        assert printed[what]["share"] > 0


def test_the_table(
    folder: Path,
    measured: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    orders: list[StageBench] = []

    def measure_stage(order: StageBench) -> StageBenchResult:
        orders.append(order)
        return msgspec.json.decode(measured, type=StageBenchResult)

    monkeypatch.setattr(bench, "measure_stage", measure_stage)
    assert measure(folder) == 0
    assert orders[0].layers == (0, 3)
    out = capsys.readouterr().out
    for text in ("tiny, layers 2-3", "T_d", "T_p", "tokens/s", "GB/s measured", "FLOP/s measured"):
        assert text in out


@pytest.mark.parametrize(
    ("more", "code", "text"),
    [
        (("--layers", "0:2"), 2, "--layers must be A-B, such as 1-12, not '0:2'"),
        (("--layers", "1-9"), 2, "has layers 1-3; 1-9 is out of range"),
        (("--device", "cuda:99"), 2, "torch finds no such GPU"),
        (("--device", "tpu"), 2, "--device must be auto, cpu or cuda:N, not 'tpu'"),
        (("--model", "no-such-model"), 5, "no model 'no-such-model'"),
        (("--threads", "-1"), 2, "threads"),
    ],
)
def test_errors_are_one_clear_line(
    folder: Path, capsys: pytest.CaptureFixture[str], more: tuple[str, str], code: int, text: str
) -> None:
    assert measure(folder, *more) == code
    assert text in capsys.readouterr().err


def test_the_command_line_never_imports_torch() -> None:
    code = "import sys, molinkd.cli.bench; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
