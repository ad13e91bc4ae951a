"""The porch: where a PC without a token asks to be let in.

A listener apart from all others, open only while the swarm may be found. It speaks plain TCP, since
a stranger has no key that ZeroMQ would let in, and takes two small messages of each connection; who
may come in is decided by a person (:mod:`molink.swarm.membership.knocks`), and done by the door.
"""

import asyncio
import contextlib
import itertools
import logging
import secrets
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass

from molink.errors import MolinkError, Overloaded, RequestError, ShutOut, Unavailable, WireError
from molink.swarm.membership.join_rate import Rate, TokenBucket
from molink.swarm.membership.knocks import (
    Arrived,
    Changed,
    Decision,
    Denied,
    Event,
    Gone,
    HangUp,
    Judge,
    Knocks,
    LetIn,
    Passed,
    Refused,
    Said,
    Tell,
    Waiting,
)
from molink.swarm.membership.versions import Spoken, mismatch, ours
from molink.wire.messages.porch import (
    LENGTH_BYTES,
    MAX_FRAME,
    Commitment,
    FromStranger,
    Outcome,
    Verdict,
    decode_frame,
    encode_frame,
    frame_length,
)
from molinkd.splice import listen

log = logging.getLogger(__name__)

#: Connections that are taken: more wait in the system's queue, which is short.
ACCEPTED = Rate(32, 20.0)
_QUEUE = 16
#: After an error of ``accept``, such as no descriptor being left, in seconds.
_PAUSE = 0.5
#: Ports that are tried, downwards: they are those that one firewall rule opens.
PORTS_TRIED = 12


@dataclass(frozen=True, slots=True)
class House:
    """What the porch belongs to."""

    swarm: str
    name: str
    public_key: str
    #: Why a key can't be let in; ``None`` if a person may say so.
    objection: Callable[[str], Outcome | None]
    #: Make a key with that name a member on another one's word; may raise ``MolinkError``.
    admit: Callable[[str, str, str], object]
    #: The coordinator's port, and its addresses without one.
    where: Callable[[], tuple[int, tuple[str, ...]]]
    #: Those who wait are others than before.
    changed: Callable[[], None]


class Porch:
    """One listener, and those who stand before it."""

    def __init__(self, house: House) -> None:
        self._house = house
        self._knocks = Knocks(house.swarm, house.name, house.public_key, time.monotonic())
        self._numbers = itertools.count(1)
        self._writers: dict[int, asyncio.StreamWriter] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._listener: socket.socket | None = None
        self.port = 0

    # --- life --------------------------------------------------------------------------------

    def open(self, host: str, port: int) -> int:
        """Listen on ``port``, or on the first free one below it (0: on any), and return it.

        Raises:
            OSError: none is free.
        """
        self._listener = listen("" if host == "*" else host, port, PORTS_TRIED, _QUEUE)
        self.port = int(self._listener.getsockname()[1])
        self._spawn(self._accept(self._listener))
        return self.port

    async def close(self) -> None:
        """Send everybody away."""
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._listener is not None:
            self._listener.close()

    def tick(self) -> None:
        """Time has passed."""
        self._happened(Passed())

    # --- for members -------------------------------------------------------------------------

    @property
    def waiting(self) -> list[Waiting]:
        """PCs that wait for a person; ``since`` is unix time."""
        began = time.time() - time.monotonic()
        return [
            Waiting(one.name, one.code, one.address, round(began + one.since, 1))
            for one in self._knocks.waiting
        ]

    def judge(self, code: str, by: str, *, refuse: bool) -> str:
        """Let the PC that shows ``code`` in on the word of ``by``, or refuse it; returns its name.

        Raises:
            RequestError: there is no such PC, or it can't be told from another.
            Unavailable: the swarm is full.
            Overloaded: too many join at this moment.
        """
        name = ""
        for decision in self._happened(Judge(code, by, refuse)):
            match decision:
                case Denied(reason):
                    raise RequestError(reason, param="code")
                case Refused():
                    name = decision.name
                case LetIn():
                    name = decision.name
                    self._admit(decision)
        return name

    def _admit(self, decision: LetIn) -> None:
        port, addresses = self._house.where()
        verdict = Verdict(outcome="admitted", port=port, addresses=addresses)
        try:
            self._house.admit(decision.public_key, decision.name, decision.by)
        except ShutOut:
            verdict = Verdict(outcome="revoked")
            raise
        except Unavailable:
            verdict = Verdict(outcome="full")
            raise
        except MolinkError as error:
            verdict = Verdict(outcome="busy" if isinstance(error, Overloaded) else "refused")
            raise
        finally:
            self._tell(Tell(decision.visitor, verdict))

    # --- visitors ----------------------------------------------------------------------------

    def _happened(self, event: Event) -> list[Decision]:
        """Let the decider decide; what is not carried out here is returned."""
        left: list[Decision] = []
        for decision in self._knocks.handle(event, time.monotonic()):
            match decision:
                case Tell():
                    self._tell(decision)
                case HangUp(visitor):
                    self._cut(visitor)
                case Changed():
                    self._house.changed()
                case _:
                    left.append(decision)
        return left

    def _tell(self, decision: Tell) -> None:
        writer = self._writers.get(decision.visitor)
        if writer is None or writer.is_closing():
            return
        writer.write(encode_frame(decision.message))
        if isinstance(decision.message, Verdict):
            del self._writers[decision.visitor]
            writer.close()

    def _cut(self, visitor: int) -> None:
        writer = self._writers.pop(visitor, None)
        if writer is not None:
            writer.transport.abort()

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        pace = TokenBucket(ACCEPTED, loop.time())
        while True:
            await asyncio.sleep(pace.wait(loop.time()))
            try:
                connection, address = await loop.sock_accept(listener)
            except OSError as error:
                log.warning("the porch can't take a connection: %s", error)
                await asyncio.sleep(_PAUSE)
                continue
            pace.take()
            self._spawn(self._visit(connection, str(address[0])))

    async def _visit(self, connection: socket.socket, address: str) -> None:
        try:
            reader, writer = await asyncio.open_connection(sock=connection, limit=2 * MAX_FRAME)
        except OSError:
            connection.close()
            return
        visitor = next(self._numbers)
        self._writers[visitor] = writer
        try:
            self._happened(Arrived(visitor, address, secrets.token_bytes(32)))
            while visitor in self._writers:
                message = await _read(reader)
                self._happened(Said(visitor, message, self._objection(message)))
        except (OSError, WireError, asyncio.IncompleteReadError) as error:
            log.debug("a visitor from %s has gone: %s", address, error)
        finally:
            self._happened(Gone(visitor))
            self._cut(visitor)
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    def _objection(self, message: FromStranger) -> Outcome | None:
        if not isinstance(message, Commitment):
            return None
        if mismatch(Spoken(message.version, message.protocol), ours()):
            return "version"
        return self._house.objection(message.public_key)

    def _spawn(self, work: "asyncio._CoroutineLike[None]") -> None:
        task: asyncio.Task[None] = asyncio.get_running_loop().create_task(work, name="molink-porch")
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("%s failed", task.get_name(), exc_info=task.exception())


async def _read(reader: asyncio.StreamReader) -> FromStranger:
    length = frame_length(await reader.readexactly(LENGTH_BYTES))
    message: FromStranger = decode_frame(await reader.readexactly(length), FromStranger)
    return message
