"""The PC that made the swarm dies: another one goes on, and nobody's text changes."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from molink.errors import ShutOut
from tests.support.pcs import Swarm
from tests.support.processes import Tools

PROMPT = [{"role": "user", "content": "What is molink, and how does it work?"}]
MODEL = "molink-demo"


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
