"""Joins two TCP streams; both close together."""

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable
from typing import Any

#: Bytes per read. asyncio buffers as many again, so a slow reader slows the sender and buffers stay
#: bounded.
CHUNK_BYTES = 1 << 16

#: Ends a connection to a PC that has vanished after a minute; seconds and attempts.
_KEEPALIVE = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}

Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]
#: Waits until this number of bytes conforms to the rate limit.
RateLimit = Callable[[int], Awaitable[None]]


async def _unlimited(_: int) -> None:
    pass


async def splice_streams(one: Stream, other: Stream, rate_limit: RateLimit = _unlimited) -> None:
    """Copy bytes in both directions until either side closes; then close both."""
    ways = [
        asyncio.ensure_future(_copy_stream(reader, writer, rate_limit))
        for reader, writer in ((one[0], other[1]), (other[0], one[1]))
    ]
    try:
        await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
    finally:
        # Abort first: the waits below may be cancelled.
        for _, writer in (one, other):
            writer.transport.abort()
        for way in ways:
            way.cancel()
        await asyncio.gather(*ways, return_exceptions=True)


async def _copy_stream(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, rate_limit: RateLimit
) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(CHUNK_BYTES):
            await rate_limit(len(data))
            writer.write(data)
            await writer.drain()


def keep_alive(connection: socket.socket) -> None:
    """Have a TCP connection end soon after the other PC has vanished."""
    with contextlib.suppress(OSError):  # not TCP, or closed
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEPALIVE.items():
            if hasattr(socket, name):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


async def open_stream(connection: socket.socket) -> Stream:
    """A stream that owns a connected socket.

    Raises:
        OSError: The socket was closed.
    """
    keep_alive(connection)
    try:
        return await asyncio.open_connection(sock=connection, limit=CHUNK_BYTES)
    except OSError:
        connection.close()
        raise


async def open_pair() -> tuple[Stream, Stream]:
    """Two connected streams within this process."""
    one, other = socket.socketpair()
    return await open_stream(one), await open_stream(other)


def listen_on_free_port(host: str, first: int, tried: int, queue: int) -> socket.socket:
    """Listen on ``first``, or on the first free of ``tried`` ports downwards; 0 means any port.

    A ``host`` of ``::`` means all interfaces, for IPv4 too.

    Raises:
        OSError: No port is free.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    is_dual = host == "::" and socket.has_dualstack_ipv6()
    for port in range(first, max(0, first - tried), -1) or (0,):
        try:
            listener = socket.create_server(
                (host, port), family=family, backlog=queue, dualstack_ipv6=is_dual
            )
        except OSError as error:
            failure = error
            continue
        listener.setblocking(False)
        return listener
    raise failure


def close_after(accepting: "asyncio.Task[Any]", listener: socket.socket) -> None:
    """Close a listener once it is no longer accepting.

    Closing earlier breaks Windows' ``select`` for all sockets.
    """
    accepting.add_done_callback(lambda _: listener.close())
