"""The PC that made the swarm dies: another one goes on, and nobody's text changes."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from molink.errors import MolinkError, ShutOut
from molinkd.cli import local_daemon
from molinkd.peer.home import Home
from tests.support.processes import Process, Tools

PROMPT = [{"role": "user", "content": "What is molink, and how does it work?"}]
MODEL = "molink-demo"
NAMES = ("first", "second", "third")


class Swarm:
    """Three PCs with a stage each, and a fourth that comes later."""

    def __init__(self, root: Path, tools: type[Tools]) -> None:
        self.root, self.tools = root, tools
        self.running: dict[str, Process] = {}
        self.up()
        tools.wait_for(lambda: self._home("first").membership.exists(), self.running["first"])
        token = self.molink("first", "invite", "--uses", "2")
        for name in NAMES[1:]:
            self.join(name, token)

    def _home(self, name: str) -> Home:
        return Home(self.root / name)

    def up(self) -> None:
        options = self.tools.local_options("--dtype", "f32", "--min-peers", "3")
        start = ["up", "--name", "first", "--coordinator-port", "0", *options]
        self.running["first"] = self.tools.Process(self.root / "first", start)

    def join(self, name: str, token: str) -> None:
        options = self.tools.local_options("--coordinator-port", "0")
        start = ["join", token, "--name", name, *options]
        process = self.running[name] = self.tools.Process(self.root / name, start)
        # Who joined first is the next to lead.
        self.tools.wait_for(lambda: self._home(name).membership.exists(), process)

    def molink(self, name: str, *arguments: str) -> str:
        return self.tools.run_molink(self.root / name, *arguments).stdout.strip()

    def status(self, name: str) -> dict[str, Any]:
        found = local_daemon.find_daemon(self._home(name))
        try:
            return {} if found is None else local_daemon.fetch_status(found)
        except MolinkError:  # it starts, or its coordinator is being replaced
            return {}

    def led_by(self, name: str, by: str, there: int) -> bool:
        """Whether ``name`` knows ``there`` PCs, led by ``by``, and a ready pipeline."""
        status = self.status(name)
        peers = [peer for peer in status.get("peers", ()) if peer["state"] == "here"]
        leaders = [peer["name"] for peer in peers if peer["id"] == status.get("leader")]
        pipelines = status.get("pipelines", [])
        ready = bool(pipelines) and pipelines[0]["ready"]
        return leaders == [by] and len(peers) == there and ready

    def wait_led_by(self, name: str, by: str, there: int) -> None:
        self.tools.wait_for(lambda: self.led_by(name, by, there), self.running[name])

    def kill(self, name: str) -> None:
        """As if its power had gone: the daemon can't say a word to anybody."""
        process = self.running.pop(name)
        process.process.kill()
        process.stop()

    def stop(self) -> None:
        for process in reversed(self.running.values()):
            process.stop()


@pytest.fixture
def swarm(tmp_path: Path, tools: type[Tools]) -> Iterator[Swarm]:
    swarm = Swarm(tmp_path, tools)
    try:
        yield swarm
    finally:
        swarm.stop()


@pytest.mark.timeout(300)
def test_the_founders_pc_dies_and_comes_back(swarm: Swarm, tools: type[Tools]) -> None:
    swarm.wait_led_by("third", "first", 3)
    late = swarm.molink("third", "invite")
    endpoint = swarm.running["third"].found().endpoints[0]
    client = tools.client(endpoint)

    def stream() -> Iterator[str]:
        chunks = client.chat.completions.create(
            model=MODEL, messages=PROMPT, temperature=0, max_tokens=60, stream=True
        )
        for chunk in chunks:
            if chunk.choices:
                yield chunk.choices[0].delta.content or ""

    expected = "".join(stream())
    pieces = []
    for piece in stream():
        pieces.append(piece)
        if len(pieces) == 5:
            swarm.kill("first")
    assert "".join(pieces) == expected
    swarm.wait_led_by("third", "second", 2)
    # A token that was made while the dead one led still admits.
    swarm.join("fourth", late)
    swarm.wait_led_by("fourth", "second", 3)
    # The founder comes back as one of the others, and owns the swarm as before.
    swarm.up()
    swarm.wait_led_by("first", "second", 4)
    assert "".join(stream()) == expected
    swarm.molink("first", "revoke", "fourth")
    revoked = swarm.running["fourth"].process
    tools.wait_for(lambda: revoked.poll() is not None, swarm.running["first"])
    assert revoked.returncode == ShutOut.exit_code
