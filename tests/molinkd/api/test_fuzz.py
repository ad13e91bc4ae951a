"""The endpoint answers any input promptly and below 500, and keeps running."""

import asyncio
import http.client
import io
import json
import random
import re
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest

from molink.checkpoint.model_task import ModelTask
from molinkd.api.api_settings import ApiSettings
from molinkd.api.backend import ServedModel
from molinkd.api.http_server import EndpointServer
from molinkd.api.prompt_worker_pool import PromptWorkers
from tests.support.fake_backend import FakeBackend, build_model
from tests.support.http_fuzz import OTHERS, random_body, random_bytes, random_other
from tests.support.tool_templates import HERMES

#: Short timeouts, so that incomplete requests hold nothing up.
QUICK = ApiSettings(
    header_timeout_s=0.5,
    body_timeout_s=0.5,
    min_body_rate=1 << 20,
    keepalive_s=0.5,
    max_concurrent_bodies=256,
)
#: Concurrent connections with random bytes.
AT_ONCE = 64
STATUS = re.compile(rb"HTTP/1\.[01] (\d{3}) ")


@pytest.fixture
def backend(tmp_path: Path) -> FakeBackend:
    """A backend of three models: one that calls a tool, one that embeds and one that reranks."""
    folder = build_model(tmp_path / "tiny", HERMES)
    call = '<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>'
    embed, rerank = ModelTask("embed"), ModelTask("rerank", 5, 7)
    others = (
        ServedModel("embedder", folder, 4096, 0, task=embed, hidden_size=8),
        ServedModel("ranker", folder, 4096, 0, task=rerank),
    )
    return FakeBackend(folder, "ok" + call, context=4096, others=others)


@pytest.fixture
def fuzzed(backend: FakeBackend, request: pytest.FixtureRequest) -> Iterator[EndpointServer]:
    settings = getattr(request, "param", ApiSettings())
    server = EndpointServer(backend, settings, lambda: PromptWorkers({}))
    server.start(0)
    yield server
    server.stop()
    assert backend.running == 0


def check(number: int, seed: int, sent: bytes, status: int, answer: bytes) -> None:
    shown = f"body {number} of seed {seed}: {status}\n{sent[:2000]!r}\n{answer[:2000]!r}"
    assert status < 500, shown
    if status != 200:
        assert set(json.loads(answer)["error"]) == {"message", "type", "param", "code"}, shown
    elif answer.startswith(b"data: "):
        assert answer.endswith(b"data: [DONE]\n\n"), shown
    else:
        assert json.loads(answer)["choices"], shown


@pytest.mark.parametrize(
    ("seed", "count"),
    [
        (1, 1000),
        pytest.param(2, 1_000_000, marks=[pytest.mark.slow, pytest.mark.timeout(7200)]),
    ],
)
def test_bodies(fuzzed: EndpointServer, seed: int, count: int) -> None:
    rng = random.Random(seed)
    seen = set()
    connection = http.client.HTTPConnection("127.0.0.1", fuzzed.port, timeout=60)
    for number in range(count):
        route, data = random_body(rng)
        try:
            connection.request("POST", f"/v1/{route}", data, {"Content-Type": "application/json"})
            response = connection.getresponse()
            answer = response.read()
        except (http.client.RemoteDisconnected, BrokenPipeError, ConnectionResetError):
            # The connection was idle too long: retry once, as any client would.
            connection.close()
            connection.request("POST", f"/v1/{route}", data, {"Content-Type": "application/json"})
            response = connection.getresponse()
            answer = response.read()
        check(number, seed, data, response.status, answer)
        seen.add(response.status)
    connection.close()
    assert {200, 400, 404} <= seen


@pytest.mark.parametrize(
    ("seed", "count"),
    [
        (5, 500),
        pytest.param(6, 200_000, marks=[pytest.mark.slow, pytest.mark.timeout(7200)]),
    ],
)
async def test_bodies_of_other_protocols(fuzzed: EndpointServer, seed: int, count: int) -> None:
    rng = random.Random(seed)
    seen: set[tuple[str, int]] = set()
    root = f"http://127.0.0.1:{fuzzed.port}"
    async with aiohttp.ClientSession() as session:
        for number in range(count):
            path, data = random_other(rng)
            headers = {"Content-Type": "application/json"}
            async with session.post(
                root + path, data=io.BytesIO(data), headers=headers
            ) as response:
                answer = await response.read()
            shown = f"{number} of seed {seed}: {path}: {data[:2000]!r}\n{answer[:2000]!r}"
            assert response.status < 500, shown
            if response.status != 200:
                assert json.loads(answer)["error"], shown
            elif answer.startswith(b"event:"):
                assert answer.endswith(b"}\n\n"), shown
            else:
                assert json.loads(answer.splitlines()[-1]), shown
            seen.add((path, response.status))
    assert {path for path, status in seen if status == 400} == set(OTHERS)
    assert {path for path, status in seen if status == 200} == set(OTHERS)


@pytest.mark.parametrize("fuzzed", [QUICK], indirect=True, ids=["quick"])
@pytest.mark.parametrize(
    ("seed", "count"),
    [
        (3, 250),
        pytest.param(4, 100_000, marks=[pytest.mark.slow, pytest.mark.timeout(7200)]),
    ],
)
async def test_bytes(fuzzed: EndpointServer, seed: int, count: int) -> None:
    rng = random.Random(seed)
    seen: set[int] = set()
    slots = asyncio.Semaphore(AT_ONCE)

    async def attack(number: int, data: bytes, leaves: bool, cut: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", fuzzed.port)
        received = b""
        try:
            writer.write(data[:cut])
            await asyncio.sleep(0)
            writer.write(data[cut:])
            if not leaves:
                received = await asyncio.wait_for(reader.read(), 60)
        except ConnectionError:
            pass
        except TimeoutError:
            shown = f"{number} of seed {seed}, {len(data)} bytes, cut at {cut}"
            pytest.fail(f"no end of the answer to {shown}: {data[:2000]!r}")
        finally:
            writer.close()
            slots.release()
        statuses = {int(status) for status in STATUS.findall(received)}
        assert max(statuses, default=0) < 500, f"{number} of seed {seed}: {data!r}\n{received!r}"
        seen.update(statuses)

    async with asyncio.TaskGroup() as group:
        for number in range(count):
            await slots.acquire()  # earlier requests run while this one is made
            data = random_bytes(rng)
            leaves, cut = rng.random() < 0.2, rng.randrange(len(data) + 1)
            group.create_task(attack(number, data, leaves, cut))
    # Rarer statuses may all have become 408 on a busy processor.
    assert {200, 400} <= seen
    health = http.client.HTTPConnection("127.0.0.1", fuzzed.port, timeout=60)
    health.request("GET", "/health")
    assert health.getresponse().status == 200
    health.close()
