"""Swarms of real processes with separate state folders and ports."""

import atexit
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import types
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import httpx
import openai
import psutil

import molink
import molinkd
from molink.cpu_isa import AVX2_ONLY
from molink.errors import Unavailable
from molinkd.cli import daemon_client as local_daemon
from molinkd.peer.home import Home, copy_measurements, read_run_file

ROOT = Path(molink.__file__).parents[1]
#: Folders of both packages, installed or not.
ROOTS = (ROOT, Path(molinkd.__file__).parents[1])
#: Timeout of started processes, in seconds; longer where they start slowly, as under Wine.
START_S = float(os.environ.get("PATIENCE_S", "100"))
#: Timeout of commands, which may compute for long (`molink doctor`), in seconds.
COMMAND_S = 2.4 * START_S
#: Id of this test run, the same in all its processes.
_RUN = os.environ.get("PYTEST_XDIST_TESTRUNUID", f"{os.getpid()}")
#: Measurements of this PC by processes that have ended.
_MEASURED = Path(tempfile.gettempdir()) / f"molink-measured-{_RUN}"
atexit.register(shutil.rmtree, _MEASURED, ignore_errors=True)


class Process:
    """A ``molink`` process, its output, and its descendants."""

    def __init__(
        self,
        home: Path,
        arguments: Sequence[str],
        module: str = "molinkd",
        variables: Mapping[str, str] = types.MappingProxyType({}),
    ) -> None:
        """``module`` replaces ``molink``; ``variables`` are added to its environment."""
        home.mkdir(parents=True, exist_ok=True)
        self.home = Home(home)
        restore_measurements(self.home)
        self._output = (home / "terminal.log").open("ab+")
        flags = getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0)
        self.process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            env={**environment(home), **variables},
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            creationflags=flags,
        )

    @property
    def output(self) -> str:
        """Its output so far."""
        return (self.home.root / "terminal.log").read_text(encoding="utf-8", errors="replace")

    def family(self) -> list[psutil.Process]:
        """The process and all its descendants."""
        try:
            me = psutil.Process(self.process.pid)
            return [me, *me.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def found(self) -> local_daemon.RunningDaemon:
        """Its daemon (that of the demo's first peer) once it can be found."""
        wait_for(lambda: local_daemon.find_daemon(self.home), self)
        found = local_daemon.find_daemon(self.home)
        assert found is not None
        return found

    def status(self) -> dict[str, Any]:
        """``molink status --json``; a daemon that is too busy to answer is asked again."""
        status: dict[str, Any] = {}

        def is_told() -> bool:
            status.update(local_daemon.fetch_status(self.found()))
            return True

        wait_for(is_told, self)
        return status

    def wait_ready(self) -> dict[str, Any]:
        """Wait until its pipeline is ready; returns the status."""
        status: dict[str, Any] = {}

        def ready() -> bool:
            status.update(self.status())
            return any(pipeline["ready"] for pipeline in status["pipelines"])

        wait_for(ready, self)
        return status

    def stop(self) -> None:
        """Stop it by Ctrl-C, and check that no descendant is left."""
        family = self.family()
        if self.process.poll() is None:
            self.process.send_signal(
                signal.CTRL_BREAK_EVENT if sys.platform == "win32" else signal.SIGTERM
            )
        try:
            self.process.wait(START_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise AssertionError(f"it did not end: {self.output}") from None
        finally:
            left = still_running(family)
            for process in left:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            self._output.close()
        save_measurements(self.home)
        assert not left, f"left behind: {left}"


def restore_measurements(home: Home) -> None:
    """Have a process in ``home`` start as where molink has run before: seconds of compute less.

    That a PC measures itself when it has not: ``molink demo --ask`` (:func:`run_molink`).
    """
    for kind, one in (("pc", home), ("demo", home.demo_home(1))):
        if not one.device.exists():
            copy_measurements(Home(_MEASURED / kind), one)


def save_measurements(home: Home) -> None:
    """Keep the measurements in ``home`` for :func:`restore_measurements`."""
    for kind, one in (("pc", home), ("demo", home.demo_home(1))):
        copy_measurements(one, Home(_MEASURED / kind))


def environment(home: Path) -> dict[str, str]:
    """The environment of a molink process: a home, and molink itself if it isn't installed."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("MOLINK_") or k in AVX2_ONLY}
    return {
        **kept,
        "MOLINK_HOME": str(home),
        # Each would import torch while the test runs.
        "MOLINK_STANDBY_WORKER": "false",
        "PYTHONPATH": os.pathsep.join(str(path) for path in ROOTS),
        "PYTHONIOENCODING": "utf-8",
    }


def owner_client(home: Home) -> httpx.Client:
    """A client of the endpoint of a running daemon, with the token of its PC's owner."""
    run_file = read_run_file(home.run_file)
    assert run_file is not None
    headers = {"Authorization": f"Bearer {run_file.owner_token}"}
    return httpx.Client(base_url=run_file.endpoint, headers=headers, timeout=60)


def still_running(
    processes: Sequence[psutil.Process], timeout: float = START_S
) -> list[psutil.Process]:
    """Return those of ``processes`` that still run after at most ``timeout`` seconds."""
    _, left = psutil.wait_procs(processes, timeout=timeout)
    return [p for p in left if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


def wait_for(
    condition: Callable[[], object],
    process: Process,
    timeout: float = START_S,
    every: float = 0.1,
) -> None:
    """Poll ``condition`` at intervals of ``every`` seconds until it holds.
    Fails with the output if ``process`` ends before.

    A daemon that is too busy to answer is asked again.
    """
    deadline = time.monotonic() + timeout
    while not _holds(condition):
        assert process.process.poll() is None, process.output
        assert time.monotonic() < deadline, process.output
        time.sleep(every)


def _holds(condition: Callable[[], object]) -> bool:
    try:
        return bool(condition())
    except Unavailable:
        return False


def run_molink(home: Path, *arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """Run a command and wait for its exit."""
    return subprocess.run(
        [sys.executable, "-m", "molinkd", *arguments],
        env=environment(home),
        input=stdin,
        capture_output=True,
        encoding="utf-8",
        timeout=COMMAND_S,
        check=False,
    )


def local_options(*more: str) -> list[str]:
    """Options of ``up`` and ``join`` for loopback and any free ports."""
    options = ["--host", "127.0.0.1", "--control-port", "0", "--worker-ports", "0-0"]
    return [*options, "--api-port", "0", "--threads", "1", "--device", "cpu", *more]


class Tools:
    """The helpers of this module, as one fixture."""

    #: Clients that tests have made: an open one that is garbage collected warns in another test.
    _clients: ClassVar[list[openai.OpenAI]] = []
    Process = Process
    run_molink = staticmethod(run_molink)
    local_options = staticmethod(local_options)
    wait_for = staticmethod(wait_for)
    alive = staticmethod(still_running)

    @classmethod
    def client(cls, endpoint: str) -> openai.OpenAI:
        """The official client for an endpoint's root."""
        url = f"{endpoint}/v1"
        made = openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=START_S)
        cls._clients.append(made)
        return made

    @classmethod
    def close_clients(cls) -> None:
        """Close the clients that :meth:`client` has created."""
        while cls._clients:
            cls._clients.pop().close()

    @staticmethod
    @contextlib.contextmanager
    def two_pcs(
        root: Path, model: Path, options: Sequence[str], variables: Mapping[str, str]
    ) -> Iterator[Process]:
        """Two daemons of one swarm that share a model's layers, in fp32; the first of them."""
        common = local_options(*options)
        up = ["up", "--model", str(model), "--dtype", "f32", "--min-peers", "2", *common]
        with contextlib.ExitStack() as running:
            first = Process(root / "first", up, variables=variables)
            running.callback(first.stop)
            wait_for(lambda: first.home.membership.exists(), first)
            token = run_molink(root / "first", "invite").stdout.strip()
            second = Process(root / "second", ["join", token, *common], variables=variables)
            running.callback(second.stop)
            first.wait_ready()
            yield first

    @staticmethod
    def metrics(endpoint: str, key: str = "none") -> dict[str, float]:
        """``/metrics`` by name without labels; of several samples the last."""
        asked = urllib.request.Request(
            f"{endpoint}/metrics", headers={"Authorization": f"Bearer {key}"}
        )
        with urllib.request.urlopen(asked, timeout=START_S) as answer:
            lines = answer.read().decode("utf-8").splitlines()
        pairs = (line.rpartition(" ")[::2] for line in lines if not line.startswith("#"))
        return {name.partition("{")[0]: float(value) for name, value in pairs}
