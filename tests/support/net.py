"""ZeroMQ sockets on loopback, and waiting for their messages."""

import asyncio
import itertools
import socket
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, suppress
from typing import Any

import zmq.asyncio

from molink.wire.messages.codec import Codec
from molink.wire.sockets.client import Client, ClientEvents
from molink.wire.sockets.key_pair import KeyPair
from molink.wire.sockets.server import Handler, Server
from molink.wire.sockets.zap import ZapAuthenticator


async def until(condition: Callable[[], object], timeout: float = 60.0) -> None:
    """Wait until ``condition()`` holds; fails after ``timeout`` seconds."""
    async with asyncio.timeout(timeout):
        while not condition():  # noqa: ASYNC110  any condition, not an event
            await asyncio.sleep(0.002)


class Net:
    """A ZeroMQ context with its ZAP authenticator on loopback; closes all that it has opened."""

    def __init__(self, stack: AsyncExitStack) -> None:
        self._stack = stack
        self.context = zmq.asyncio.Context()
        self.authenticator = ZapAuthenticator(self.context)
        self.authenticator.start()
        self.keys = KeyPair.generate()
        self.until: Callable[..., Awaitable[None]] = until
        #: Close something after the test, before the context.
        self.at_end = stack.push_async_callback

    def member(self, peer_id: str | None = None) -> KeyPair:
        """The keys of a new member."""
        keys = KeyPair.generate()
        self.authenticator.allow_peer(keys.public, peer_id)
        return keys

    def server(self, codec: Codec[Any], handler: Handler[Any], **options: Any) -> Server[Any]:
        """A server, listening on any port."""
        server = Server(self.context, self.keys, codec, self.authenticator, handler, **options)
        self._stack.push_async_callback(server.close)
        server.bind("127.0.0.1", (0, 1))
        return server

    def client(self, codec: Codec[Any], keys: KeyPair, port: int, **options: Any) -> Client[Any]:
        """A client that starts to connect to ``port``."""
        server_key = options.pop("server_key", self.keys.public)
        addresses = options.pop("addresses", [f"tcp://127.0.0.1:{port}"])
        heard = {key: options.pop(key) for key in list(options) if key.startswith("on_")}
        events: ClientEvents[Any] = ClientEvents(**heard)
        client = Client(self.context, keys, codec, server_key, addresses, events=events, **options)
        self._stack.push_async_callback(client.close)
        client.start()
        return client


class Flood:
    """Silent connections to a port, ``per_second`` of them, from ``addresses`` in turn."""

    def __init__(self, port: int, addresses: tuple[str, ...], per_second: float) -> None:
        self._port, self._addresses, self._per_second = port, addresses, per_second
        self._sockets: list[socket.socket] = []
        self._task = asyncio.create_task(self._connect_forever(), name="flood")

    def __len__(self) -> int:
        return len(self._sockets)

    async def _connect_forever(self) -> None:
        for address in itertools.cycle(self._addresses):
            one = socket.socket()
            self._sockets.append(one)
            one.setblocking(False)
            one.bind((address, 0))
            with suppress(OSError):
                one.connect(("127.0.0.1", self._port))
            await asyncio.sleep(1 / self._per_second)

    async def end(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        for one in self._sockets:
            one.close()
