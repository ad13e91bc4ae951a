"""PCs behind routers: neither can connect to the other, and a third passes their bytes on."""

import json
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from molinkd.peer.home import Home
from tests.support.models import MakeModel
from tests.support.processes import Process, Tools, environment, restore_measurements
from tools.wan import Node, Rig, unavailable

pytestmark = pytest.mark.skipif(
    unavailable() is not None, reason=f"no namespaces here: {unavailable()}"
)
CPU = ["--threads", "1", "--device", "cpu"]
#: Where each look is a command of its own.
EVERY_S = 0.5


class Behind(Process):
    """A molink process on a node of the rig."""

    def __init__(self, rig: Rig, index: int, home: Path, *arguments: str) -> None:
        home.mkdir(parents=True)
        self.rig, self.index, self.home = rig, index, Home(home)
        self._statuses: subprocess.Popen[bytes] | None = None
        restore_measurements(self.home)
        self._output = (home / "terminal.log").open("ab+")
        self.process = rig.run(
            index,
            [sys.executable, "-m", "molinkd", *arguments, *CPU],
            env=environment(home),
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
        )

    def run(self, *arguments: str) -> str:
        """The output of a command there."""
        process = self.rig.run(
            self.index,
            [sys.executable, "-m", "molinkd", *arguments],
            env=environment(self.home.root),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        return str(process.communicate(timeout=60)[0].decode())

    def status(self) -> dict[str, Any]:
        if self._statuses is None:
            self._statuses = self.rig.run(
                self.index,
                [sys.executable, "-m", "tests.support.status_stream"],
                env=environment(self.home.root),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
        assert self._statuses.stdin is not None
        assert self._statuses.stdout is not None
        self._statuses.stdin.write(b"\n")
        self._statuses.stdin.flush()
        found: dict[str, Any] = json.loads(self._statuses.stdout.readline())
        return found

    def stop(self) -> None:
        if self._statuses is not None:
            self._statuses.communicate(timeout=60)
        super().stop()

    def wait_ready(self) -> dict[str, Any]:
        status: dict[str, Any] = {}

        def ready() -> bool:
            status.update(self.status())
            return any(one["ready"] for one in status.get("pipelines", ()))

        Tools.wait_for(lambda: "is ready" in self.output, self)
        Tools.wait_for(ready, self)
        return status


class House:
    """PCs on the nodes of a rig, for the life of a ``with`` block."""

    def __init__(self, folder: Path, *nodes: Node) -> None:
        self._folder, self._names = folder, [node.name for node in nodes]
        self._stack = ExitStack()
        self._rig = Rig(nodes)

    def __enter__(self) -> "House":
        self._stack.enter_context(self._rig)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def start(self, name: str, *arguments: str) -> Behind:
        index = self._names.index(name)
        process = Behind(self._rig, index, self._folder / name, *arguments, "--name", name)
        self._stack.callback(process.stop)
        return process

    def first(self, name: str, *arguments: str) -> tuple[Behind, str]:
        """One that founds a swarm, and a token of it."""
        process = self.start(name, "up", *arguments)
        tokens: list[str] = []

        def invited() -> bool:
            tokens.append(process.run("invite", "--uses", "2").strip())
            return bool(tokens[-1])

        Tools.wait_for(lambda: "Chat endpoint" in process.output, process)
        Tools.wait_for(invited, process, every=EVERY_S)
        return process, tokens[-1]


def ways(status: dict[str, Any]) -> dict[tuple[str, str], str]:
    """Through whom which PCs are connected, by their names."""
    names = {one["id"]: one["name"] for one in status["peers"]}
    return {
        (names[one["from"]], names[one["to"]]): names[one["through"]] for one in status["relays"]
    }


def measured(status: dict[str, Any]) -> bool:
    """Whether placement knows how long the ways of the ring are."""
    stages = status["pipelines"][0]["stages"]
    return bool(stages) and all(
        stage["link_measured"] and 0.01 <= stage["link_s"] < 1 for stage in stages
    )


def test_two_pcs_that_can_not_meet_serve_by_way_of_a_third(tmp_path: Path) -> None:
    # 20 ms from one to the other and back, by way of the hub.
    nodes = (
        Node("hub"),
        Node("attic", closed=1, delay_ms=10),
        Node("couch", closed=1, delay_ms=10),
    )
    with House(tmp_path, *nodes) as house:
        hub, token = house.first("hub", "--stage", "none")
        attic = house.start("attic", "join", token, "--stage", "0:4")
        couch = house.start("couch", "join", token, "--stage", "4:8")
        found = ways(hub.wait_ready())
        assert (found["attic", "couch"], found["couch", "attic"]) == ("hub", "hub")
        Tools.wait_for(lambda: measured(hub.status()), hub)
        # The endpoint of each answers: the hub's by a connection that the attic has opened.
        for one in (attic, couch, hub):
            Tools.wait_for(lambda one=one: "is ready" in one.output, one)
            assert one.run("chat", "What is molink?").strip(), one.output
        assert ways(hub.status())["hub", "attic"] == "hub"
        # A PC that is drained passes on nothing, and there is no other.
        hub.run("drain", "--timeout", "5")
        Tools.wait_for(lambda: not hub.status()["relays"], hub)
        Tools.wait_for(lambda: not hub.status()["pipelines"][0]["ready"], hub)
        hub.run("resume")
        hub.wait_ready()
        assert couch.run("chat", "What is molink?").strip(), couch.output


@pytest.mark.slow
def test_one_pc_can_dial_the_other(tmp_path: Path, make_model: MakeModel) -> None:
    """What goes the other way goes over a connection that it has opened, model files too."""
    model = make_model(tmp_path / "tiny", "qwen2", num_hidden_layers=8)
    with House(tmp_path, Node("hub"), Node("couch", closed=1)) as house:
        hub, token = house.first("hub", "--stage", "0:4")
        couch = house.start("couch", "join", token, "--stage", "4:8")
        assert ways(hub.wait_ready()) == {("hub", "couch"): "hub"}
        Tools.wait_for(lambda: "is ready" in couch.output, couch)
        assert couch.run("chat", "What is molink?").strip(), couch.output
        hub.run("stop")
        assert couch.run("run", str(model), "Hello"), couch.output
        assert hub.run("chat", "--model", "tiny", "Hello"), hub.output


@pytest.mark.slow
def test_model_files_go_by_way_of_a_third(tmp_path: Path, make_model: MakeModel) -> None:
    model = make_model(tmp_path / "tiny", "qwen2", num_hidden_layers=8)
    with House(tmp_path, Node("hub"), Node("attic", closed=1), Node("couch", closed=1)) as house:
        hub, token = house.first("hub", "--stage", "none")
        attic = house.start("attic", "join", token, "--stage", "0:4")
        couch = house.start("couch", "join", token, "--stage", "4:8")
        hub.wait_ready()
        Tools.wait_for(lambda: "is ready" in attic.output, attic)
        hub.run("stop")
        assert attic.run("run", str(model), "Hello"), attic.output
        assert couch.run("chat", "--model", "tiny", "Hello"), couch.output
        assert ways(hub.status())["couch", "attic"] == "hub"
