"""Real processes with little memory: one client floods them, hangs up on half, another is served.

Prompts of the flood are all the same and long. Host memory is too small for the preempted requests.
"""

import asyncio
import json
import random
import shutil
from collections.abc import Iterator, Sequence
from contextlib import suppress

import psutil
import pytest

from molink.checkpoint.model_source import find_demo_model
from tests.support.processes import Process, Tools

#: Each PC's KV pool has blocks for 2100 to 4000 tokens.
OPTIONS = (
    *("--coordinator-port", "0", "--memory", "48MB", "--swap-space", "2MB"),
    *("--preemption-mode", "proactive-swap", "--scheduling-policy", "skip-join-mlfq"),
)
KEYS = {"greedy": "key-of-the-greedy-one", "quiet": "key-of-the-quiet-one"}
SETTINGS = {
    "MOLINK_API_KEYS": ",".join(f"{name}={key}" for name, key in KEYS.items()),
    "MOLINK_MAX_QUEUE_LEN": "32",
}
FLOOD, AT_ONCE, QUESTIONS = 3000, 100, 4
MODEL = "flooded"
LONG = "once upon a time " * 60


@pytest.fixture
def first(tmp_path_factory: pytest.TempPathFactory, tools: type[Tools]) -> Iterator[Process]:
    root = tmp_path_factory.mktemp("flood")
    folder = root / MODEL
    shutil.copytree(find_demo_model().path, folder)
    with tools.two_pcs(root, folder, OPTIONS, SETTINGS) as first:
        yield first


class Flood:
    """Sends the same long prompt, :data:`MAX_CONNECTED` at a time, and hangs up on every second
    one."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._random = random.Random(1)
        self.sent = self.answered = self.refused = self.left = 0

    async def run(self) -> None:
        await asyncio.gather(*(self._one_after_the_other() for _ in range(AT_ONCE)))

    async def _one_after_the_other(self) -> None:
        while self.sent < FLOOD:
            self.sent += 1
            patience = self._random.uniform(0.0, 0.5) if self.sent % 2 else None
            try:
                async with asyncio.timeout(patience):
                    status, _ = await ask(self._port, "greedy", LONG, 16)
            except TimeoutError:
                self.left += 1
                continue
            assert status in (200, 429), status
            self.answered += status == 200
            self.refused += status == 429


async def ask(port: int, who: str, prompt: str, tokens: int) -> tuple[int, str]:
    """Status and text, by a connection of its own that is always closed."""
    body = json.dumps(
        {"model": MODEL, "prompt": prompt, "temperature": 0, "max_tokens": tokens}
        | {"ignore_eos": True}
    )
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nConnection: close\r\n"
        f"Authorization: Bearer {KEYS[who]}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write((head + body).encode())
        answer = await reader.read(-1)
    finally:
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()
    status, text = int(answer.split(b" ", 2)[1]), answer.partition(b"\r\n\r\n")[2]
    return status, json.loads(text)["choices"][0]["text"] if status == 200 else ""


async def quiet(port: int) -> Sequence[tuple[int, str]]:
    """Answers of the quiet client, one question after the other."""
    return [await ask(port, "quiet", f"{number} is", 24) for number in range(QUESTIONS)]


async def attacked(port: int) -> tuple[Flood, int]:
    """The flood, and how many rounds of the quiet one were answered as before meanwhile."""
    expected = await quiet(port)
    assert {status for status, _ in expected} == {200}
    flood, rounds = Flood(port), 0
    running = asyncio.create_task(flood.run())
    while not running.done():
        assert await quiet(port) == expected
        rounds += 1
    await running
    return flood, rounds


# without processes: tests/scheduler/test_flood.py, tests/scheduler/test_starvation.py
@pytest.mark.slow
@pytest.mark.timeout(500)
def test_a_flood_delays_others_and_leaves_nothing(first: Process, tools: type[Tools]) -> None:
    status = first.status()
    head = status["pipelines"][0]["stages"][0]["peer"]
    (endpoint,) = [peer["endpoint"] for peer in status["peers"] if peer["id"] == head]
    before = {each.pid: each.num_threads() for each in first.family()}
    flood, rounds = asyncio.run(attacked(int(endpoint.rpartition(":")[2])))
    assert flood.sent >= FLOOD
    assert min(flood.answered, flood.left, flood.refused) > 0
    assert rounds > 0

    def nothing_left() -> bool:
        now = tools.metrics(endpoint, KEYS["quiet"])
        names = ("blocks_used", "host_blocks_used", "waiting", "running", "clients", "swapped")
        return not any(now[f"molink_scheduler_{name}"] for name in names)

    tools.wait_for(nothing_left, first)
    assert tools.metrics(endpoint, KEYS["quiet"])["molink_scheduler_swap_fallbacks_total"] > 0
    for pid, threads in before.items():
        with suppress(psutil.NoSuchProcess):
            assert psutil.Process(pid).num_threads() <= threads + 8
