"""Inhibiting sleep."""

import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from molinkd.peer.agent.sleep_inhibitor import SleepInhibitor


@pytest.mark.skipif(sys.platform == "win32", reason="Windows is told by a call, not by a process")
def test_the_lock_is_held_while_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cat = shutil.which("cat")
    assert cat is not None
    inhibit = tmp_path / "systemd-inhibit"
    inhibit.write_text('#!/bin/sh\nshift 4\nexec "$@"\n', encoding="utf-8")
    inhibit.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")

    def model_files() -> int:
        return len(psutil.Process().children())

    before = model_files()
    awake = SleepInhibitor()
    awake.inhibit_sleep(False)
    assert model_files() == before
    for _ in range(2):
        awake.inhibit_sleep(True)
        assert model_files() == before + 1
    awake.inhibit_sleep(False)
    assert model_files() == before
    awake.inhibit_sleep(True)
    awake.close()
    assert model_files() == before


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has systemd-inhibit")
def test_an_inhibitor_that_fails_is_reaped_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It leaves no zombie until sleep is allowed again."""
    inhibit = tmp_path / "systemd-inhibit"
    inhibit.write_text("#!/bin/sh\nexit 3\n", encoding="utf-8")
    inhibit.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    before = psutil.Process().children()
    awake = SleepInhibitor()
    with caplog.at_level("INFO"):
        awake.inhibit_sleep(True)
        until = time.monotonic() + 30
        while psutil.Process().children() != before:  # zombies are listed
            assert time.monotonic() < until, "a zombie is left"
            time.sleep(0.01)
        awake.close()
    assert "systemd-inhibit ended with status 3" in caplog.text


def test_without_the_command_no_process_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Any] = []
    monkeypatch.setattr(subprocess, "Popen", lambda *given, **_: started.append(given))
    monkeypatch.setattr(shutil, "which", lambda _: None)
    awake = SleepInhibitor()
    for needed in (True, False, True):
        awake.inhibit_sleep(needed)
    awake.close()
    assert started == []


@pytest.mark.skipif(sys.platform == "win32", reason="Windows is told by a call, not by a process")
def test_a_command_that_fails_is_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: str(tmp_path / "nothing"))
    awake = SleepInhibitor()
    with caplog.at_level("INFO"):
        awake.inhibit_sleep(True)
    assert "can't inhibit sleep" in caplog.text
    awake.close()
