"""One end of a connection over a relay that may be hostile.

The relay sees only encrypted bytes, but could hold them back, pass them slowly, or cut the
connection. So the ends exchange signs of life that it can't forge
(:class:`molink.wire.messages.relay.SignOfLife`): an end that gets no answer to several in a row
knows that the relay passes nothing on.

The connection can move while it is used: to a direct one, or to another relay. The end that dials
opens the next TCP connection, on which both prove themselves; each end then sends a last sign of
life over the former one, and all further records over the next. No byte is lost or repeated, and
the programs that use the stream don't notice.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

from molink.errors import ConnectionBroken, Unavailable, WireError
from molink.wire.messages.relay import (
    CHOSEN,
    RECORD_LENGTH,
    SIGN_BYTES,
    Role,
    SignKind,
    SignOfLife,
)
from molinkd.peer.membership.hole_punching import exchange_proofs
from molinkd.splice import CHUNK_BYTES, Stream
from molinkd.tasks import cancel_tasks

#: Seconds between two signs of life, and how many may be unanswered: what waits before them on a
#: slow line may take some seconds. Time in which this process does not run doesn't count. The end
#: that dials reports the relay, so the other one is more patient.
SIGN_INTERVAL_S = 0.25
MAX_UNANSWERED: dict[Role, int] = {"dials": 48, "waits": 96}
#: How many may be unanswered when an end closes: a stage gives up a silent connection after 1.4 s.
MAX_UNANSWERED_AT_END = 5
#: Seconds until a closed connection has sent its last bytes.
_CLOSE_S = 2.0
#: How long the other end may take to agree to a direct connection, and to choose one, in seconds.
_AGREE_S = 5.0
#: Round trips of a measurement, of which the shortest counts.
_NUM_ROUND_TRIPS = 5
#: In the place of a route's id: the connection is a direct one.
NO_ROUTE = 0

#: Opens a connection on which the ends have proved themselves; raises ``OSError`` or ``EOFError``.
OpenCarrier = Callable[[], Awaitable[Stream]]


class RelayedStream:
    """The end of one connection over a relay."""

    def __init__(
        self,
        far: Stream,
        role: Role,
        end_secret: bytes,
        nonce: bytes,
        route: int,
        open_direct: OpenCarrier | None = None,
        on_moved: Callable[[float], None] = lambda _: None,
        *,
        leaves_at_once: bool = True,
    ) -> None:
        """``far`` leads to the relay of the route with that id; ``nonce`` is of this connection.

        Without ``open_direct`` it tries no direct connection, without ``leaves_at_once`` only when
        asked to. ``on_moved()`` gets the seconds that the dialling end took to open it.
        """
        self._reader, self._writer = far
        self._secret, self.nonce = end_secret, nonce
        self.role, self._other_role = role, _OTHER[role]
        self._num_signs = self._answered_by_us = self._answered_by_them = 0
        self._sent = self._received = 0
        self._open_direct, self._on_moved = open_direct, on_moved
        self._leaves_at_once = leaves_at_once
        self._agreed = asyncio.Event()
        #: Id of the route that carries the bytes, or ``NO_ROUTE``.
        self.route = route
        #: Of all connections that may be open, from the first to the next.
        self._writers = [far[1]]
        #: The next connection, and the id of its route. Only the end that dials opens one.
        self._next: asyncio.Task[Stream] | None = None
        self._next_route = route
        self._moving = asyncio.Lock()
        #: Not set while the dialling end has moved, and the other end not yet.
        self._has_moved = asyncio.Event()
        self._has_moved.set()
        #: A sign of life that is measured: its number, and when it is answered.
        self._measured: tuple[int, asyncio.Future[None]] | None = None
        #: Set once it is clear whether the bytes go directly: :attr:`is_direct`.
        self.is_settled = asyncio.Event()
        self.is_over = False

    @property
    def is_direct(self) -> bool:
        """Whether the bytes have left the relay."""
        return self.route == NO_ROUTE

    async def splice(self, local: Stream) -> None:
        """Copy bytes in both directions until either end closes; then close both.

        Raises:
            ConnectionBroken: the relay has closed the connection, or passed nothing on at the end.
            Unavailable: the relay passes nothing on.
            WireError: it alters what it passes on.
        """
        ways = [
            asyncio.ensure_future(way)
            for way in (self._send_local(local), self._receive(local), self._send_signs())
        ]
        leaving = asyncio.ensure_future(self._settle())
        failure: BaseException | None = None
        try:
            done, _ = await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            failures = [way.exception() for way in done]
            if all(failures):
                failure = failures[0]
            elif self._num_unanswered > MAX_UNANSWERED_AT_END:
                failure = ConnectionBroken("the relay passed nothing on at the end")
        finally:
            local[1].transport.abort()
            self._end_moves()
            try:
                await cancel_tasks(*ways, leaving, self._next)
            finally:  # it may be cancelled meanwhile
                await self.close(is_last=failure is None)
        if failure is not None:
            raise failure
        if not leaving.cancelled():
            leaving.result()

    @property
    def _num_unanswered(self) -> int:
        return self._num_signs - self._answered_by_them

    async def close(self, *, is_last: bool = True) -> None:
        """Close; ``is_last``: in good order, which the other end is told."""
        writer, self.is_over = self._writer, True
        self._drop_others()
        if not is_last:
            writer.transport.abort()
            return
        self._write_sign(SignKind.LAST)
        writer.close()
        try:
            async with asyncio.timeout(_CLOSE_S):
                await writer.wait_closed()
        except (OSError, TimeoutError):
            pass
        finally:
            writer.transport.abort()

    async def _send_local(self, local: Stream) -> None:
        """Send what this PC's program sends, until it closes."""
        with contextlib.suppress(OSError):
            while data := await local[0].read(CHUNK_BYTES):
                self._sent += len(data)
                self._writer.write(RECORD_LENGTH.pack(len(data)) + data)
                try:
                    await self._writer.drain()
                except OSError as error:
                    raise ConnectionBroken("the relay has closed a connection") from error

    async def _receive(self, local: Stream) -> None:
        """Pass on what the other end sends, until it closes."""
        while True:
            try:
                size = RECORD_LENGTH.size
                (length,) = RECORD_LENGTH.unpack(await self._reader.readexactly(size))
                if length > CHUNK_BYTES:
                    raise WireError("the relay has altered a record")
                data = await self._reader.readexactly(length or SIGN_BYTES)
            except (OSError, EOFError) as error:
                raise ConnectionBroken("the relay has closed a connection") from error
            if length:
                self._received += length
                local[1].write(data)
                with contextlib.suppress(OSError):  # its end is noticed elsewhere
                    await local[1].drain()
            else:
                kind = self._check_sign(data)
                if kind is SignKind.LAST:
                    return
                await self._on_sign(kind)

    def _check_sign(self, data: bytes) -> SignKind:
        """Check a sign of life; returns what else it says."""
        sign = SignOfLife.decode(data, self._other_role, self._secret, self.nonce)
        if (sign.number, sign.sent) != (self._answered_by_us + 1, self._received):
            raise WireError("the relay has dropped or repeated a part")
        self._answered_by_us, self._answered_by_them = sign.number, sign.answered
        if self._measured is not None and sign.answered >= self._measured[0]:
            answered, self._measured = self._measured[1], None
            if not answered.done():
                answered.set_result(None)
        return sign.kind

    async def _send_signs(self) -> None:
        while self._num_unanswered < MAX_UNANSWERED[self.role]:
            self._write_sign()
            await asyncio.sleep(SIGN_INTERVAL_S)
        raise Unavailable("the relay passes nothing on")

    def _write_sign(self, kind: SignKind = SignKind.ALIVE) -> None:
        self._num_signs += 1
        sign = SignOfLife(self._num_signs, self._answered_by_us, self._sent, kind)
        data = sign.encode(self.role, self._secret, self.nonce)
        self._writer.write(RECORD_LENGTH.pack(0) + data)

    async def measure_latency(self) -> float:
        """One-way latency in seconds: half of the shortest of a few round trips.

        The signs of life count the bytes before them, so a relay can't answer in the other end's
        place, nor let them overtake data.

        Raises:
            ConnectionBroken: The connection has ended.
        """
        loop, trips = asyncio.get_running_loop(), []
        for _ in range(_NUM_ROUND_TRIPS):
            if self.is_over:
                raise ConnectionBroken("the connection has ended")
            started = loop.time()
            self._write_sign(SignKind.ASK_SIGN)
            answered: asyncio.Future[None] = loop.create_future()
            self._measured = self._num_signs, answered
            await answered
            trips.append(loop.time() - started)
        return min(trips) / 2

    # --- the next connection ---------------------------------------------------------------------

    async def move_to(self, open_carrier: OpenCarrier, route: int) -> None:
        """Move to the connection that ``open_carrier()`` returns, which belongs to ``route``.

        For the end that dials. A direct connection stays.

        Raises:
            OSError, EOFError: It can't be opened; the former one stays. Includes ``TimeoutError``.
            ConnectionBroken: The stream has ended meanwhile.
        """
        async with self._moving:
            if not self.is_direct:
                await self._move(open_carrier, route)

    async def _move(self, open_carrier: OpenCarrier, route: int) -> None:
        coming = self._expect_carrier(open_carrier, route)
        try:
            await asyncio.wait([coming])
        finally:
            coming.cancel()  # unless it is done
        if self.is_over or coming.cancelled():
            raise ConnectionBroken("the connection has ended")
        former, stream = self._writer, coming.result()
        self._has_moved.clear()
        self._move_writer(stream)
        await self._has_moved.wait()
        if self.route != route:
            raise ConnectionBroken("the connection has ended")
        # Not earlier: the other end has sent its last sign over it.
        former.close()

    def accept_move(self, open_carrier: OpenCarrier, route: int) -> None:
        """Move to the connection that ``open_carrier()`` returns when the other end does.

        For the end that waits. ``open_carrier()`` makes sure that it is the other end's.

        Raises:
            ConnectionBroken: The stream has ended.
        """
        if self.is_over:
            raise ConnectionBroken("the connection has ended")
        self._expect_carrier(open_carrier, route)

    async def prove_carrier(self, carrier: Stream) -> None:
        """Prove the ends to each other on a connection to move to.

        Raises:
            OSError, EOFError: The connection was lost, or the other side is a stranger.
        """
        await exchange_proofs(carrier, self.role, self._secret, self.nonce)
        if self.role == "dials":
            carrier[1].write(CHOSEN)

    async def try_direct(self) -> None:
        """Agree with the other end on a direct connection, and move to it.

        Raises:
            OSError: There is none. Includes ``TimeoutError``.
            ConnectionBroken: The stream has ended meanwhile.
        """
        async with self._moving:
            if self._open_direct is None or self.is_direct:
                return
            loop = asyncio.get_running_loop()
            asked_at = loop.time()
            self._agreed.clear()
            self._write_sign(SignKind.ASK_DIRECT)
            async with asyncio.timeout(_AGREE_S):
                await self._agreed.wait()
            self._write_sign(SignKind.START_DIRECT)
            # The other end starts when that arrives.
            await asyncio.sleep((loop.time() - asked_at) / 2)
            await self._move(self._open_direct, NO_ROUTE)
            self._on_moved(loop.time() - asked_at)

    async def leave_relay(self) -> None:
        """Move to a direct connection if there can be one; for the end that dials."""
        with contextlib.suppress(OSError, EOFError, ConnectionBroken):  # else the relay stays
            await self.try_direct()

    async def _settle(self) -> None:
        if self.role == "dials" and self._leaves_at_once:
            await self.leave_relay()
        self.is_settled.set()

    def _expect_carrier(self, open_carrier: OpenCarrier, route: int) -> "asyncio.Task[Stream]":
        """Open the next connection, in the place of one that the ends did not move to."""
        self._drop_next()
        self._next = asyncio.ensure_future(self._open_carrier(open_carrier))
        self._next.add_done_callback(lambda opened: opened.cancelled() or opened.exception())
        self._next_route = route
        return self._next

    async def _open_carrier(self, open_carrier: OpenCarrier) -> Stream:
        stream = await open_carrier()
        self._writers.append(stream[1])
        return stream

    def _drop_next(self) -> None:
        """Give up a connection that the ends have opened, but not moved to."""
        if self._next is not None:
            self._next.cancel()
            if len(self._writers) > 1 and self._writers[-1] is not self._writer:
                unused = self._writers.pop()
                unused.transport.abort()
            self._next = None

    async def _on_sign(self, kind: SignKind) -> None:
        match kind:
            case SignKind.ASK_DIRECT if self.role == "waits" and self._open_direct is not None:
                self._write_sign(SignKind.AGREE_DIRECT)
            case SignKind.AGREE_DIRECT:
                self._agreed.set()
            case SignKind.START_DIRECT if self.role == "waits" and self._open_direct is not None:
                self._expect_carrier(self._open_direct, NO_ROUTE)
            case SignKind.ASK_SIGN:
                self._write_sign()
            case SignKind.MOVED:
                await self._move_reader()

    async def _move_reader(self) -> None:
        """Read on from the next connection, to which the other end has moved.

        Raises:
            WireError: There is none.
        """
        absent = "the other end has moved to a connection that isn't there"
        if self._next is None or (self.role == "dials" and self._has_moved.is_set()):
            raise WireError(absent)
        try:
            async with asyncio.timeout(_AGREE_S):
                stream = await asyncio.shield(self._next)
        except (OSError, EOFError):  # includes TimeoutError
            raise WireError(absent) from None
        if self.role == "waits":
            self._move_writer(stream)
        self._reader = stream[0]
        self.route, self._next = self._next_route, None
        self._open_direct = None  # it is of the former connection's port
        self._has_moved.set()

    def _move_writer(self, stream: Stream) -> None:
        # Of those before, the other end has closed all but the one that is left now.
        while self._writers[0] is not self._writer:
            former = self._writers.pop(0)
            former.transport.abort()
        self._write_sign(SignKind.MOVED)
        self._writer = stream[1]

    def _end_moves(self) -> None:
        """Let nobody wait any more for what will not happen."""
        self.is_over = True
        self._has_moved.set()
        if self._measured is not None and not self._measured[1].done():
            self._measured[1].set_exception(ConnectionBroken("the connection has ended"))

    def _drop_others(self) -> None:
        """Close the connections that aren't used any more, or not yet."""
        for transport in (one.transport for one in self._writers if one is not self._writer):
            if transport.get_write_buffer_size():
                transport.abort()
            else:
                transport.close()  # the last sign of life may be on its way


_OTHER: dict[Role, Role] = {"dials": "waits", "waits": "dials"}
