"""PCs with several devices: each device holds a stage, and the PC comes and goes as one."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from molinkd.peer.home import Home
from tests.support.models import MakeModel
from tests.support.processes import Process, Tools


class TwoDevices:
    """A PC with one device that leads, and one with two, each with a stage."""

    def __init__(self, root: Path, tools: type[Tools]) -> None:
        self.root, self.tools = root, tools
        self.first = self.start("first", "up", "--model", str(root / "m"), "--min-peers", "3")
        tools.wait_for(lambda: Home(root / "first").membership.exists(), self.first)
        token = tools.run_molink(root / "first", "invite").stdout.strip()
        self.second = self.start("second", "join", token, "--device", "cpu, cpu")

    def start(self, name: str, verb: str, *more: str) -> Process:
        options = self.tools.local_options("--name", name, "--coordinator-port", "0")
        more = ("--dtype", "f32", *more) if verb == "up" else more
        return self.tools.Process(self.root / name, [verb, *options, *more])

    def peers(self) -> dict[str, dict[str, Any]]:
        """Peers by name, by the first PC's status."""
        return {one["name"]: one for one in self.first.status()["peers"]}

    def stages(self) -> set[str]:
        """Names of the peers in the ring, if it is ready."""
        status = self.first.status()
        names = {one["id"]: one["name"] for one in status["peers"]}
        ready = (one for one in status["pipelines"] if one["ready"])
        return {names.get(stage["peer"], "") for one in ready for stage in one["stages"]}

    def until(self, stages: set[str], process: Process | None = None) -> None:
        self.tools.wait_for(lambda: self.stages() == stages, process or self.first)

    def client(self, process: Process) -> openai.OpenAI:
        return self.tools.client(process.found().endpoints[0])

    def second_molink(self, *arguments: str) -> str:
        done = self.tools.run_molink(self.root / "second", *arguments)
        assert done.returncode == 0, done.stderr
        return done.stdout


ALL = {"first", "second", "second/cpu.2"}


@pytest.fixture
def place(tmp_path: Path, tools: type[Tools], make_model: MakeModel) -> Iterator[TwoDevices]:
    make_model(tmp_path / "m", "qwen2", 3, num_hidden_layers=6, max_position_embeddings=4096)
    place = TwoDevices(tmp_path, tools)
    try:
        yield place
    finally:
        place.second.stop()
        place.first.stop()


def ask(client: openai.OpenAI, tokens: int = 24) -> str:
    with client:
        done = client.completions.create(
            model="m", prompt="Hello", temperature=0, max_tokens=tokens, timeout=90
        )
    return done.choices[0].text


@pytest.mark.timeout(500)
@pytest.mark.slow  # without processes: tests/molinkd/peer/agent/test_device_daemons.py
def test_both_devices_of_a_pc_hold_stages_and_come_and_go_with_it(place: TwoDevices) -> None:
    place.until(ALL, place.second)
    peers = place.peers()
    assert [peers[name]["pc"] for name in sorted(ALL)] == ["", "", peers["second"]["id"]]
    assert peers["second/cpu.2"]["endpoint"] == ""
    text = ask(place.client(place.first), 400)
    assert text
    assert ask(place.client(place.second), 400) == text

    place.second_molink("drain", "--device", "cpu.2")
    place.until({"first", "second"})
    place.second_molink("drain")
    place.until({"first"})
    assert ask(place.client(place.second), 400) == text
    place.second_molink("resume")
    place.until(ALL, place.second)

    with place.client(place.first) as client:
        stream = client.completions.create(
            model="m", prompt="Hello", temperature=0, max_tokens=400, stream=True
        )
        pieces = [next(stream) for _ in range(5)]
        place.second.process.kill()
        pieces += stream
    assert "".join(piece.choices[0].text for piece in pieces) == text
    place.until({"first"})
    place.second.stop()  # and nothing is left of it

    place.second = place.start("second", "join", "--device", "cpu,cpu")
    place.tools.wait_for(
        lambda: all(one["state"] == "online" for one in place.peers().values()), place.second
    )
    assert place.peers().keys() == ALL
    place.second_molink("leave")
    place.tools.wait_for(lambda: place.peers().keys() == {"first"}, place.first)
    assert not Home(place.root / "second").devices.exists()
