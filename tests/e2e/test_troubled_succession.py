"""The leader's PC dies while others are in trouble: PCs ask to join, or a disk is full."""

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from molink.errors import PeerBanned
from molink.wire.messages.membership import AdmissionEntry
from molinkd.coordinator.replica_file import read_replica
from tests.e2e.test_pairing import shown_code
from tests.support import wrong_clock
from tests.support.local_swarm import LocalSwarm
from tests.support.processes import Process, Tools, environment

#: Codes that a PC has shown, earlier runs included.
_CODES = re.compile(r"^    (\d{4}-\d{4})$", re.MULTILINE)
AGAIN = "run `molink join` again"


class Swarm(LocalSwarm):
    """PCs that pair at any free port. Some have stages of the bundled model."""

    def __init__(self, root: Path, tools: type[Tools], serving: str, **variables: str) -> None:
        """``serving`` is the one that has all layers; empty: nobody.

        ``variables`` are of the first one's environment.
        """
        self._serving, self._variables = serving, variables
        super().__init__(root, tools)

    def up(self) -> None:
        self._prepare("first")
        options = self.tools.local_options("--coordinator-port", "0", *self._stage("first"))
        start = ["up", "--dtype", "f32", "--name", "first", *options]
        home = self.root / "first"
        self.running["first"] = self.tools.Process(home, start, variables=self._variables)

    def join(self, name: str, token: str, *more: str, **variables: str) -> None:
        self._prepare(name)
        super().join(name, token, *more, *self._stage(name), **variables)

    def _stage(self, name: str) -> tuple[str, str]:
        return "--stage", "auto" if name == self._serving else "none"

    def _prepare(self, name: str) -> None:
        (self.root / name).mkdir(exist_ok=True)
        (self.root / name / "config.toml").write_text("pairing_port = 0\n", encoding="utf-8")

    def request_pairing(self, name: str, at: str) -> Process:
        """A PC asks to join at that PC, which leads."""
        self._prepare(name)
        port = self.status(at)["pairing_port"]
        options = self.tools.local_options("--coordinator-port", "0", "--stage", "none")
        start = ["join", f"127.0.0.1:{port}", "--name", name, *options]
        process = self.running[name] = self.tools.Process(self.root / name, start)
        return process

    def names(self, name: str) -> list[str]:
        """Names of all members by a PC's status."""
        return sorted(peer["name"] for peer in self.status(name).get("peers", ()))

    def leader(self, name: str) -> str:
        """The leader's name by a PC's status; empty while it hears none."""
        status = self.status(name)
        names = {peer["id"]: peer["name"] for peer in status.get("peers", ())}
        running = status.get("coordinator", {}).get("state") == "running"
        return names.get(status["leader"], "") if running else ""

    def stream(self, name: str) -> Iterator[str]:
        """Pieces of one long answer of that PC's endpoint."""
        client = self.tools.client(self.running[name].found().endpoints[0])
        chunks = client.chat.completions.create(
            model="molink-demo",
            messages=[{"role": "user", "content": "Who leads?"}],
            temperature=0,
            max_tokens=60,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        yield from (chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)

    def wait_for(self, name: str, *, led_by: str, names: list[str]) -> None:
        """Until a PC has this leader and these members."""

        def holds() -> bool:
            return self.leader(name) == led_by and self.names(name) == sorted(names)

        self.tools.wait_for(holds, self.running[name])


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


# deterministic: tests/molinkd/coordinator/test_coordinator.py
@pytest.mark.slow
@pytest.mark.timeout(500)
def test_pcs_ask_to_join_while_the_leader_changes(
    tmp_path: Path, tools: type[Tools], stack: ExitStack
) -> None:
    """Each is admitted or asked to retry; none twice, and none without an approval."""
    swarm = Swarm(tmp_path, tools, "")
    stack.callback(swarm.stop)
    members = ["first", "second", "third"]
    for one in members:
        swarm.wait_for(one, led_by="first", names=members)
    codes = {}
    for name in ("early", "midway", "never"):
        codes[name] = shown_code(swarm.request_pairing(name, "first"), tools)
    assert swarm.molink("third", "approve", codes["early"]) == '"early" joined.'
    swarm.wait_for("early", led_by="first", names=[*members, "early"])
    with ThreadPoolExecutor(1) as pool:
        # It may fail: the leader dies.
        home = swarm.root / "third"
        approved = pool.submit(tools.run_molink, home, "approve", codes["midway"])
        swarm.kill("first")
        approved.result()
    # No approval given at another leader admits it.
    never = swarm.running["never"]
    assert never.process.wait(60) != 0
    assert AGAIN in never.output
    swarm.running.pop("never").stop()
    tools.wait_for(lambda: swarm.leader("third") not in ("", "first"), swarm.running["third"])
    leader = swarm.leader("third")
    refused = tools.run_molink(swarm.root / "third", "approve", codes["never"])
    assert refused.returncode != 0, refused.stdout
    assert "never" not in swarm.names("third")
    midway = swarm.running["midway"]

    def is_decided() -> bool:
        return midway.process.poll() is not None or swarm.leader("midway") == leader

    tools.wait_for(is_decided, swarm.running["third"])
    again = ["never"]
    if midway.process.poll() is not None:
        assert AGAIN in midway.output
        again.append("midway")
        swarm.running.pop("midway").stop()
    for name in again:
        process = swarm.request_pairing(name, leader)
        tools.wait_for(lambda process=process: len(_CODES.findall(process.output)) == 2, process)
        code = _CODES.findall(process.output)[-1]
        assert swarm.molink("third", "approve", code) == f'"{name}" joined.'
    everybody = [*members, "early", "midway", "never"]
    for one in swarm.running:
        swarm.wait_for(one, led_by=leader, names=everybody)
    held = read_replica(swarm.running["third"].home.replica)
    assert held is not None
    entries = [one.decode() for one in held.log.entries]
    admitted = [one.verify_key for one in entries if isinstance(one, AdmissionEntry)]
    assert len(admitted) == len(set(admitted)) == 3


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of one megabyte, for what the second PC's coordinator stores."""
    if sys.platform != "linux" or os.geteuid() != 0:
        pytest.skip("only root may mount a small disk")
    disk = tmp_path / "second" / "coordinator"
    disk.mkdir(parents=True)
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m,mode=700", "molink-test", str(disk)],
        check=False,
        capture_output=True,
        text=True,
    )
    if mounted.returncode:
        pytest.skip(f"no small disk here: {mounted.stderr}")
    yield disk
    subprocess.run(["umount", "--lazy", str(disk)], check=True)


def fill_disk(disk: Path) -> Path:
    """Leave no room on a disk; returns the file that takes it."""
    filler = disk / "filler"
    with filler.open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(4096))
    assert shutil.disk_usage(disk).free == 0
    return filler


# deterministic: tests/molinkd/coordinator/test_state_store.py
@pytest.mark.slow
@pytest.mark.timeout(500)
def test_the_disk_of_the_next_leader_is_full(
    small_disk: Path, tmp_path: Path, tools: type[Tools], stack: ExitStack
) -> None:
    """Another one leads, the error is shown, and nothing is lost once there is room again."""
    swarm = Swarm(tmp_path, tools, "third")
    stack.callback(swarm.stop)
    members = ["first", "second", "third"]
    for one in members:
        swarm.wait_for(one, led_by="first", names=members)
    third = swarm.running["third"]
    third.wait_ready()
    expected, term = "".join(swarm.stream("third")), swarm.status("third")["term"]
    filler = fill_disk(small_disk)
    pieces = []
    for piece in swarm.stream("third"):
        pieces.append(piece)
        if len(pieces) == 5:
            swarm.kill("first")
    assert "".join(pieces) == expected
    swarm.wait_for("third", led_by="third", names=members)
    led = swarm.status("third")["term"]
    assert led > term
    second = swarm.running["second"]
    tools.wait_for(lambda: "Is the disk full" in second.output, second)
    swarm.wait_for("second", led_by="third", names=members)
    # The PC with the full disk follows the other, and leads when it can.
    swarm.join("fourth", swarm.molink("third", "invite"))
    everybody = [*members, "fourth"]
    swarm.wait_for("second", led_by="third", names=everybody)
    filler.unlink()
    for one in ("fourth", "third"):
        swarm.kill(one)
    swarm.wait_for("second", led_by="second", names=everybody)
    assert swarm.status("second")["term"] > led
    assert swarm.molink("second", "invite").startswith("molink-")


class WrongClock:
    """The wall clock of a PC, which jumps."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "offset"
        self.jump(0)
        path = Path(wrong_clock.__path__[0])
        self.variables = {
            "WALL_CLOCK_OFFSET": str(self._file),
            "PYTHONPATH": os.pathsep.join((str(path), environment(folder)["PYTHONPATH"])),
        }

    def jump(self, seconds: float) -> None:
        """Set it ahead of the real clock, in seconds."""
        draft = self._file.with_suffix(".new")
        draft.write_text(str(seconds), encoding="ascii")
        draft.replace(self._file)


DAY = 86400.0


# deterministic: tests/molinkd/coordinator/test_coordinator.py
@pytest.mark.slow
@pytest.mark.timeout(500)
def test_the_leaders_clock_jumps_by_a_day(
    tmp_path: Path, tools: type[Tools], stack: ExitStack
) -> None:
    """Only invitations with a lifetime expire; leader and members stay."""
    clock = WrongClock(tmp_path)
    swarm = Swarm(tmp_path, tools, "third", **clock.variables)
    stack.callback(swarm.stop)
    members = ["first", "second", "third"]
    for one in members:
        swarm.wait_for(one, led_by="first", names=members)
    swarm.running["third"].wait_ready()
    expected, term = "".join(swarm.stream("third")), swarm.status("third")["term"]
    token = swarm.molink("second", "invite", "--ttl", "2")
    for seconds in (DAY, -DAY, 0.0, -DAY):
        clock.jump(seconds)
        tools.wait_for(
            lambda seconds=seconds: abs(swarm.status("first")["time"] - time.time() - seconds) < 60,
            swarm.running["first"],
        )
        assert "".join(swarm.stream("third")) == expected
        for one in members:
            swarm.wait_for(one, led_by="first", names=members)
        # An invitation that has expired once stays expired.
        late = tools.run_molink(tmp_path / "late", "join", token, *tools.local_options())
        assert late.returncode != 0
        assert "late" not in swarm.names("first")
    assert swarm.status("third")["term"] == term
    # An invitation's expiry is set by the clock of the PC that creates it.
    swarm.join("fourth", swarm.molink("third", "invite"))
    swarm.wait_for("first", led_by="first", names=[*members, "fourth"])
    swarm.molink("first", "revoke", "fourth", "--yes")
    assert swarm.running["fourth"].process.wait(60) == PeerBanned.exit_code
    swarm.running.pop("fourth").stop()
    clock.jump(DAY)
    swarm.kill("first")
    swarm.wait_for("third", led_by="second", names=members)
    assert "".join(swarm.stream("third")) == expected
