"""An end's connections to a relay or a rendezvous, and from programs of its own PC."""

import asyncio
import logging
import socket
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

from molink.errors import MolinkError
from molink.util.token_bucket import TokenBucket
from molink.wire.messages.relay import ADDRESS_BYTES, PEER_ARRIVED, Address, decode_address
from molinkd.peer.membership.hole_punching import connect_shared
from molinkd.splice import Stream, open_stream

log = logging.getLogger(__name__)

#: Timeout of connecting and authenticating to a relay, in seconds.
CONNECT_TIMEOUT_S = 5.0
#: Lifetime of a waiting connection, in seconds: routers drop idle ones.
RECONNECT_INTERVAL_S = 30.0
_ACCEPT_RETRY_S = 2.0


async def connect_any(hosts: Sequence[str], port: int) -> Stream:
    """Connect to the first of ``hosts`` that answers, from a port that further sockets can share.

    Raises:
        OSError: None does.
    """
    failure: OSError = ConnectionError("the relay has no address")
    for host in hosts:
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S / 2):
                return await open_stream(await connect_shared(host, port))
        except OSError as error:  # includes TimeoutError
            failure = error
        except ValueError:  # a peer's report of nonsense
            failure = ConnectionError("the relay has an address that is none")
    raise failure


async def await_other_end(
    connect: Callable[[], Awaitable[Stream]], attempts: TokenBucket
) -> Stream:
    """A connection made by ``connect()``, once the other end has joined it.

    ``attempts`` bounds the rate of calls: a relay may claim at once that the other end has come.

    Raises:
        TimeoutError: The other end has not joined.
        OSError, EOFError: The relay is unreachable or rejects us.
    """
    await asyncio.sleep(attempts.wait_time(time.monotonic()))
    attempts.take_token()
    try:
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            stream = await connect()
    except TimeoutError as error:
        raise ConnectionError("the relay does not answer") from error
    try:
        async with asyncio.timeout(RECONNECT_INTERVAL_S):
            if await stream[0].readexactly(1) != PEER_ARRIVED:
                raise ConnectionError("unexpected reply from the relay")
    except BaseException:
        stream[1].transport.abort()
        raise
    return stream


async def read_addresses(reader: asyncio.StreamReader) -> tuple[Address | None, Address | None]:
    """Addresses of the other end and of this one, which the relay tells after an arrival.

    Raises:
        OSError, EOFError: The connection was lost.
    """
    data = await reader.readexactly(2 * ADDRESS_BYTES)
    return decode_address(data[:ADDRESS_BYTES]), decode_address(data[ADDRESS_BYTES:])


async def accept_local(listener: socket.socket, handle: Callable[[socket.socket], None]) -> None:
    """Pass every connection of this PC's programs to ``handle``."""
    loop = asyncio.get_running_loop()
    while True:
        try:
            connection, _ = await loop.sock_accept(listener)
        except OSError:
            await asyncio.sleep(_ACCEPT_RETRY_S)
            continue
        handle(connection)


def spawn_in(
    tasks: set[asyncio.Task[Any]], work: Coroutine[Any, Any, None], name: str
) -> asyncio.Task[Any]:
    """Run ``work`` as a task in ``tasks``; the loss of a connection is only logged."""
    task = asyncio.get_running_loop().create_task(work, name=name)
    tasks.add(task)

    def ended(done: asyncio.Task[Any]) -> None:
        tasks.discard(done)
        if done.cancelled() or done.exception() is None:
            return
        error = done.exception()
        if isinstance(error, (OSError, EOFError, TimeoutError, MolinkError)):
            log.debug("a connection of %s was closed: %r", name, error)
        else:
            log.error("%s failed", name, exc_info=error)

    task.add_done_callback(ended)
    return task
