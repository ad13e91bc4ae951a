"""Two pipelines of two stages: with E2 fewer prompt tokens are computed than with round-robin."""

import random
from collections.abc import Iterator

import openai
import pytest

from tests.support.local_swarm import NAMES, LocalSwarm
from tests.support.processes import Tools

FILE = """
[[models]]
model = "molink-demo"
dtype = "f32"
replicas = 2
min_stages = 2
"""
FAMILIES, ROUNDS = 5, 4


@pytest.fixture(scope="module")
def swarm(tmp_path_factory: pytest.TempPathFactory, tools: type[Tools]) -> Iterator[LocalSwarm]:
    swarm = LocalSwarm(tmp_path_factory.mktemp("routers"), tools)
    try:
        for name in NAMES:
            swarm.wait_led_by(name, "first", 3)
        swarm.join("fourth", swarm.molink("first", "invite"), MOLINK_ROUTER="round-robin")
        yield swarm
    finally:
        swarm.stop()


def computed(client: openai.OpenAI, router: str) -> int:
    """Prompt tokens computed for questions with common prefixes, in mixed order."""
    families = list(range(FAMILIES)) * ROUNDS
    random.Random(1).shuffle(families)
    tokens = 0
    for number, family in enumerate(families):
        prompt = f"{router} {family}: " + " ".join(str(family + word) for word in range(150))
        done = client.completions.create(
            model="molink-demo", prompt=f"{prompt} {number}?", temperature=0, max_tokens=2
        )
        assert done.usage is not None
        assert done.usage.prompt_tokens_details is not None
        tokens += done.usage.prompt_tokens - (done.usage.prompt_tokens_details.cached_tokens or 0)
    return tokens


# without processes: tests/swarm/frontend/test_request_router.py, tests/sim/test_fleet.py
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_e2_computes_less_than_round_robin(swarm: LocalSwarm, tools: type[Tools]) -> None:
    file = swarm.root / "swarm.toml"
    file.write_text(FILE, encoding="utf-8")
    swarm.molink("first", "apply", str(file))

    def both(name: str) -> bool:
        """Whether ``name`` knows two ready pipelines with two stages each."""
        found = swarm.status(name).get("pipelines", ())
        return [len(one["stages"]) for one in found if one["ready"]] == [2, 2]

    found = {}
    for router, name in (("round-robin", "fourth"), ("e2", "first")):
        process = swarm.running[name]
        tools.wait_for(lambda name=name: both(name), process)
        endpoint = process.found().endpoints[0]
        with tools.client(endpoint) as client:
            found[router] = computed(client, router)
        explored = tools.metrics(endpoint).get("molink_daemon_routes_explored_total", 0.0)
        assert (explored > 0) == (router == "e2")
    # With round-robin both pipelines compute each prefix, with E2 only one does.
    assert found["e2"] < 0.75 * found["round-robin"], found
