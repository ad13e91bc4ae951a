"""Servers under measurement as processes."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

START_S = 300.0
#: Endpoint port, and the line in the output of `molink up` that reports an open swarm.
ENDPOINT = re.compile(r"http://127\.0\.0\.1:(\d+)")
OPENED = re.compile(r"(To add a PC)")
INVITE = (sys.executable, "-m", "molinkd", "invite", "--uses", "255")


@contextlib.contextmanager
def run_process(
    command: Sequence[str], log: Path, environment: Mapping[str, str]
) -> Iterator["subprocess.Popen[bytes]"]:
    """Run a process with output in ``log``; stop it at the end."""
    flags = getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0)
    with log.open("ab") as output:
        process = subprocess.Popen(
            command,
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            creationflags=flags,
        )
        try:
            yield process
        finally:
            stop = getattr(signal, "CTRL_BREAK_EVENT", signal.SIGTERM)
            process.send_signal(stop)
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@contextlib.contextmanager
def molink_swarm(
    model: Path,
    stages: int,
    *options: str,
    threads: int = 1,
    settings: Mapping[str, str] | None = None,
) -> Iterator[str]:
    """Run ``stages`` daemons with ``threads`` each; yields the first one's URL.

    ``settings`` (``MOLINK_*``) apply to all, ``options`` to the first.
    """
    common = ["--host", "127.0.0.1", "--control-port", "0", "--worker-ports", "0-0", "--port", "0"]
    common += ["--threads", str(threads)]
    with contextlib.ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        first = [sys.executable, "-m", "molinkd", "up", "--model", str(model), *common, *options]
        first += ["--coordinator-port", "0", "--min-peers", str(stages)]
        url = token = ""
        for index in range(stages):
            home, log = root / str(index), root / f"{index}.log"
            command = first if index == 0 else [sys.executable, "-m", "molinkd", "join", token]
            own = {**(settings or {}), "MOLINK_HOME": str(home)}
            process = stack.enter_context(run_process(command + common * (index > 0), log, own))
            if index == 0:
                url = f"http://127.0.0.1:{wait_for(log, ENDPOINT, process)}"
                wait_for(log, OPENED, process)
                token = subprocess.check_output(INVITE, env={**os.environ, **own}, text=True)
        _wait_ready(f"{url}/readyz", process)
        yield url


def wait_for(log: Path, pattern: "re.Pattern[str]", process: "subprocess.Popen[Any]") -> str:
    """Wait for ``pattern`` in a log and return its group, or raise :class:`RuntimeError`."""
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and process.poll() is None:
        found = pattern.search(log.read_text("utf-8", "replace"))
        if found is not None:
            return found[1]
        time.sleep(0.1)
    raise RuntimeError(f"no {pattern.pattern!r} in: {log.read_text('utf-8', 'replace')}")


def _wait_ready(url: str, process: "subprocess.Popen[bytes]") -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=5) as answer:
            if answer.status == 200:
                return
        time.sleep(0.2)
    raise RuntimeError(f"{url} was not ready within {START_S:.0f} s")
