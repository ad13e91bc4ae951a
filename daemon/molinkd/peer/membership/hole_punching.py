"""Opens a TCP connection between two PCs whose routers let nobody in.

Both ends connect to each other at the same moment, from the local ports of their connections to a
relay. Each router takes the other's packets for answers to its own PC's (simultaneous open, RFC
9293 section 3.5). It works if both routers use one public port for a local port, regardless
of the destination, or if one of them does and lets in any port of a known address; a relay has seen
the public ports. Each end also listens, for a packet that comes before its own has left.

Strangers may connect meanwhile, and the relay may have lied about the address: an end uses only a
connection on which the other has proved the secret of the two, and sends nothing else before.
"""

import asyncio
import contextlib
import hmac
import ipaddress
import socket
import sys
from collections.abc import Callable, Coroutine
from typing import Any

from molink.wire.messages.relay import (
    CHOSEN,
    DIRECT_PROOF_BYTES,
    Address,
    Role,
    compute_direct_proof,
)
from molinkd.splice import Stream, open_stream
from molinkd.tasks import cancel_tasks

#: How long the ends try, one attempt of them, and the pause after a refused one, in seconds.
PUNCH_S = 3.0
_ATTEMPT_S, _PAUSE_S = 1.0, 0.25
#: How long a connection may take to prove itself, in seconds, and how many may try at once.
_PROVE_S, _MAX_UNPROVEN = 2.0, 8
#: Routers choose public ports above these; a program that listens below is not one of the ends.
_MIN_PORT = 1024


def may_punch(other: Address, relay: str) -> bool:
    """Whether to connect to the ``other`` end's address that the relay at address ``relay`` claims.

    A relay on the internet sees no local addresses: it must not point at devices in this home.
    """
    address, seen_by = ipaddress.ip_address(other[0]), ipaddress.ip_address(relay)
    if address.is_loopback or address.is_multicast or address.is_unspecified:
        return seen_by.is_loopback and address.is_loopback
    if address.is_link_local or other[1] < _MIN_PORT or address.version != seen_by.version:
        return False
    return address.is_global or not seen_by.is_global


async def connect_shared(host: str, port: int) -> socket.socket:
    """Connect from a local port that further sockets can share.

    Raises:
        OSError: The host is unknown or doesn't answer.
    """
    loop = asyncio.get_running_loop()
    failure = OSError(f"{host} has no address")
    for family, _, _, _, address in await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        made = _make_socket(family, 0)
        try:
            await loop.sock_connect(made, address)
        except BaseException as error:
            made.close()
            if not isinstance(error, OSError):
                raise
            failure = error
        else:
            return made
    raise failure


def _make_socket(family: int, port: int) -> socket.socket:
    """A socket bound to a local port that others may share."""
    made = socket.socket(family, socket.SOCK_STREAM)
    try:
        made.setblocking(False)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if sys.platform != "win32":  # there the option above means both
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        made.bind(("", port))
    except BaseException:
        made.close()
        raise
    return made


async def punch(
    local_port: int, other: Address, role: Role, end_secret: bytes, nonce: bytes
) -> Stream:
    """A direct connection to the other end at ``other``, which does the same at this moment.

    Raises:
        TimeoutError: There is none within ``PUNCH_S``.
    """
    return await _Punch(local_port, other, role, end_secret, nonce).run()


class _Punch:
    """One end's attempts at one connection."""

    def __init__(
        self, local_port: int, other: Address, role: Role, end_secret: bytes, nonce: bytes
    ) -> None:
        self._local_port, self._other, self._role = local_port, other, role
        self._family = socket.AF_INET6 if ":" in other[0] else socket.AF_INET
        self._end_secret, self._nonce = end_secret, nonce
        self._tasks: set[asyncio.Task[None]] = set()
        self._num_unproven = 0
        self._found: asyncio.Future[Stream] = asyncio.get_running_loop().create_future()

    async def run(self) -> Stream:
        self._spawn(self._listen())
        self._spawn(self._connect())
        try:
            async with asyncio.timeout(PUNCH_S):
                return await self._found
        except BaseException:
            if self._found.done() and not self._found.cancelled():
                self._found.result()[1].transport.abort()
            raise
        finally:
            await cancel_tasks(*self._tasks)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work, name="molink-punch")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _listen(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            listener = _make_socket(self._family, self._local_port)
        except OSError:  # connecting may do
            return
        with listener:
            listener.listen(_MAX_UNPROVEN)
            while True:
                connection, _ = await loop.sock_accept(listener)
                if self._num_unproven < _MAX_UNPROVEN:
                    self._spawn(self._prove(connection))
                else:
                    connection.close()

    async def _connect(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            with contextlib.suppress(OSError):  # includes TimeoutError
                connection = _make_socket(self._family, self._local_port)
                try:
                    async with asyncio.timeout(_ATTEMPT_S):
                        await loop.sock_connect(connection, self._other)
                except BaseException:
                    connection.close()
                    raise
                await self._prove(connection)
            await asyncio.sleep(_PAUSE_S)

    async def _prove(self, connection: socket.socket) -> None:
        """Offer a connection as found if the other end proves itself on it."""
        is_kept = False
        stream: Stream | None = None
        self._num_unproven += 1
        try:
            async with asyncio.timeout(_PROVE_S):
                stream = await open_stream(connection)
                await exchange_proofs(stream, self._role, self._end_secret, self._nonce)
            if not self._found.done():
                self._found.set_result(stream)
                is_kept = True
                if self._role == "dials":
                    stream[1].write(CHOSEN)
        except (OSError, EOFError):  # a stranger, or lost
            pass
        finally:
            self._num_unproven -= 1
            if stream is not None and not is_kept:
                stream[1].transport.abort()


async def exchange_proofs(stream: Stream, role: Role, end_secret: bytes, nonce: bytes) -> None:
    """Prove to each other that a connection may carry on the relayed one that has ``nonce``.

    The end that dials speaks first; if there are several such connections, it chooses one by
    sending ``CHOSEN``.

    Raises:
        ConnectionError: The other side is a stranger.
        OSError, EOFError: The connection was lost.
    """
    reader, writer = stream
    own = compute_direct_proof(role, end_secret, nonce)
    other = compute_direct_proof("waits" if role == "dials" else "dials", end_secret, nonce)
    if role == "dials":
        writer.write(own)
    if not hmac.compare_digest(await reader.readexactly(DIRECT_PROOF_BYTES), other):
        raise ConnectionError("not the other end")
    if role == "waits":
        writer.write(own)
        if await reader.readexactly(1) != CHOSEN:
            raise ConnectionError("not chosen")


class PunchBackoff:
    """When to try a direct connection to a peer again: routers that let none pass rarely change."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        #: Failures in a row, and when the next attempt may start, by peer.
        self._failures: dict[str, tuple[int, float]] = {}

    def is_due(self, peer: str) -> bool:
        """Whether to try now."""
        return self._now() >= self._failures.get(peer, (0, 0.0))[1]

    def record_result(self, peer: str, ok: bool) -> None:
        """Record an attempt; after three failures the next ones come later and later."""
        if ok:
            self._failures.pop(peer, None)
            return
        count = self._failures.get(peer, (0, 0.0))[0] + 1
        pause = 0.0 if count < 3 else min(30.0 * 2.0 ** min(count - 3, 16), 3600.0)
        self._failures[peer] = count, self._now() + pause

    def drop_peer(self, peer: str) -> None:
        """Forget a peer whose route is gone."""
        self._failures.pop(peer, None)
