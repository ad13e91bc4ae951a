"""PCs behind routers: neither can connect to the other, and a third passes their bytes on."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from molinkd.peer.home import Home
from tests.support.processes import Process, Tools, environment
from tools.wan import Node, Rig, unavailable

pytestmark = pytest.mark.skipif(
    unavailable() is not None, reason=f"no namespaces here: {unavailable()}"
)
CPU = ["--threads", "1", "--device", "cpu"]
NAMES = ("hub", "attic", "couch")


class Behind(Process):
    """A molink process on a node of the rig."""

    def __init__(self, rig: Rig, index: int, home: Path, *arguments: str) -> None:
        home.mkdir(parents=True)
        self.rig, self.index, self.home = rig, index, Home(home)
        self._output = (home / "terminal.log").open("ab+")
        self.process = rig.run(
            index,
            [sys.executable, "-m", "molinkd", *arguments, "--name", NAMES[index], *CPU],
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
        found: dict[str, Any] = json.loads(self.run("status", "--json") or "{}")
        return found

    def wait_ready(self) -> dict[str, Any]:
        status: dict[str, Any] = {}

        def ready() -> bool:
            status.update(self.status())
            return any(one["ready"] for one in status.get("pipelines", ()))

        Tools.wait_for(lambda: "is ready" in self.output, self)
        Tools.wait_for(ready, self)
        return status


@pytest.fixture
def rig() -> Iterator[Rig]:
    with Rig([Node("hub"), Node("attic", closed=1), Node("couch", closed=1)]) as made:
        yield made


def test_two_pcs_that_can_not_meet_serve_by_way_of_a_third(rig: Rig, tmp_path: Path) -> None:
    hub = Behind(rig, 0, tmp_path / "hub", "up", "--stage", "none")
    Tools.wait_for(lambda: hub.run("invite", "--uses", "2").strip(), hub)
    token = hub.run("invite", "--uses", "2").strip()
    attic = Behind(rig, 1, tmp_path / "attic", "join", token, "--stage", "0:4")
    couch = Behind(rig, 2, tmp_path / "couch", "join", token, "--stage", "4:8")
    status = hub.wait_ready()
    ids = {one["name"]: one["id"] for one in status["peers"]}
    ways = {(one["from"], one["to"]): one["through"] for one in status["relays"]}
    assert ways[ids["attic"], ids["couch"]] == ids["hub"]
    assert ways[ids["couch"], ids["attic"]] == ids["hub"]
    # The endpoint of each answers: that of the hub by connections that the others have opened.
    for one in (attic, couch, hub):
        Tools.wait_for(lambda one=one: "ready" in one.output, one)
        assert one.run("chat", "What is molink?").strip(), one.output
