"""The self-test's subprocess and its stored result."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from molinkd.peer.agent import kernel_self_test as module
from molinkd.peer.agent.kernel_self_test import (
    KernelResult,
    SelfTestResult,
    load_disabled_kernels,
    run_self_test,
    save_disabled_kernels,
)

WHERE = {"device": "cpu", "name": "a CPU"}


def command(*lines: str) -> tuple[str, ...]:
    """A fake self-test process; ``skip`` is the kernels that it is told to leave out."""
    begin = "import json, os, sys; skip = sys.argv[-1].split(','); say = lambda **one: "
    return (sys.executable, "-c", "\n".join([f"{begin}print(json.dumps(one), flush=True)", *lines]))


def tried(kernel: str, state: str = "ok", **more: Any) -> str:
    named = {"kernel": kernel, "dtype": "f32"}
    return f"say(begin={named}); say(result={ {**named, 'state': state, **more} })"


def test_results_are_read() -> None:
    about = {"torch": "2.13", "cuda": "13.0", "gpus": [{"name": "RTX", "capability": "8.6"}]}
    found = run_self_test(
        "auto",
        1,
        command(
            f"say(about={about}); say(**{WHERE})",
            tried("torch", error=1e-7, tolerance=1e-5),
            tried("int8", "wrong", reason="it gives NaN"),
            tried("nf4", "absent"),
        ),
    )
    assert found.about is not None
    assert (found.about.cuda, found.about.gpus[0].name) == ("13.0", "RTX")
    assert (found.device, found.name, found.failure) == ("cpu", "a CPU", "")
    assert [one.state for one in found.results] == ["ok", "wrong", "absent"]
    assert found.disabled_kernels == ("int8",)


def test_a_crashing_kernel_has_failed_and_the_others_are_tested() -> None:
    found = run_self_test(
        "auto",
        1,
        command(
            f"say(**{WHERE})",
            tried("torch"),
            "if 'compiled-rows' not in skip:",
            "    say(begin={'kernel': 'compiled-rows', 'dtype': 'bf16'}); os._exit(139)",
            tried("int8"),
        ),
    )
    assert found.failed_kernels == ("compiled-rows",)
    assert "exit code 139" in found.results[0].reason
    assert [one.kernel for one in found.results] == ["compiled-rows", "torch", "int8"]
    assert found.failure == ""


def test_a_hanging_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_TIMEOUT_S", 2.0)
    hang = "if 'nf4' not in skip: say(begin={'kernel': 'nf4', 'dtype': 'f32'}); sys.stdin.read()"
    wait = "if 'nf4' not in skip: import threading; threading.Event().wait()"
    found = run_self_test("auto", 1, command(f"say(**{WHERE})", hang, wait))
    assert found.failed_kernels == ("nf4",)
    assert "no result within" in found.results[0].reason


@pytest.mark.parametrize(
    ("lines", "text"),
    [
        (["raise ImportError('no torch here')"], "no torch here"),
        (["print('hello')"], "can't run the self-test"),
        (["os._exit(3)"], "exit code 3"),
    ],
)
def test_invalid_output(lines: list[str], text: str) -> None:
    found = run_self_test("auto", 1, command(*lines))
    assert text in found.failure
    assert found.results == ()


def test_a_missing_command(tmp_path: Path) -> None:
    assert "can't run the self-test" in run_self_test("auto", 1, (str(tmp_path / "none"),)).failure


def failing(*kernels: str) -> SelfTestResult:
    results = tuple(KernelResult(kernel=one, dtype="f32", state="wrong") for one in kernels)
    return SelfTestResult(device="cpu", name="a CPU", results=results)


def test_results_are_stored_per_device_and_torch_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "avoid.json"
    assert load_disabled_kernels(path, "a CPU") == ()
    save_disabled_kernels(path, failing("int8", "torch"))
    assert load_disabled_kernels(path, "a CPU") == ("int8",)  # there is no substitute for torch
    assert load_disabled_kernels(path, "another") == ()
    monkeypatch.setattr(module, "torch_version", lambda: "3.0")
    assert load_disabled_kernels(path, "a CPU") == ()
    save_disabled_kernels(path, failing())
    assert not path.exists()
    save_disabled_kernels(path, failing())


@pytest.mark.parametrize("text", ["", "{}", "[1]", json.dumps({"avoid": 3}), "x" * (1 << 17)])
def test_a_damaged_file_is_ignored(tmp_path: Path, text: str) -> None:
    path = tmp_path / "avoid.json"
    path.write_text(text, encoding="utf-8")
    assert load_disabled_kernels(path, "a CPU") == ()
