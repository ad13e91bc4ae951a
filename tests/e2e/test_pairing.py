"""PCs that join without a token: real processes, and a person who compares codes."""

import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from molinkd.peer.home import Home
from tests.support.processes import (
    START_S,
    Process,
    Tools,
    environment,
    owner_client,
    restore_measurements,
)
from tools.wan import VethPair, unavailable

CPU = ["--threads", "1", "--device", "cpu"]
_CODE = re.compile(r"^    (\d{4}-\d{4})$", re.MULTILINE)


def shown_code(process: Process, tools: type[Tools]) -> str:
    """The code that a joining PC shows."""
    tools.wait_for(lambda: _CODE.search(process.output), process)
    match = _CODE.search(process.output)
    assert match is not None
    return match[1]


class Loopback:
    """A swarm on this PC; other PCs ask to join at an address that is typed."""

    def __init__(self, root: Path, tools: type[Tools]) -> None:
        self.root, self.tools = root, tools
        self.first = root / "first"
        self.first.mkdir()
        (self.first / "config.toml").write_text("pairing_port = 0\n", encoding="utf-8")
        self.options = tools.local_options("--stage", "none", "--coordinator-port", "0")
        self.up = tools.Process(self.first, ["up", "--name", "first", *self.options])
        self.started = [self.up]
        self.where = ""

    def open(self) -> None:
        found = self.up.found()
        self.tools.wait_for(lambda: found.home.membership.exists(), self.up)
        self.tools.wait_for(lambda: self.up.status().get("pairing_port"), self.up)
        self.where = f"localhost:{self.up.status()['pairing_port']}"

    def join(self, name: str, home: str = "") -> Process:
        joining = ["join", self.where, "--name", name, *self.options]
        process = self.tools.Process(self.root / (home or name), joining)
        self.started.append(process)
        return process

    def names(self) -> list[str]:
        return [peer["name"] for peer in self.up.status()["peers"]]


@pytest.fixture(scope="module")
def loopback(tmp_path_factory: pytest.TempPathFactory, tools: type[Tools]) -> Iterator[Loopback]:
    swarm = Loopback(tmp_path_factory.mktemp("pairing"), tools)
    try:
        swarm.open()
        yield swarm
    finally:
        for process in reversed(swarm.started):
            process.stop()


def test_a_pc_is_let_in_by_its_code(loopback: Loopback, tools: type[Tools]) -> None:
    second = loopback.join("second")
    code = shown_code(second, tools)
    assert "asks to join swarm first" in second.output
    (request,) = loopback.up.status()["pairing_requests"]
    assert (request["name"], request["code"], request["address"]) == ("second", code, "127.0.0.1")
    tools.wait_for(lambda: f"molink approve {code}" in loopback.up.output, loopback.up)
    assert code in tools.run_molink(loopback.first, "approve").stdout
    done = tools.run_molink(loopback.first, "approve", code)
    assert (done.returncode, done.stdout) == (0, '"second" joined.\n'), done.stderr
    second.found()
    tools.wait_for(lambda: "second" in loopback.names(), second)
    assert loopback.up.status()["pairing_requests"] == []
    assert "second" in tools.run_molink(loopback.first, "invite", "--list").stdout


def test_a_doctor_beside_a_daemon(loopback: Loopback, tools: type[Tools]) -> None:
    """It reads the swarm from the daemon, and tests the kernels of this PC's device."""
    done = tools.run_molink(loopback.root / "second", "doctor", "--json")
    found = {one["check"]: one for one in json.loads(done.stdout)["checks"]}
    for check in ("torch", "kernels", "ports", "firewall", "version"):
        assert found[check]["level"] == "ok", done.stdout
    assert "molink runs (process" in found["daemon"]["text"]
    assert "s of first" in found["clock"]["text"]
    assert "like all 2 PCs of the swarm" in found["version"]["text"]
    assert done.returncode == any(one["level"] == "problem" for one in found.values())


def test_a_copied_state_folder(loopback: Loopback, tools: type[Tools]) -> None:
    """The PC that joined first stays; the other one gets an error and exits."""
    second, copy = loopback.root / "second", loopback.root / "copy"
    copy.mkdir()
    for name in ("peer.key", "swarm.json"):
        shutil.copyfile(second / name, copy / name)
    twin = tools.Process(copy, ["join", "--name", "copy", *loopback.options])
    loopback.started.append(twin)
    assert twin.process.wait(START_S) == 2, twin.output
    assert "is a copy of that PC's" in twin.output
    # A PC that forgets the swarm, but not its key, is refused before anybody is asked.
    (copy / "swarm.json").unlink()
    done = tools.run_molink(copy, "join", loopback.where, *loopback.options)
    assert (done.returncode, "peer.key" in done.stderr) == (2, True), done.stderr

    def is_online() -> bool:
        states = {peer["name"]: peer["state"] for peer in loopback.up.status()["peers"]}
        return bool(states["second"] == "online")

    tools.wait_for(is_online, loopback.up)


def test_refused_or_given_up(loopback: Loopback, tools: type[Tools]) -> None:
    third = loopback.join("third")
    done = tools.run_molink(loopback.first, "approve", shown_code(third, tools), "--refuse")
    assert done.stdout == '"third" was rejected.\n', done.stderr
    assert third.process.wait(START_S) == 10
    assert "the swarm refused this PC" in third.output
    if sys.platform == "win32":
        pytest.skip("a console of its own takes no Ctrl-C")
    fourth = loopback.join("fourth")
    code = shown_code(fourth, tools)
    fourth.process.send_signal(signal.SIGINT)
    assert fourth.process.wait(START_S) == 130
    assert "Traceback" not in fourth.output
    tools.wait_for(lambda: not loopback.up.status()["pairing_requests"], loopback.up)
    done = tools.run_molink(loopback.first, "approve", code)
    assert (done.returncode, "no waiting PC has code" in done.stderr) == (14, True)
    assert not {"third", "fourth"} & set(loopback.names())


def test_a_hostile_pc_at_the_pairing_listener(loopback: Loopback, tools: type[Tools]) -> None:
    """Noise, oversized and partial messages, on more connections than one address may have."""
    process = psutil.Process(loopback.up.status()["coordinator"]["pid"])
    before, chance = process.memory_info().rss, random.Random(1)
    attacks = [
        b"",
        b"\x04\x00half",
        b"\xff\xff" + bytes(1 << 18),
        b"\x04\x00" + chance.randbytes(1024),
        chance.randbytes(1 << 16),
    ]
    port = int(loopback.where.rpartition(":")[2])
    with ExitStack() as stack:
        for number in range(200):
            wire = stack.enter_context(socket.socket())
            wire.setblocking(False)
            for attempt in (
                lambda wire=wire: wire.connect(("127.0.0.1", port)),
                lambda wire=wire, data=attacks[number % 5]: wire.send(data),
            ):
                with suppress(OSError):
                    attempt()
        assert loopback.up.status()["pairing_requests"] == [], "members are answered meanwhile"
    assert loopback.up.status()["coordinator"]["pid"] == process.pid
    assert process.memory_info().rss - before < 50 << 20
    fifth = loopback.join("fifth")
    code = shown_code(fifth, tools)
    with owner_client(loopback.up.found().home) as owner:
        (shown,) = owner.get("/swarm").json()["owner"]["pairings"]
        assert (shown["name"], shown["code"]) == ("fifth", code)
        approved = owner.post("/swarm/pairing", json={"code": code, "approve": True})
    assert approved.json() == {"name": "fifth"}
    tools.wait_for(lambda: "fifth" in loopback.names(), fifth)


class Seated(Process):
    """A molink process at one end of a veth pair, with a terminal."""

    def __init__(self, pair: VethPair, index: int, home: Path, *arguments: str) -> None:
        home.mkdir(parents=True, exist_ok=True)
        self.home = Home(home)
        restore_measurements(self.home)
        self._output = (home / "terminal.log").open("ab+")
        self._keyboard, terminal = os.openpty()
        self.process = pair.run(
            index,
            [sys.executable, "-m", "molinkd", *arguments],
            env=environment(home),
            stdin=terminal,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        os.close(terminal)

    def type(self, line: str) -> None:
        os.write(self._keyboard, f"{line}\n".encode())

    def stop(self) -> None:
        super().stop()
        os.close(self._keyboard)


@pytest.mark.skipif(unavailable() is not None, reason=f"no namespaces here: {unavailable()}")
def test_two_pcs_need_two_commands(tools: type[Tools], tmp_path: Path) -> None:
    """Without address, port or token: found by multicast, joined by a typed code.

    Then each holds a half of the model.
    """
    with VethPair() as pair, ExitStack() as stack:
        halves = ("--min-stages", "2")
        up = Seated(pair, 0, tmp_path / "first", "up", "--name", "first", *halves, *CPU)
        stack.callback(up.stop)
        tools.wait_for(lambda: "the PCs compare a code" in up.output, up)
        join = Seated(pair, 1, tmp_path / "second", "join", "--name", "second", *CPU)
        stack.callback(join.stop)
        code = shown_code(join, tools)
        tools.wait_for(lambda: f"molink approve {code}" in up.output, up)
        up.type(code)
        tools.wait_for(lambda: f"show the same code, {code}?" in join.output, join)
        tools.wait_for(lambda: '"second" joined.' in up.output, up)
        join.type("y")
        tools.wait_for(lambda: "is ready" in join.output, join)
        assert "at 10.77.0.1." in join.output
        halves_ready = re.compile(r"stage [12] \(layers (1-4|5-8)\) ready")
        tools.wait_for(lambda: bool(halves_ready.search(up.output)), up)
        tools.wait_for(lambda: bool(halves_ready.search(join.output)), join)


@pytest.mark.slow
@pytest.mark.skipif(unavailable() is not None, reason=f"no namespaces here: {unavailable()}")
def test_a_new_router_gives_all_pcs_other_addresses(tools: type[Tools], tmp_path: Path) -> None:
    """No PC has its last known address; the others find it by the swarm's announcement."""
    homes = tmp_path / "first", tmp_path / "second"
    with VethPair() as pair:
        with ExitStack() as stack:
            up = Seated(pair, 0, homes[0], "up", "--name", "first", *CPU)
            stack.callback(up.stop)
            tools.wait_for(lambda: "the PCs compare a code" in up.output, up)
            join = Seated(pair, 1, homes[1], "join", "--name", "second", *CPU)
            stack.callback(join.stop)
            code = shown_code(join, tools)
            tools.wait_for(lambda: f"molink approve {code}" in up.output, up)
            up.type(code)
            tools.wait_for(lambda: f"show the same code, {code}?" in join.output, join)
            join.type("y")
            tools.wait_for(lambda: "is ready" in join.output, join)
        pair.renumber("10.78.0")
        with ExitStack() as stack:
            for index, verb in enumerate(("up", "join")):
                again = Seated(pair, index, homes[index], verb)
                stack.callback(again.stop)

            def together() -> bool:
                here = [(one["name"], one["address"]) for one in peers(pair, homes[0])]
                return here == [("first", "10.78.0.1"), ("second", "10.78.0.2")]

            tools.wait_for(together, again)


def peers(pair: VethPair, home: Path) -> list[dict[str, Any]]:
    """The members by the first PC's status."""
    asking = pair.run(
        0,
        [sys.executable, "-m", "molinkd", "status", "--json"],
        env=environment(home),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    said = asking.communicate(timeout=START_S)[0]
    listed = json.loads(said)["peers"] if said else []
    return [one for one in listed if one["state"] == "online"]
