"""Clients that disconnect, stall or come in large numbers."""

import asyncio
import json
from typing import Any

import pytest
from aiohttp.test_utils import TestClient

from molink.errors import Unavailable
from molinkd.api.api_settings import ApiSettings

HI = [{"role": "user", "content": "hi"}]
CHAT = "/v1/chat/completions"


async def soon(awaitable: Any) -> Any:
    return await asyncio.wait_for(awaitable, 60)


async def send(port: int | None, **body: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Send a request on its own connection, so that it can be dropped."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    data = json.dumps({"model": "tiny", "messages": HI, **body}).encode()
    head = (
        f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(data)}\r\n\r\n"
    )
    writer.write(head.encode() + data)
    await writer.drain()
    return reader, writer


async def close(writer: asyncio.StreamWriter) -> None:
    writer.close()
    await writer.wait_closed()


@pytest.mark.parametrize("n", [1, 3])
async def test_disconnecting_midway_cancels(client: TestClient, backend: Any, n: int) -> None:
    backend.gate = asyncio.Semaphore(2 * n)
    reader, writer = await send(client.port, stream=True, n=n)
    await soon(reader.readuntil(b'"content":"H"'))
    assert backend.running == n
    await close(writer)
    await soon(backend.until_running(0))
    assert backend.closed == n


@pytest.mark.parametrize("stream", [False, True])
async def test_disconnecting_before_the_first_token_cancels(
    client: TestClient, backend: Any, stream: bool
) -> None:
    backend.gate = asyncio.Semaphore(0)
    _, writer = await send(client.port, stream=stream)
    await soon(backend.until_running(1))
    await close(writer)
    await soon(backend.until_running(0))
    text = await (await client.get("/metrics")).text()
    assert 'molink_endpoint_requests_total{route="/v1/chat/completions",status="499"} 1.0' in text
    assert "molink_endpoint_running 0.0" in text


async def test_an_error_of_one_choice_ends_the_others(client: TestClient, backend: Any) -> None:
    backend.gate = asyncio.Semaphore(4)
    backend.error, backend.fail_at = Unavailable("broke"), 1
    body = {"model": "tiny", "messages": HI, "n": 3, "stream": True}
    response = await client.post(CHAT, json=body)
    assert "broke" in await soon(response.text())
    assert (backend.running, backend.closed) == (0, 3)


async def test_a_client_that_does_not_read_is_dropped(backend: Any, serve: Any) -> None:
    backend.answer = "x" * 400_000
    backend.context = 10**9
    async with serve(backend, ApiSettings(stall_timeout_s=0.2)) as client:
        _, writer = await send(client.port, stream=True, ignore_eos=True)
        await soon(backend.until_running(1))
        await soon(backend.until_running(0))
        writer.transport.abort()


async def test_thirty_two_concurrent_streams(client: TestClient, backend: Any) -> None:
    backend.gate = asyncio.Semaphore(0)

    async def one(number: int) -> str:
        body = {
            "model": "tiny",
            "messages": [{"role": "user", "content": f"number {number}"}],
            "stream": True,
        }
        response = await client.post(CHAT, json=body)
        return await response.text()

    tasks = [asyncio.create_task(one(number)) for number in range(32)]
    await soon(backend.until_running(32))
    for _ in range(32 * 40):
        backend.gate.release()
    for text in await soon(asyncio.gather(*tasks)):
        events = [line[6:] for line in text.splitlines() if line.startswith("data: {")]
        deltas = [json.loads(event)["choices"][0]["delta"] for event in events]
        assert "".join(delta.get("content", "") for delta in deltas) == backend.answer
        assert text.endswith("data: [DONE]\n\n")
    assert len({request.prompt_token_ids for request in backend.requests}) == 32


async def test_a_stream_reaches_its_client_token_by_token(client: TestClient, backend: Any) -> None:
    backend.gate = asyncio.Semaphore(0)
    response_task = asyncio.create_task(
        client.post(CHAT, json={"model": "tiny", "messages": HI, "stream": True})
    )
    backend.gate.release()
    response = await soon(response_task)
    await soon(response.content.readuntil(b'"content":"H"'))
    backend.gate.release()
    await soon(response.content.readuntil(b'"content":"e"'))
    response.close()
    await soon(backend.until_running(0))
