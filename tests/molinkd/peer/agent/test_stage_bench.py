"""The stage benchmark's subprocess."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from molink.errors import MolinkError, UsageError, WorkerError
from molinkd.peer.agent.stage_bench import StageBench, measure_stage

RESULT = {
    "layers": [0, 3],
    "device": "cpu",
    "device_name": "a CPU",
    "threads": 2,
    "torch": "2",
    "dtype": "f32",
    "quantize": "none",
    "weight_bytes": 1000,
    "decode": [{"rows": 1, "seconds": 0.5, "tokens_per_s": 2.0}],
    "prefill": [{"rows": 16, "seconds": 0.5, "tokens_per_s": 32.0}],
    "context": 128,
    "tile": 1,
    "read": {"bytes": 100, "bytes_per_s": 200.0, "peak_bytes_per_s": 400.0, "share": 0.5},
    "compute": {
        "rows": 16,
        "flops": 100,
        "flops_per_s": 200.0,
        "peak_flops_per_s": 400.0,
        "share": 0.5,
    },
}
ORDER = StageBench(Path("model"), (0, 3), device="cpu", threads=2, seconds=1.5)


def command(code: str) -> tuple[str, ...]:
    return (sys.executable, "-c", code)


def test_options_and_result_are_passed() -> None:
    code = f"import sys; assert sys.argv[1:] == {ORDER.build_arguments()!r}; print('noise')\n"
    found = measure_stage(ORDER, command(f"{code}print({json.dumps(RESULT)!r})"))
    assert (found.layers, found.threads, found.read.share) == ((0, 3), 2, 0.5)
    assert found.decode[0].tokens_per_s == 2.0
    assert ORDER.build_arguments()[:6] == ["--model-dir", "model", "--first", "0", "--last", "3"]


@pytest.mark.parametrize(
    ("code", "kind", "text"),
    [
        ("raise RuntimeError('no luck')", WorkerError, "no luck"),
        ("print('hello')", WorkerError, "invalid"),
        ("pass", WorkerError, "invalid"),
        ("print('{}')", WorkerError, "invalid"),
        ("import sys; sys.exit(9)", WorkerError, "no message, exit code 9"),
        ("import sys; print('bad', file=sys.stderr); sys.exit(2)", UsageError, "^bad$"),
        (
            "import sys; print('there is no device cuda:0: this torch sees no such GPU', "
            "file=sys.stderr); sys.exit(2)",
            UsageError,
            "molink setup --cuda",
        ),
    ],
)
def test_failures_quote_the_reason(code: str, kind: type[MolinkError], text: str) -> None:
    with pytest.raises(kind, match=text):
        measure_stage(ORDER, command(code))


def test_a_process_that_cannot_be_started(tmp_path: Path) -> None:
    with pytest.raises(WorkerError, match="can't measure the stage"):
        measure_stage(ORDER, (str(tmp_path / "nothing"),))


def test_ctrl_c_is_checked_between_short_waits(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    waits: list[float] = []
    enough = tmp_path / "enough"
    communicate = subprocess.Popen.communicate

    def watched(process: Any, *, timeout: float) -> Any:
        waits.append(timeout)
        if len(waits) == 3:
            enough.touch()
        return communicate(process, timeout=timeout)

    monkeypatch.setattr("molinkd.peer.agent.stage_bench._WAIT_S", 0.01)
    monkeypatch.setattr("subprocess.Popen.communicate", watched)
    code = (
        "import os, time; print('noise')\n"
        f"while not os.path.exists({str(enough)!r}): time.sleep(0.01)\n"
        f"print({json.dumps(RESULT)!r})"
    )
    assert measure_stage(ORDER, command(code)).device == RESULT["device"]
    assert len(waits) >= 3
    assert max(waits) == 0.01


def test_a_hanging_benchmark_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("molinkd.peer.agent.stage_bench._WAIT_S", 0.01)
    monkeypatch.setattr("molinkd.peer.agent.stage_bench._TIMEOUT_S", 0.05)
    with pytest.raises(WorkerError, match="no result in"):
        measure_stage(ORDER, command("import time; time.sleep(600)"))


def test_ctrl_c_kills_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Any] = []

    def communicate(process: Any, **_: Any) -> Any:
        started.append(process)
        raise KeyboardInterrupt

    monkeypatch.setattr("subprocess.Popen.communicate", communicate)
    with pytest.raises(KeyboardInterrupt):
        measure_stage(ORDER, command("import time; time.sleep(600)"))
    assert started[0].poll() is not None
