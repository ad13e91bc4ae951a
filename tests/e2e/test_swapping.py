"""Two processes with little KV memory: preempted requests are swapped; their text is the same.

The same holds when a process is killed meanwhile: KV in its host memory is recomputed.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import psutil
import pytest

from molink.checkpoint.model_source import find_demo_model
from molink.facts.model import BLOCK_SIZE
from tests.support.processes import Process, Tools

SETTINGS = {"MOLINK_PREFIX_CACHE": "false"}
#: Each PC's KV pool then has blocks for 2500 to 5200 tokens; all requests together want more.
#: One PC can hold the whole model.
OPTIONS = (
    *("--coordinator-port", "0", "--memory", "52MB", "--swap-space", "256MB"),
    *("--preemption-mode", "proactive-swap", "--scheduling-policy", "skip-join-mlfq"),
)
REQUESTS, ANSWER = 20, 440


@pytest.fixture
def first(tmp_path_factory: pytest.TempPathFactory, tools: type[Tools]) -> Iterator[Process]:
    root = tmp_path_factory.mktemp("swapping")
    with tools.two_pcs(root, find_demo_model().path, OPTIONS, SETTINGS) as first:
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
        return tools.metrics(at_head)[f"molink_scheduler_{name}"]

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


def find_process(status: dict[str, Any], what: str, asked: str) -> psutil.Process:
    """The worker of a stage, or the daemon of the PC that isn't ``asked``."""
    first, second = (stage["peer"] for stage in status["pipelines"][0]["stages"])
    peers = {peer["id"]: peer for peer in status["peers"]}
    if what == "daemon":
        (other,) = (peer for peer in peers.values() if peer["endpoint"] != asked)
        return psutil.Process(other["daemon_pid"])
    (worker,) = peers[first if what == "worker of the first stage" else second]["workers"]
    return psutil.Process(worker["pid"])


@pytest.mark.slow  # without processes: tests/molinkd/worker/test_swapping.py
@pytest.mark.timeout(500)
def test_who_is_swapped_when_a_process_is_killed_gets_the_same_text(
    first: Process, tools: type[Tools]
) -> None:
    (endpoint,) = first.found().endpoints

    def head(*names: str) -> list[float]:
        status = first.wait_ready()
        peer = status["pipelines"][0]["stages"][0]["peer"]
        (at_head,) = [each["endpoint"] for each in status["peers"] if each["id"] == peer]
        metrics = tools.metrics(at_head)
        return [metrics[f"molink_scheduler_{name}"] for name in names]

    with tools.client(endpoint) as client, ThreadPoolExecutor(REQUESTS) as pool:
        model = client.models.list().data[0].id
        alone = [ask(client, model, number) for number in range(REQUESTS)]
        for what in ("worker of the second stage", "worker of the first stage", "daemon"):
            process = find_process(first.wait_ready(), what, endpoint)
            together = [pool.submit(ask, client, model, number) for number in range(REQUESTS)]
            tools.wait_for(lambda: head("swapped") > [0], first, every=0.02)
            process.kill()
            assert [each.result() for each in together] == alone, what
            tools.wait_for(lambda: head("blocks_used", "host_blocks_used") == [0, 0], first)
