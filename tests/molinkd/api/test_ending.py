"""What clients get while no pipeline is ready, and at shutdown."""

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import aiohttp
import openai
import pytest
from aiohttp.test_utils import TestClient

from molink.errors import Unavailable
from molinkd.api import app as app_module
from molinkd.api.api_settings import ApiSettings
from molinkd.api.http_server import EndpointServer
from tests.support.fake_backend import FakeBackend
from tests.support.inline_reader import InlineReader

HI: Any = [{"role": "user", "content": "hi"}]
CHAT = {"model": "tiny", "messages": HI}


@pytest.mark.parametrize(
    ("path", "body", "sign", "end"),
    [
        ("/v1/chat/completions", {"stream": True}, b": waiting\n", b"data: [DONE]\n\n"),
        ("/v1/messages", {"stream": True, "max_tokens": 99}, b"event: ping\n", b'_stop"}\n\n'),
        ("/api/chat", {}, b'"content":""},"done":false}\n', b"}\n"),
        ("/v1/responses", {"stream": True, "input": "hi"}, b": waiting\n", b"}\n\n"),
    ],
)
async def test_a_waiting_client_gets_keepalives(
    backend: FakeBackend, serve: Any, path: str, body: dict[str, Any], sign: bytes, end: bytes
) -> None:
    backend.gate = asyncio.Semaphore(0)
    async with serve(backend, ApiSettings(keepalive_interval_s=0.01)) as client:
        response = await client.post(path, json={**CHAT, **body})
        assert (await response.content.readline()).endswith(sign)
        for _ in range(200):
            backend.gate.release()
        rest = await response.read()
    assert rest.endswith(end)
    assert b'"H"' in rest


async def test_an_error_while_waiting_ends_the_stream(backend: FakeBackend, serve: Any) -> None:
    backend.gate, backend.error = asyncio.Semaphore(0), Unavailable("nobody came")
    async with serve(backend, ApiSettings(keepalive_interval_s=0.01)) as client:
        response = await client.post("/v1/chat/completions", json={**CHAT, "stream": True})
        await response.content.readline()
        backend.gate.release()
        assert b"nobody came" in await response.read()
    assert backend.running == 0


@pytest.mark.parametrize("waited", [False, True])
def test_clients_do_not_retry_after_a_long_wait(
    endpoint: EndpointServer, backend: FakeBackend, waited: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app_module, "_NO_RETRY_AFTER_S", -1.0 if waited else 60.0)
    backend.error = Unavailable("nobody came")
    with (
        openai.OpenAI(base_url=endpoint.url, api_key="-", max_retries=1) as ask,
        pytest.raises(openai.InternalServerError) as raised,
    ):
        ask.chat.completions.create(model="tiny", messages=HI)
    assert raised.value.response.headers["Retry-After"] == "1"
    assert len(backend.requests) == (1 if waited else 2)


@pytest.fixture
def ending(backend: FakeBackend) -> Iterator[EndpointServer]:
    endpoint = EndpointServer(backend, ApiSettings(shutdown_grace_period_s=60.0), InlineReader)
    endpoint.start(0)
    yield endpoint
    endpoint.stop()


def release_all(gate: asyncio.Semaphore) -> None:
    for _ in range(200):
        gate.release()


async def until_it_listens_no_more(endpoint: EndpointServer) -> None:
    with contextlib.suppress(ConnectionError):
        while True:
            _, writer = await asyncio.open_connection("127.0.0.1", endpoint.port)
            writer.close()


async def test_streams_are_finished(ending: EndpointServer, backend: FakeBackend) -> None:
    backend.gate = asyncio.Semaphore(1)
    async with aiohttp.ClientSession() as session:
        response = await session.post(
            f"{ending.url}/chat/completions", json={**CHAT, "stream": True}
        )
        await response.content.readline()
        stopping = threading.Thread(target=ending.stop)
        stopping.start()
        await until_it_listens_no_more(ending)
        assert ending.loop is not None
        ending.loop.call_soon_threadsafe(release_all, backend.gate)
        assert (await response.read()).endswith(b"data: [DONE]\n\n")
    await asyncio.to_thread(stopping.join)


@pytest.mark.parametrize("stream", [False, True])
async def test_answers_beyond_the_grace_period_get_a_reason(
    backend: FakeBackend, stream: bool
) -> None:
    endpoint = EndpointServer(backend, ApiSettings(shutdown_grace_period_s=0.05), InlineReader)
    endpoint.start(0)
    backend.gate = asyncio.Semaphore(1)
    async with aiohttp.ClientSession() as session:
        asked = asyncio.create_task(
            session.post(f"{endpoint.url}/chat/completions", json={**CHAT, "stream": stream})
        )
        assert endpoint.loop is not None
        waiting = asyncio.run_coroutine_threadsafe(backend.until_running(1), endpoint.loop)
        await asyncio.wrap_future(waiting)
        if stream:
            await (await asked).content.readline()
        await asyncio.to_thread(endpoint.stop)
        response = await asked
        assert response.status == (200 if stream else 503)
        assert b"molink is shutting down on this PC" in await response.read()
    assert backend.running == 0


async def test_models_without_context_fail_at_once(
    client: TestClient, backend: FakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend, "list_models", list)
    response = await client.post("/v1/chat/completions", json=CHAT)
    assert (response.status, response.headers["Retry-After"]) == (503, "1")
    assert "X-Should-Retry" not in response.headers
