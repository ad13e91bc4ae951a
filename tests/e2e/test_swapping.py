"""Two processes with little memory for KV: who gives way goes elsewhere; its text is the same."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest

from molink.checkpoint.source import demo_model
from molink.facts.model import BLOCK_SIZE
from tests.support.processes import Process, Tools

SETTINGS = {"MOLINK_PREFIX_CACHE": "false"}
#: Each PC's KV pool then has blocks for 2100 to 4000 tokens; all requests together want more.
OPTIONS = (
    *("--coordinator-port", "0", "--memory", "48MB", "--swap-space", "256MB"),
    *("--preemption-mode", "proactive-swap", "--scheduling-policy", "skip-join-mlfq"),
)
REQUESTS, ANSWER = 12, 400


@pytest.fixture
def first(tmp_path_factory: pytest.TempPathFactory, tools: type[Tools]) -> Iterator[Process]:
    root = tmp_path_factory.mktemp("swapping")
    with tools.two_pcs(root, demo_model().path, OPTIONS, SETTINGS) as first:
        yield first


def ask(client: openai.OpenAI, model: str, number: int) -> str:
    done = client.completions.create(
        model=model,
        prompt=f"{number}" + " once upon a time" * 20,
        temperature=0,
        max_tokens=ANSWER,
        extra_body={"ignore_eos": True},
    )
    assert done.usage is not None
    assert done.usage.completion_tokens == ANSWER
    return done.choices[0].text


@pytest.mark.slow  # without processes: tests/molinkd/worker/test_swapping.py
@pytest.mark.timeout(400)
def test_who_is_swapped_gets_the_same_text(first: Process, tools: type[Tools]) -> None:
    status = first.status()
    head = status["pipelines"][0]["stages"][0]["peer"]
    (at_head,) = [peer["endpoint"] for peer in status["peers"] if peer["id"] == head]

    def counted(name: str) -> float:
        return tools.metrics(at_head)[f"molink_head_{name}"]

    def all_came_back() -> bool:
        return 0 < counted("swaps_out_total") == counted("swaps_in_total")

    with tools.client(at_head) as client:
        model = client.models.list().data[0].id
        alone = [ask(client, model, number) for number in range(REQUESTS)]
        tools.wait_for(lambda: counted("blocks_used") == 0, first)
        assert counted("swaps_out_total") == 0
        assert BLOCK_SIZE * counted("blocks") < REQUESTS * ANSWER
        with ThreadPoolExecutor(REQUESTS) as pool:
            together = list(pool.map(lambda number: ask(client, model, number), range(REQUESTS)))
    assert together == alone
    tools.wait_for(all_came_back, first)
    assert counted("host_blocks_used") == 0
