"""A PC joins while streams run: they continue with the same text."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

import molink
from molink.errors import Unavailable
from molink.swarm.agent.pause_policy import DRAINED_REASON
from molink.swarm.membership.versions import own_version
from tests.support.processes import Process, Tools

STREAMS = 3
#: Tokens of a stream; intervals between tokens, over all streams, to wait for.
TOKENS, AGAIN = 60, 60
#: At full speed the stages would leave little CPU time to the PC that joins.
PACED = "tests.support.slow_stages"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


class Load:
    """Streams of one prompt, one after the other, until stopped."""

    def __init__(self, process: Process, tools: type[Tools]) -> None:
        self._client = tools.client(process.found().endpoints[0])
        self._model = next(iter(self._client.models.list())).id
        self._over = threading.Event()
        self.texts: set[str] = set()
        self.errors: list[Exception] = []
        #: Times between two tokens of a stream, in seconds.
        self.pauses: list[float] = []
        self._threads = [threading.Thread(target=self._run) for _ in range(STREAMS)]
        for thread in self._threads:
            thread.start()

    def _run(self) -> None:
        while not self._over.is_set():
            try:
                self.texts.add(self._stream())
            except Exception as error:  # the test shows it
                self.errors.append(error)
                return

    def _stream(self) -> str:
        text, last = "", 0.0
        for chunk in self._client.completions.create(
            model=self._model,
            prompt="Once upon a time",
            max_tokens=TOKENS,
            temperature=0,
            stream=True,
        ):
            now = time.monotonic()
            if last:
                self.pauses.append(now - last)
            text, last = text + chunk.choices[0].text, now
        return text

    def stop(self) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()


def workers(daemon: int) -> list[psutil.Process]:
    """The worker processes of a daemon, standby workers included."""
    children = psutil.Process(daemon).children(recursive=True)
    return [one for one in children if "molinkd.worker" in _command(one)]


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def stages(process: Process) -> int:
    """Number of stages of the ready pipeline; 0 without one."""
    (pipeline,) = process.status()["pipelines"]
    return len(pipeline["stages"]) if pipeline["ready"] else 0


class Duo:
    """A PC that serves alone under load, and one that joins it."""

    def __init__(self, root: Path, tools: type[Tools]) -> None:
        self.root, self._tools = root, tools
        options = [*("--dtype", "f32", "--coordinator-port", "0", "--name", "first")]
        options += ["--min-stages", "2"]
        self.up = tools.Process(root / "up", ["up", *options, *tools.local_options()], PACED)
        self.started = [self.up]
        self.load: Load | None = None

    def begin(self) -> Load:
        """Wait until it serves, and until streams have run."""
        self.up.wait_ready()
        load = self.load = Load(self.up, self._tools)
        self._tools.wait_for(lambda: load.texts or load.errors, self.up)
        return load

    def join(self, *options: str) -> Process:
        token = self._tools.run_molink(self.root / "up", "invite").stdout.strip()
        arguments = ["join", token, "--name", "second", *self._tools.local_options(*options)]
        spare = {"MOLINK_STANDBY_WORKER": "true"}
        process = self._tools.Process(self.root / "two", arguments, PACED, variables=spare)
        self.started.append(process)
        return process

    def again(self, module: str) -> Process:
        """Restart the PC that joined, with another version of molink."""
        arguments = ["join", *self._tools.local_options()]
        process = self._tools.Process(self.root / "two", arguments, module)
        self.started.append(process)
        return process

    def stop(self) -> None:
        if self.load is not None:
            self.load.stop()
        for process in reversed(self.started):
            process.stop()


@pytest.fixture
def duo(tools: type[Tools], tmp_path: Path) -> Iterator[Duo]:
    duo = Duo(tmp_path, tools)
    try:
        yield duo
    finally:
        duo.stop()


@pytest.mark.slow  # the rule itself is tested with a coordinator alone
def test_a_pc_is_updated_under_load(duo: Duo, tools: type[Tools]) -> None:
    load = duo.begin()
    old = duo.join()
    tools.wait_for(lambda: stages(duo.up) == 2 or load.errors, duo.up)
    assert tools.run_molink(duo.root / "two", "drain").returncode == 0
    assert tools.run_molink(duo.root / "two", "down").returncode == 0
    assert old.process.wait(30) == 0, old.output
    # Another version with the same protocol joins the ring.
    new = duo.again("tests.support.newer_version")
    tools.wait_for(lambda: stages(duo.up) == 2 or load.errors, duo.up)
    versions = [one["version"] for one in duo.up.status()["peers"]]
    assert versions == [molink.__version__, "9.9.9"]
    assert "9.9.9" in tools.run_molink(duo.root / "up", "status").stdout
    assert tools.run_molink(duo.root / "two", "drain").returncode == 0
    new.stop()
    # One with another protocol is refused and disturbs nobody.
    other = duo.again("tests.support.newer_protocol")
    both = (str(own_version()), "molink 99.0 (protocol 99)")
    tools.wait_for(lambda: all(one in other.output for one in both), other)
    (second,) = [one for one in duo.up.status()["peers"] if one["name"] == "second"]
    assert (second["state"], second["version"]) == ("refused", "99.0")
    moved = len(load.pauses)
    tools.wait_for(lambda: len(load.pauses) > moved + AGAIN or load.errors, duo.up)
    assert stages(duo.up) == 1
    load.stop()
    assert load.errors == []
    assert len(load.texts) == 1


def test_streams_go_on_while_a_pc_joins(duo: Duo, tools: type[Tools]) -> None:
    load = duo.begin()
    duo.join()
    tools.wait_for(lambda: stages(duo.up) == 2 or load.errors, duo.up)
    moved = len(load.pauses)
    tools.wait_for(lambda: len(load.pauses) > moved + AGAIN or load.errors, duo.up)
    # It is drained again; then no other PC could take the first one's layers.
    drained = tools.run_molink(duo.root / "two", "drain")
    assert drained.returncode == 0, drained.stderr
    assert stages(duo.up) == 1
    (second,) = [one for one in duo.up.status()["peers"] if one["name"] == "second"]
    assert second["paused"] == DRAINED_REASON
    # Its memory is free: neither a worker nor a standby worker is left.
    tools.wait_for(lambda: not workers(second["daemon_pid"]), duo.up)
    alone = tools.run_molink(duo.root / "up", "drain")
    assert alone.returncode == Unavailable.exit_code, alone.stdout
    assert "no PC offers to hold layers" in alone.stderr
    moved = len(load.pauses)
    tools.wait_for(lambda: len(load.pauses) > moved + AGAIN or load.errors, duo.up)
    load.stop()
    assert load.errors == []
    assert len(load.texts) == 1
    print(f"longest pause {max(load.pauses):.2f} s")


# its messages and its exclusion: tests/swarm/controller/test_reconciler.py
@pytest.mark.slow
def test_a_joiner_that_others_cannot_dial_disturbs_nobody(duo: Duo, tools: type[Tools]) -> None:
    load = duo.begin()
    joiner = duo.join("--advertise", "127.0.0.9")  # it listens on 127.0.0.1 alone
    wanted = "first can't connect to second at 127.0.0.9 port "
    tools.wait_for(lambda: wanted in joiner.output or load.errors, joiner)
    (second,) = [one for one in duo.up.status()["peers"] if one["name"] == "second"]
    assert wanted in second["reason"]
    assert "to open the ports, run on" in second["reason"]
    before = len(load.pauses)
    tools.wait_for(lambda: len(load.pauses) > before + AGAIN or load.errors, duo.up)
    assert stages(duo.up) == 1
    load.stop()
    assert load.errors == []
    assert len(load.texts) == 1
    (pipeline,) = duo.up.status()["pipelines"]
    assert pipeline["id"] == "p1"
