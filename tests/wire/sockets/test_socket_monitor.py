"""One thread monitors all sockets of a context."""

import asyncio
import sys
import threading
from typing import Any

import pytest
import zmq.asyncio

from molink.wire.messages.codec import control_codec
from molink.wire.sockets.client import Client


def count_threads() -> int:
    return sum(one.name == "molink-monitor" for one in threading.enumerate())


async def test_connections_share_one_thread_that_ends_with_the_last(net: Any) -> None:
    server = net.server(control_codec(), lambda *_: None)
    target = f"tcp://127.0.0.1:{server.port}"
    context = zmq.asyncio.Context()
    before = count_threads()
    clients = [
        Client(context, net.member(), control_codec(), net.keys.public, [target]) for _ in range(20)
    ]
    for one in clients:
        one.start()
    for one in clients:
        await one.wait_connected(30)
    assert count_threads() == before + 1
    for one in clients:
        await one.close()
    assert count_threads() == before
    again = Client(context, net.member(), control_codec(), net.keys.public, [target])
    again.start()
    await again.wait_connected(30)
    await again.close()
    assert count_threads() == before
    context.destroy(linger=0)


async def test_a_close_that_is_cancelled_ends_the_thread(net: Any) -> None:
    before = count_threads()
    context = zmq.asyncio.Context()
    client = Client(context, net.member(), control_codec(), net.keys.public, ["tcp://127.0.0.1:9"])
    client.start()
    closing = asyncio.create_task(client.close())
    await asyncio.sleep(0)
    closing.cancel()
    await asyncio.gather(closing, return_exceptions=True)
    assert count_threads() == before
    context.destroy(linger=0)


@pytest.mark.skipif(
    sys.platform == "win32", reason="select fails on a descriptor that libzmq has closed"
)
async def test_the_thread_ends_with_its_context(net: Any) -> None:
    before = count_threads()
    context = zmq.asyncio.Context()
    client = Client(context, net.member(), control_codec(), net.keys.public, ["tcp://127.0.0.1:9"])
    client.start()
    context.destroy(linger=0)
    await client.close()
    assert count_threads() == before
