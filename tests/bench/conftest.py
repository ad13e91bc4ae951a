"""A fake server to benchmark, in the test's loop or in a thread."""

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator

import pytest
from aiohttp.test_utils import TestServer

from tests.support.fake_openai import FakeOpenAI


@pytest.fixture
def fake() -> FakeOpenAI:
    return FakeOpenAI()


@pytest.fixture
async def url(fake: FakeOpenAI) -> AsyncIterator[str]:
    """A fake in the test's own event loop."""
    server = TestServer(fake.app)
    await server.start_server()
    yield str(server.make_url("")).rstrip("/")
    await server.close()


@pytest.fixture
def threaded_url(fake: FakeOpenAI) -> Iterator[str]:
    """A fake in a thread, for tests of the command line."""
    started = threading.Event()
    addresses: list[str] = []
    loops: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []

    async def main() -> None:
        stop = asyncio.Event()
        server = TestServer(fake.app)
        await server.start_server()
        addresses.append(str(server.make_url("")).rstrip("/"))
        loops.append((asyncio.get_running_loop(), stop))
        started.set()
        await stop.wait()
        await server.close()

    thread = threading.Thread(target=lambda: asyncio.run(main()))
    thread.start()
    assert started.wait(30)
    yield addresses[0]
    loop, stop = loops[0]
    loop.call_soon_threadsafe(stop.set)
    thread.join(30)
    assert not thread.is_alive()
