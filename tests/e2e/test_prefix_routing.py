"""Two pipelines of a model: a key's prompts with a common prefix go to one, until it is killed.

Another key hits none of them on either pipeline.
"""

from collections.abc import Iterator

import openai
import pytest

from tests.support.local_swarm import NAMES, LocalSwarm
from tests.support.models import MakeModel
from tests.support.processes import Tools

FILE = """
[[models]]
model = "beta"
dtype = "f32"
replicas = 2
"""
FAMILIES, ROUNDS = 4, 3
KEYS = '[api_keys]\nphone = "p1"\nattic = "a1"\n'


@pytest.fixture(scope="module")
def swarm(
    tmp_path_factory: pytest.TempPathFactory, tools: type[Tools], make_model: MakeModel
) -> Iterator[LocalSwarm]:
    root = tmp_path_factory.mktemp("routing")
    (root / "first").mkdir()
    (root / "first" / "config.toml").write_text(KEYS, encoding="utf-8")
    make_model(root / "beta", "qwen2", 2, max_position_embeddings=4096)
    swarm = LocalSwarm(root, tools, ("--model", str(root / "beta")))
    try:
        for name in NAMES:
            swarm.wait_led_by(name, "first", 3)
        yield swarm
    finally:
        swarm.stop()


def client_of(endpoint: str, key: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{endpoint}/v1", api_key=key, max_retries=0, timeout=60)


def ask(client: openai.OpenAI, family: int, question: str) -> tuple[str, int, int]:
    """The answer, the tokens of the prompt, and how many of them were cached."""
    prompt = f"{family}" + "".join(f" {family * 31 + word}" for word in range(200)) + question
    done = client.completions.create(model="beta", prompt=prompt, temperature=0, max_tokens=4)
    assert done.usage is not None
    assert done.usage.prompt_tokens_details is not None
    cached = done.usage.prompt_tokens_details.cached_tokens or 0
    return done.choices[0].text, done.usage.prompt_tokens, cached


# without processes: tests/swarm/frontend/test_request_router.py, tests/sim/test_fleet.py
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_prompts_that_begin_alike_go_to_one_pipeline(swarm: LocalSwarm, tools: type[Tools]) -> None:
    file = swarm.root / "swarm.toml"
    file.write_text(FILE, encoding="utf-8")
    swarm.molink("first", "apply", str(file))
    note = swarm.running["first"].found().run_file
    assert note.api_key == "p1", "this user's commands find it"

    def pipelines() -> list[list[str]]:
        """The peers of each that is ready."""
        found = swarm.status("first").get("pipelines", ())
        return [[stage["peer"] for stage in one["stages"]] for one in found if one["ready"]]

    tools.wait_for(lambda: len(pipelines()) == 2, swarm.running["first"])
    endpoint = swarm.running["first"].found().endpoints[0]

    def counted(name: str) -> float:
        return tools.metrics(endpoint, "p1").get(f"molink_daemon_routes_{name}_total", 0.0)

    with client_of(endpoint, "p1") as client, client_of(endpoint, "a1") as other:
        tools.wait_for(lambda: ask(client, 99, "!") and counted("explored"), swarm.running["first"])
        before = counted("explored"), counted("exploited")
        answers = [ask(client, family, "?")[0] for family in range(FAMILIES)]
        for turn in range(1, ROUNDS):
            for family in range(FAMILIES):
                _, tokens, cached = ask(client, family, "?" * (turn + 1))
                assert cached > tokens / 2
        after = counted("explored"), counted("exploited")
        assert after == (before[0] + FAMILIES, before[1] + FAMILIES * (ROUNDS - 1))

        # The other key sends the same prompts, and hits them only the second time.
        assert [ask(other, family, "?")[2] for family in range(FAMILIES)] == [0] * FAMILIES
        assert counted("explored") == after[0] + FAMILIES
        assert all(ask(other, family, "?")[2] for family in range(FAMILIES))
        assert counted("exploited") == after[1] + FAMILIES

        # After either one is killed, the other serves its prompts.
        names = {one["id"]: one["name"] for one in swarm.status("first")["peers"]}
        lost = next(name for ring in pipelines() for name in [names[ring[0]]] if name != "first")
        swarm.kill(lost)
        assert [ask(client, family, "?")[0] for family in range(FAMILIES)] == answers
        assert ask(client, 5, "?")[2] == ask(other, 5, "?")[2] == 0
        assert min(ask(each, 5, "?")[2] for each in (client, other)) > 0
