"""One end of a connection over a relay that may be hostile.

The relay sees only encrypted bytes, but could hold them back, pass them slowly, or cut the
connection. So the ends exchange signs of life that it can't forge
(:class:`molink.wire.messages.relay.SignOfLife`): an end that gets no answer to several in a row
knows that the relay passes nothing on.

The ends also try to open a direct connection, and if they can, they move to it: each sends a last
sign of life over the relay, and all further records directly. No byte is lost or repeated, and the
programs that use the stream don't notice.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

from molink.errors import ConnectionBroken, Unavailable, WireError
from molink.wire.messages.relay import RECORD_LENGTH, SIGN_BYTES, Role, SignKind, SignOfLife
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

#: Opens a direct connection to the other end, which does the same; raises ``TimeoutError``.
OpenDirect = Callable[[], Awaitable[Stream]]


class RelayedStream:
    """The end of one connection over a relay."""

    def __init__(
        self,
        far: Stream,
        role: Role,
        end_secret: bytes,
        nonce: bytes,
        open_direct: OpenDirect | None = None,
        on_moved: Callable[[float], None] = lambda _: None,
    ) -> None:
        """``far`` leads to the relay; ``nonce`` is of this connection.

        Without ``open_direct`` it stays with the relay. ``on_moved()`` gets the seconds that the
        dialling end took to leave it.
        """
        self._relay, self._secret, self._nonce = far, end_secret, nonce
        self._reader, self._writer = far
        self._role, self._other_role = role, _OTHER[role]
        self._num_signs = self._answered_by_us = self._answered_by_them = 0
        self._sent = self._received = 0
        self._open_direct, self._on_moved = open_direct, on_moved
        self._direct: asyncio.Task[Stream] | None = None
        self._agreed = asyncio.Event()
        #: Set once it is clear whether the bytes go directly: :attr:`is_direct`.
        self.is_settled = asyncio.Event()
        self.is_direct = False

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
        moving = asyncio.ensure_future(self._negotiate_direct())
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
            try:
                await cancel_tasks(*ways, moving)
                await cancel_tasks(self._direct)
            finally:  # it may be cancelled meanwhile
                await self.close(is_last=failure is None)
        if failure is not None:
            raise failure
        if moving.done() and not moving.cancelled():
            moving.result()

    @property
    def _num_unanswered(self) -> int:
        return self._num_signs - self._answered_by_them

    async def close(self, *, is_last: bool = True) -> None:
        """Close; ``is_last``: in good order, which the other end is told."""
        writer = self._writer
        self._drop_other(writer)
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
        sign = SignOfLife.decode(data, self._other_role, self._secret, self._nonce)
        if (sign.number, sign.sent) != (self._answered_by_us + 1, self._received):
            raise WireError("the relay has dropped or repeated a part")
        self._answered_by_us, self._answered_by_them = sign.number, sign.answered
        return sign.kind

    async def _send_signs(self) -> None:
        while self._num_unanswered < MAX_UNANSWERED[self._role]:
            self._write_sign()
            await asyncio.sleep(SIGN_INTERVAL_S)
        raise Unavailable("the relay passes nothing on")

    def _write_sign(self, kind: SignKind = SignKind.ALIVE) -> None:
        self._num_signs += 1
        sign = SignOfLife(self._num_signs, self._answered_by_us, self._sent, kind)
        data = sign.encode(self._role, self._secret, self._nonce)
        self._writer.write(RECORD_LENGTH.pack(0) + data)

    # --- the direct connection -------------------------------------------------------------------

    async def _negotiate_direct(self) -> None:
        """Ask the other end for a direct connection, and move to it; for the end that dials."""
        loop = asyncio.get_running_loop()
        try:
            if self._role != "dials" or self._open_direct is None:
                return
            asked_at = loop.time()
            self._write_sign(SignKind.ASK_DIRECT)
            async with asyncio.timeout(_AGREE_S):
                await self._agreed.wait()
            self._write_sign(SignKind.START_DIRECT)
            # The other end starts when that arrives.
            await asyncio.sleep((loop.time() - asked_at) / 2)
            self._start_direct()
            assert self._direct is not None
            self._move_writer(await self._direct)
            self._on_moved(loop.time() - asked_at)
        except OSError:  # includes TimeoutError
            pass  # the relay stays
        finally:
            if not self.is_direct:
                self.is_settled.set()

    def _start_direct(self) -> None:
        if self._direct is None and self._open_direct is not None:
            self._direct = asyncio.ensure_future(self._open_direct())

    async def _on_sign(self, kind: SignKind) -> None:
        match kind:
            case SignKind.ASK_DIRECT if self._role == "waits" and self._open_direct is not None:
                self._write_sign(SignKind.AGREE_DIRECT)
            case SignKind.AGREE_DIRECT:
                self._agreed.set()
            case SignKind.START_DIRECT if self._role == "waits":
                self._start_direct()
            case SignKind.MOVED:
                await self._move_reader()

    async def _move_reader(self) -> None:
        """Read on from the direct connection, which the other end has chosen.

        Raises:
            WireError: There is none.
        """
        absent = "the other end has moved to a connection that isn't there"
        if self._direct is None:
            raise WireError(absent)
        try:
            async with asyncio.timeout(_AGREE_S):
                stream = await asyncio.shield(self._direct)
        except OSError:  # includes TimeoutError
            raise WireError(absent) from None
        if self._role == "waits":
            self._move_writer(stream)
        self._reader = stream[0]
        self.is_direct = True
        self.is_settled.set()
        if self._role == "dials":  # the other end may still be sending its last sign
            self._relay[1].close()

    def _move_writer(self, stream: Stream) -> None:
        self._write_sign(SignKind.MOVED)
        self._writer = stream[1]

    def _drop_other(self, kept: asyncio.StreamWriter) -> None:
        """Close the connection that isn't used any more, or not yet."""
        others = [self._relay[1]]
        with contextlib.suppress(asyncio.CancelledError, asyncio.InvalidStateError, OSError):
            if self._direct is not None:
                others.append(self._direct.result()[1])
        for transport in (one.transport for one in others if one is not kept):
            if transport.get_write_buffer_size():
                transport.abort()
            else:
                transport.close()  # the last sign of life may be on its way


_OTHER: dict[Role, Role] = {"dials": "waits", "waits": "dials"}
