"""Passes on what two other PCs say that can't reach each other; sees nothing but encrypted bytes.

Both ends connect here and prove that the coordinator has told them the secret of their relay
(:mod:`molink.wire.messages.relaying`). One end waits with a connection; when the other comes, the
two are joined. Everything is bounded: relays, connections, those that have proved nothing yet, how
fast connections are taken, bytes per second in all, and bytes held, a chunk for each direction.
"""

import asyncio
import logging
import secrets
import socket
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any

from molink.errors import WireError
from molink.swarm.controller.relays import MAX_OF_PEER
from molink.swarm.membership.join_rate import Rate, TokenBucket
from molink.wire.messages.relaying import (
    GO,
    NONCE_BYTES,
    PROOF_BYTES,
    OpenRelay,
    claimed,
    is_proof,
    proof,
)
from molinkd.splice import Stream, close_after, listen, splice, stream_of

log = logging.getLogger(__name__)

#: Connections of all relays, of one of them, and of those that have not proved anything.
MAX_CONNECTIONS, MAX_OF_RELAY, MAX_STRANGERS = 128, 24, 32
#: Until a connection has proved itself, and until the other end has come, in seconds.
TALK_S, MEET_S = 5.0, 10.0
#: Connections that are taken: more wait in the system's queue, which is short.
ACCEPTED = Rate(64, 40.0)
_QUEUE = 16
_PORTS_TRIED = 12
#: Bytes per second of all relays here: a home's network, and little of a CPU.
RATE = 64e6
#: A relay that nobody uses for so long was forgotten by its coordinator, in seconds.
UNUSED_S = 300.0
_PAUSE_S = 0.5


@dataclass(slots=True)
class _Way:
    """A relay of ours."""

    secret: bytes
    since: float
    waiting: list[Stream] = field(default_factory=list)
    arrived: asyncio.Event = field(default_factory=asyncio.Event)
    tasks: set[asyncio.Task[Any]] = field(default_factory=set)


class Relay:
    """All relays of this PC, behind one port that is open only while there are any."""

    def __init__(self, host: str, first_port: int, rate: float = RATE) -> None:
        self._host, self._first, self._rate = host, first_port, rate
        self._ways: dict[int, _Way] = {}
        self._strangers: set[asyncio.Task[Any]] = set()
        self._listener: socket.socket | None = None
        self._accepting: asyncio.Task[None] | None = None
        #: When all bytes so far will have been passed on at our rate.
        self._free_at = 0.0
        self.port = 0
        self.passed = 0

    # --- for the coordinator -----------------------------------------------------------------

    def open(self, order: OpenRelay) -> int:
        """Pass on what the ends of that relay say; returns the port, 0 if it can't be done."""
        self._sweep()
        if order.id not in self._ways and len(self._ways) >= MAX_OF_PEER:
            return 0
        if self._listener is None:
            try:
                host = "" if self._host == "*" else self._host
                self._listener = listen(host, self._first, _PORTS_TRIED, _QUEUE)
            except OSError as error:
                log.warning("nothing can be passed on for others: %s", error)
                return 0
            self.port = int(self._listener.getsockname()[1])
            self._accepting = asyncio.get_running_loop().create_task(self._accept(self._listener))
            close_after(self._accepting, self._listener)
        self._ways.setdefault(order.id, _Way(order.secret, self._now()))
        log.info("passing on what two other PCs say, on port %d", self.port)
        return self.port

    def stop(self, id: int) -> None:
        """No more of that relay; its connections end."""
        way = self._ways.pop(id, None)
        if way is not None:
            for task in way.tasks:
                task.cancel()
            for _, writer in way.waiting:
                writer.transport.abort()
        if not self._ways:
            self._shut()

    async def close(self) -> None:
        """No more of any."""
        tasks = [task for way in self._ways.values() for task in way.tasks]
        tasks += [*self._strangers, *([self._accepting] if self._accepting else [])]
        for id in tuple(self._ways):
            self.stop(id)
        self._shut()
        await asyncio.gather(*tasks, return_exceptions=True)

    @property
    def connections(self) -> int:
        """Those that belong to a relay."""
        return sum(map(self._of, self._ways.values()))

    # --- connections -------------------------------------------------------------------------

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        pace = TokenBucket(ACCEPTED, loop.time())
        while True:
            await asyncio.sleep(pace.wait(loop.time()))
            try:
                connection, _ = await loop.sock_accept(listener)
            except OSError as error:
                log.warning("a connection that was to be passed on can't be taken: %s", error)
                await asyncio.sleep(_PAUSE_S)
                continue
            pace.take()
            if len(self._strangers) >= MAX_STRANGERS:
                connection.close()
            else:
                self._spawn(self._visit(connection), self._strangers)

    async def _visit(self, connection: socket.socket) -> None:
        stream = await stream_of(connection)
        kept = False
        try:
            async with asyncio.timeout(TALK_S):
                id, role = await self._ask(stream)
            kept = self._admit(stream, id, role)
        finally:
            if not kept:
                stream[1].transport.abort()

    async def _ask(self, stream: Stream) -> tuple[int, str]:
        """Of which relay a visitor is an end, and which one.

        Raises:
            WireError: it doesn't know the secret.
        """
        reader, writer = stream
        nonce = secrets.token_bytes(NONCE_BYTES)
        writer.write(nonce)
        answer = await reader.readexactly(PROOF_BYTES)
        id, role = claimed(answer)
        way = self._ways.get(id)
        if way is None or not is_proof(answer, id, role, way.secret, nonce):
            raise WireError("it knows no secret of a relay")
        return id, role

    def _admit(self, stream: Stream, id: int, role: str) -> bool:
        way = self._ways.get(id)
        if way is None or self.connections >= MAX_CONNECTIONS or self._of(way) >= MAX_OF_RELAY:
            return False
        way.since = self._now()
        if role == "waits":
            # The newest is the one that is sure to live: a router may have forgotten the others.
            for _, writer in way.waiting:
                writer.transport.abort()
            way.waiting[:] = [stream]
            way.arrived.set()
        else:
            self._spawn(self._join(way, stream), way.tasks)
        return True

    async def _join(self, way: _Way, stream: Stream) -> None:
        """Join an end that has come with the one that waits."""
        try:
            async with asyncio.timeout(MEET_S):
                while True:
                    while not way.waiting:
                        way.arrived.clear()
                        await way.arrived.wait()
                    other = way.waiting.pop()
                    if not other[1].is_closing() and not other[0].at_eof():
                        break
                    other[1].transport.abort()
            other[1].write(GO)
            await splice(stream, other, self._pace)
        finally:
            way.since = self._now()
            stream[1].transport.abort()

    async def _pace(self, nbytes: int) -> None:
        now = self._now()
        self.passed += nbytes
        self._free_at = max(self._free_at, now) + nbytes / self._rate
        if self._free_at > now + 0.001:
            await asyncio.sleep(self._free_at - now)

    # --- housekeeping ------------------------------------------------------------------------

    def _of(self, way: _Way) -> int:
        return 2 * len(way.tasks) + len(way.waiting)

    def _sweep(self) -> None:
        """Forget what was not used for long: nobody may have been left to end it."""
        now = self._now()
        for id, way in tuple(self._ways.items()):
            if not way.tasks and now - way.since > UNUSED_S:
                self.stop(id)

    def _shut(self) -> None:
        if self._accepting is not None:
            self._accepting.cancel()
            self._accepting = None
        self._listener = None
        for task in self._strangers:
            task.cancel()
        self.port = 0

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    def _spawn(self, work: Coroutine[Any, Any, None], among: set[asyncio.Task[Any]]) -> None:
        task = asyncio.get_running_loop().create_task(work, name="molink-relay")
        among.add(task)

        def ended(done: asyncio.Task[Any]) -> None:
            among.discard(done)
            if done.cancelled() or done.exception() is None:
                return
            error = done.exception()
            if isinstance(error, (OSError, EOFError, WireError, TimeoutError)):
                log.debug("a connection of a relay has ended: %r", error)
            else:
                log.error("a relay failed", exc_info=error)

        task.add_done_callback(ended)


async def enter(stream: Stream, id: int, role: str, secret: bytes) -> None:
    """Prove to a relay that we are one of its ends.

    Raises:
        OSError, EOFError: it has gone.
    """
    reader, writer = stream
    nonce = await reader.readexactly(NONCE_BYTES)
    writer.write(proof(id, "waits" if role == "waits" else "dials", secret, nonce))
