"""A model that only one PC brought: the others go on with it when that PC is gone."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.models import MakeModel
from tests.support.pcs import NAMES, Swarm
from tests.support.processes import Tools

PROMPT = [{"role": "user", "content": "Who has the layers?"}]
LAYERS = 6


def stream(tools: type[Tools], endpoint: str, model: str) -> Iterator[str]:
    chunks = tools.client(endpoint).chat.completions.create(
        model=model,
        messages=PROMPT,
        temperature=0,
        max_tokens=60,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    for chunk in chunks:
        if chunk.choices:
            yield chunk.choices[0].delta.content or ""


@pytest.fixture
def swarm(tmp_path: Path, tools: type[Tools], make_model: MakeModel) -> Iterator[Swarm]:
    # 28 MB: much more than may ever wait on a connection.
    folder = make_model(
        tmp_path / "brought",
        "qwen2",
        1,
        num_hidden_layers=LAYERS,
        hidden_size=384,
        intermediate_size=1024,
    )
    swarm = Swarm(tmp_path, tools, ["--model", str(folder)])
    try:
        yield swarm
    finally:
        swarm.stop()


def copied(swarm: Swarm, name: str) -> dict[str, int]:
    """How much of the model each PC says that it has, in percent."""
    return {peer["name"]: peer.get("copied", 0) for peer in swarm.status(name).get("peers", ())}


@pytest.mark.timeout(300)
def test_the_only_pc_that_brought_the_model_dies(swarm: Swarm, tools: type[Tools]) -> None:
    swarm.wait_led_by("third", "first", 3)
    whole = dict.fromkeys(NAMES, 100)
    tools.wait_for(lambda: copied(swarm, "third") == whole, swarm.running["third"])
    assert swarm.status("third")["files"] == ""
    endpoint = swarm.running["third"].found().endpoints[0]
    expected = "".join(stream(tools, endpoint, "brought"))
    pieces = []
    for piece in stream(tools, endpoint, "brought"):
        pieces.append(piece)
        if len(pieces) == 5:
            swarm.kill("first")
    assert "".join(pieces) == expected
    swarm.wait_led_by("third", "second", 2)
    # Who comes now gets its files (here the tokenizer only) from those that have copies.
    swarm.join("fourth", swarm.molink("third", "invite"), "--stage", "none")
    swarm.wait_led_by("fourth", "second", 3)
    late = swarm.running["fourth"].found().endpoints[0]
    tools.wait_for(lambda: tools.client(late).models.list().data, swarm.running["fourth"])
    assert "".join(stream(tools, late, "brought")) == expected
