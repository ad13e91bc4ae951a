"""Streams events or lines to a client, with bounded memory."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from aiohttp import web

from molinkd.api.connections import get_request_id
from molinkd.api.problem import Problem, internal_problem, problem_of

_LOG = logging.getLogger(__name__)

#: Bytes buffered for the network before producers must wait.
HIGH_WATER_BYTES = 64 * 1024

_HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}


def find_stream_problem(request: web.Request, error: Exception) -> Problem:
    """Return the problem of an error after the first event; an unexpected one is logged."""
    problem = problem_of(error)
    if problem is not None:
        return problem
    _LOG.error("a stream (%s) failed", get_request_id(request), exc_info=error)
    return internal_problem()


class EventStream:
    """An event stream that sends its headers with the first event.

    Until then an error can still be an ordinary HTTP response. Events pushed in one loop iteration
    leave in one write.
    """

    def __init__(self, request: web.Request, stall_timeout_s: float, content_type: str) -> None:
        self._request = request
        self._stall_timeout = stall_timeout_s
        self._buffer = bytearray()
        self._wake = asyncio.Event()
        self._has_room = asyncio.Event()
        self._has_room.set()
        self._writer: asyncio.Task[None] | None = None
        self._is_ended = False
        self._pushed_at = asyncio.get_running_loop().time()
        self._keepalive_task: asyncio.Task[None] | None = None
        self.response = web.StreamResponse(headers=_HEADERS)
        self.response.content_type = content_type
        self.response.charset = "utf-8"

    @property
    def has_started(self) -> bool:
        """Whether anything was sent."""
        return self._writer is not None

    def push_event(self, event: bytes) -> None:
        """Queue a complete ``data: …`` block or line. Call :meth:`drain_buffer` before the next."""
        self._buffer += event
        self._pushed_at = asyncio.get_running_loop().time()
        if self._writer is None:
            self._writer = asyncio.create_task(self._write_loop())
        self._wake.set()
        if len(self._buffer) >= HIGH_WATER_BYTES:
            self._has_room.clear()

    def start_keepalive(self, event: Callable[[], bytes], seconds: float) -> None:
        """Push ``event()`` after every ``seconds`` without an event."""

        async def breathe() -> None:
            loop = asyncio.get_running_loop()
            while True:
                await asyncio.sleep(self._pushed_at + seconds - loop.time())
                if loop.time() - self._pushed_at >= seconds:
                    self.push_event(event())

        self._keepalive_task = asyncio.create_task(breathe())

    async def drain_buffer(self) -> None:
        """Wait until the buffer has room.

        Raises:
            ConnectionError: the client disconnected or stopped reading.
        """
        if not self._has_room.is_set():
            await self._wait_unless_stalled(self._has_room.wait())
        if self._writer is not None and self._writer.done():
            self._writer.result()

    async def finish_stream(self) -> web.StreamResponse:
        """Send the buffer and end the stream.

        Raises:
            ConnectionError: the client disconnected.
        """
        self._is_ended = True
        self._stop_keepalive()
        self._wake.set()
        if self._writer is not None:
            await self._wait_unless_stalled(self._writer)
        return self.response

    async def abort_stream(self) -> None:
        """Stop writing and close the connection of a disconnected or stalled client."""
        self._stop_keepalive()
        if self._writer is None:
            return
        if self._request.transport is not None:
            self._request.transport.abort()
        self._writer.cancel()
        await asyncio.wait([self._writer])
        if not self._writer.cancelled():
            self._writer.exception()  # expected: the client disconnected

    def _stop_keepalive(self) -> None:
        if self._keepalive_task is not None:
            self._keepalive_task.cancel()

    async def _write_loop(self) -> None:
        try:
            await self.response.prepare(self._request)
            while self._buffer or not self._is_ended:
                if not self._buffer:
                    self._wake.clear()
                    await self._wake.wait()
                    continue
                data, self._buffer = self._buffer, bytearray()
                self._has_room.set()
                await self.response.write(data)
            await self.response.write_eof()
        finally:
            self._has_room.set()

    async def _wait_unless_stalled(self, waiting: Awaitable[object]) -> None:
        try:
            await asyncio.wait_for(waiting, self._stall_timeout)
        except TimeoutError:
            raise ConnectionResetError("the client does not read") from None
