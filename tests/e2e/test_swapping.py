"""Two processes with little memory for KV: who gives way goes elsewhere; its text is the same."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest

from molink.facts.model import BLOCK_SIZE
from tests.support.processes import Process, Tools

#: Each PC's KV pool then has blocks for about 3200 tokens; all requests together want 4800.
SETTINGS = {
    "MOLINK_MEMORY": "80MB",
    "MOLINK_PREEMPTION_MODE": "proactive-swap",
    "MOLINK_SWAP_SPACE": "256MB",
    "MOLINK_SCHEDULING_POLICY": "skip-join-mlfq",
    "MOLINK_PREFIX_CACHE": "false",
}
REQUESTS, ANSWER = 8, 500


@pytest.fixture
def demo_of_two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    arguments = ["demo", "--peers", "2", "--dtype", "f32"]
    process = Process(tmp_path_factory.mktemp("swapping"), arguments, variables=SETTINGS)
    try:
        yield process
    finally:
        process.stop()


def ask(client: openai.OpenAI, number: int) -> str:
    done = client.completions.create(
        model="molink-demo",
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
def test_who_is_swapped_gets_the_same_text(demo_of_two: Process, tools: type[Tools]) -> None:
    status = demo_of_two.wait_ready()
    head = status["pipelines"][0]["stages"][0]["peer"]
    (at_head,) = [peer["endpoint"] for peer in status["peers"] if peer["id"] == head]

    def counted(name: str) -> float:
        return tools.metrics(at_head)[f"molink_head_{name}"]

    def all_came_back() -> bool:
        return 0 < counted("swaps_out_total") == counted("swaps_in_total")

    with tools.client(at_head) as client:
        alone = [ask(client, number) for number in range(REQUESTS)]
        tools.wait_for(lambda: counted("blocks_used") == 0, demo_of_two)
        assert counted("swaps_out_total") == 0
        assert BLOCK_SIZE * counted("blocks") < REQUESTS * ANSWER
        with ThreadPoolExecutor(REQUESTS) as pool:
            together = list(pool.map(lambda number: ask(client, number), range(REQUESTS)))
    assert together == alone
    tools.wait_for(all_came_back, demo_of_two)
    assert counted("host_blocks_used") == 0
