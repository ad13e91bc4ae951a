"""The PC that created the swarm and provided its model dies: others take its place."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from molink.errors import PeerBanned
from tests.support.local_swarm import NAMES, LocalSwarm
from tests.support.models import MakeModel
from tests.support.processes import Tools

PROMPT = [{"role": "user", "content": "Who has the layers?"}]
LAYERS = 6


@pytest.fixture
def swarm(tmp_path: Path, tools: type[Tools], make_model: MakeModel) -> Iterator[LocalSwarm]:
    # 28 MB: far more than a connection may buffer.
    folder = make_model(
        tmp_path / "brought",
        "qwen2",
        1,
        num_hidden_layers=LAYERS,
        hidden_size=384,
        intermediate_size=1024,
    )
    swarm = LocalSwarm(tmp_path, tools, ["--model", str(folder)])
    try:
        yield swarm
    finally:
        swarm.stop()


def stream(swarm: LocalSwarm, name: str) -> Iterator[str]:
    """Text pieces of one answer of that PC's endpoint."""
    chunks = swarm.tools.client(swarm.running[name].found().endpoints[0]).chat.completions.create(
        model="brought",
        messages=PROMPT,
        temperature=0,
        max_tokens=60,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    for chunk in chunks:
        if chunk.choices:
            yield chunk.choices[0].delta.content or ""


def copied(swarm: LocalSwarm, name: str) -> dict[str, int]:
    """The share of the model that each PC reports to have, in percent."""
    return {peer["name"]: peer.get("copied", 0) for peer in swarm.status(name).get("peers", ())}


def test_the_founders_pc_dies_and_comes_back(swarm: LocalSwarm, tools: type[Tools]) -> None:
    swarm.wait_led_by("third", "first", 3)
    whole, third = dict.fromkeys(NAMES, 100), swarm.running["third"]
    tools.wait_for(lambda: copied(swarm, "third") == whole, third)
    tools.wait_for(lambda: swarm.status("third").get("files") == "", third)
    late = swarm.molink("third", "invite")
    expected = "".join(stream(swarm, "third"))
    pieces = []
    for piece in stream(swarm, "third"):
        pieces.append(piece)
        if len(pieces) == 5:
            swarm.kill("first")
    assert "".join(pieces) == expected
    swarm.wait_led_by("third", "second", 2)
    assert swarm.molink("third", "invite").startswith("molink-")
    # A token that was made while the dead one led still admits. Who comes now gets its files (here
    # the tokenizer only) from those that have copies.
    swarm.join("fourth", late, "--stage", "none")
    swarm.wait_led_by("fourth", "second", 3)
    fourth = swarm.running["fourth"]
    models = tools.client(fourth.found().endpoints[0]).models
    tools.wait_for(lambda: models.list().data, fourth)
    assert "".join(stream(swarm, "fourth")) == expected
    # The founder returns as a follower, and still owns the swarm.
    swarm.up()
    swarm.wait_led_by("first", "second", 4)
    assert "".join(stream(swarm, "third")) == expected
    swarm.molink("first", "revoke", "fourth", "--yes")
    tools.wait_for(lambda: fourth.process.poll() is not None, swarm.running["first"])
    assert fourth.process.returncode == PeerBanned.exit_code
