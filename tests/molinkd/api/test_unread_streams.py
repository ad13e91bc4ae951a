"""Hundreds of clients that ask for streams and never read, beside one that reads."""

import asyncio
import json
import socket
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from molinkd.api.api_settings import ApiSettings
from molinkd.api.http_server import EndpointServer
from tests.support.fake_backend import FakeBackend
from tests.support.inline_reader import InlineReader
from tests.support.net import until

MANY = 500
#: Least size in bytes of an event with one token.
EVENT_BYTES = 150
#: Limit of the bytes buffered for a client, in the endpoint and in both TCP stacks; 0.6 MB were
#: measured. With default settings the operating system alone buffers megabytes.
BUFFERED_BYTES = 1 << 20


@pytest.fixture
def descriptors() -> Iterator[None]:
    """File descriptors for both ends of all connections."""
    resource: Any = pytest.importorskip("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 4 * MANY:
        pytest.skip(f"needs {4 * MANY} descriptors")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 4 * MANY), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def request(port: int, **body: Any) -> bytes:
    """A request for a streamed answer, as bytes."""
    chat = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "stream": True}
    data = json.dumps(chat | body).encode()
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost:{port}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    )
    return head.encode() + data


def open_unread(port: int, stack: ExitStack, endless: bytes) -> None:
    """Open a connection with a small receive buffer, send a request, and never read."""
    one = stack.enter_context(socket.socket())
    one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    one.settimeout(60)
    one.connect(("127.0.0.1", port))
    one.sendall(endless)


def read_answer(port: int) -> str:
    """Send a request and read its stream; returns the text."""
    data = request(port).partition(b"\r\n\r\n")[2]
    ask = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/chat/completions", data, {"Content-Type": "application/json"}
    )
    text = ""
    with urllib.request.urlopen(ask, timeout=120) as answer:
        for line in answer:
            if line.startswith(b"data: {"):
                text += json.loads(line[6:])["choices"][0]["delta"].get("content", "")
    return text


@pytest.mark.parametrize(
    "unread", [48, pytest.param(MANY, marks=[pytest.mark.slow, pytest.mark.timeout(600)])]
)
async def test_clients_that_never_read_are_held_at_a_bounded_cost_and_ended(
    backend: FakeBackend, descriptors: None, unread: int
) -> None:
    # With ``ignore_eos`` the backend repeats the answer fifty times: much more than may be
    # buffered.
    backend.answer, backend.context = "x" * 300, 10**9
    settings = ApiSettings(max_connections=unread + 8, stall_timeout_s=3.0)
    endpoint = EndpointServer(backend, settings, InlineReader)
    port = await asyncio.to_thread(endpoint.start, 0)
    endless = request(port, ignore_eos=True, max_tokens=10**6)
    try:
        with ExitStack() as stack:
            for _ in range(unread):
                await asyncio.to_thread(open_unread, port, stack, endless)
            await until(lambda: len(backend.requests) >= unread, timeout=300)
            # The client that reads gets its whole answer throughout.
            while backend.running:
                assert await asyncio.to_thread(read_answer, port) == backend.answer
            # All unread streams were ended, and none was given more than the buffer's size.
            assert backend.closed > unread
            assert backend.given < unread * BUFFERED_BYTES / EVENT_BYTES
            assert await asyncio.to_thread(read_answer, port) == backend.answer
    finally:
        await asyncio.to_thread(endpoint.stop)
