"""Two TCP streams, joined: what comes from one goes to the other, and both end together."""

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable
from typing import Any

#: Bytes that are read at once. asyncio holds as many again until the other side takes them: who
#: reads slowly slows down who sends, and nothing piles up here.
CHUNK_BYTES = 1 << 16

Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]
#: Waits as long as so many bytes may take.
RateLimit = Callable[[int], Awaitable[None]]


async def _unlimited(_: int) -> None:
    pass


async def splice_streams(one: Stream, other: Stream, rate_limit: RateLimit = _unlimited) -> None:
    """Pass bytes on in both directions until either side ends; then both are closed."""
    ways = [
        asyncio.ensure_future(_copy_stream(reader, writer, rate_limit))
        for reader, writer in ((one[0], other[1]), (other[0], one[1]))
    ]
    try:
        await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
    finally:
        # First what can't be interrupted: we may be cancelled while we wait.
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


async def open_stream(connection: socket.socket) -> Stream:
    """A connected socket as a stream, whose owner it is.

    Raises:
        OSError: it has been closed.
    """
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    try:
        return await asyncio.open_connection(sock=connection, limit=CHUNK_BYTES)
    except OSError:
        connection.close()
        raise


def listen_on_free_port(host: str, first: int, tried: int, queue: int) -> socket.socket:
    """Listen on ``first``, or on the first free of ``tried`` ports downwards; 0: on any.

    Raises:
        OSError: none is free.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for port in range(first, max(0, first - tried), -1) or (0,):
        try:
            listener = socket.create_server((host, port), family=family, backlog=queue)
        except OSError as error:
            failure = error
            continue
        listener.setblocking(False)
        return listener
    raise failure


def close_after(accepting: "asyncio.Task[Any]", listener: socket.socket) -> None:
    """Close a listener once nothing is accepted from it any more.

    Not before: Windows' ``select`` fails altogether where one of its sockets has been closed.
    """
    accepting.add_done_callback(lambda _: listener.close())
