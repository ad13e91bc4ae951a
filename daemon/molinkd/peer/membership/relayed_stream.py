"""One end of a connection over a relay that may be hostile.

The relay sees only encrypted bytes, but could hold them back, pass them slowly, or cut the
connection. So the ends exchange signs of life that it can't forge
(:class:`molink.wire.messages.relay.SignOfLife`): an end that gets no answer to several in a row
knows that the relay passes nothing on.
"""

import asyncio
import contextlib

from molink.errors import ConnectionBroken, Unavailable, WireError
from molink.wire.messages.relay import RECORD_LENGTH, SIGN_BYTES, Role, SignOfLife
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


class RelayedStream:
    """The end of one connection over a relay."""

    def __init__(self, far: Stream, role: Role, end_secret: bytes, nonce: bytes) -> None:
        """``far`` leads to the relay; ``nonce`` is of this connection."""
        self._far, self._secret, self._nonce = far, end_secret, nonce
        self._role, self._other_role = role, _OTHER[role]
        self._num_signs = self._answered_by_us = self._answered_by_them = 0
        self._sent = self._received = 0

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
                await cancel_tasks(*ways)
            finally:  # it may be cancelled meanwhile
                await self.close(is_last=failure is None)
        if failure is not None:
            raise failure

    @property
    def _num_unanswered(self) -> int:
        return self._num_signs - self._answered_by_them

    async def close(self, *, is_last: bool = True) -> None:
        """Close; ``is_last``: in good order, which the other end is told."""
        writer = self._far[1]
        if not is_last:
            writer.transport.abort()
            return
        self._write_sign(is_last=True)
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
        writer = self._far[1]
        with contextlib.suppress(OSError):
            while data := await local[0].read(CHUNK_BYTES):
                self._sent += len(data)
                writer.write(RECORD_LENGTH.pack(len(data)) + data)
                try:
                    await writer.drain()
                except OSError as error:
                    raise ConnectionBroken("the relay has closed a connection") from error

    async def _receive(self, local: Stream) -> None:
        """Pass on what the other end sends, until it closes."""
        reader = self._far[0]
        while True:
            try:
                (length,) = RECORD_LENGTH.unpack(await reader.readexactly(RECORD_LENGTH.size))
                if length > CHUNK_BYTES:
                    raise WireError("the relay has altered a record")
                data = await reader.readexactly(length or SIGN_BYTES)
            except (OSError, EOFError) as error:
                raise ConnectionBroken("the relay has closed a connection") from error
            if length:
                self._received += length
                local[1].write(data)
                with contextlib.suppress(OSError):  # its end is noticed elsewhere
                    await local[1].drain()
            elif self._check_sign(data):
                return

    def _check_sign(self, data: bytes) -> bool:
        """Check a sign of life; returns whether it is the last."""
        sign = SignOfLife.decode(data, self._other_role, self._secret, self._nonce)
        if (sign.number, sign.sent) != (self._answered_by_us + 1, self._received):
            raise WireError("the relay has dropped or repeated a part")
        self._answered_by_us, self._answered_by_them = sign.number, sign.answered
        return sign.is_last

    async def _send_signs(self) -> None:
        while self._num_unanswered < MAX_UNANSWERED[self._role]:
            self._write_sign()
            await asyncio.sleep(SIGN_INTERVAL_S)
        raise Unavailable("the relay passes nothing on")

    def _write_sign(self, *, is_last: bool = False) -> None:
        self._num_signs += 1
        sign = SignOfLife(self._num_signs, self._answered_by_us, self._sent, is_last)
        data = sign.encode(self._role, self._secret, self._nonce)
        self._far[1].write(RECORD_LENGTH.pack(0) + data)


_OTHER: dict[Role, Role] = {"dials": "waits", "waits": "dials"}
