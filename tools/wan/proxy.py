"""A TCP proxy that delays bytes and limits their rate, on every platform and without root.

It terminates TCP on both sides, so nothing is lost and TCP's windows never see the delay: not for
figures.
"""

import asyncio
import contextlib
import threading
import time
from types import TracebackType
from typing import Self

_CHUNK = 4096
_START_TIMEOUT = 10.0


class _Direction:
    """All connections in one direction: a rate, a bounded queue, a delay."""

    def __init__(self, shaper: "Shaper") -> None:
        self._shaper = shaper
        self._free = 0.0

    async def pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Copy one connection until its end."""
        queue: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()
        sender = asyncio.create_task(self._send_delayed(queue, writer))
        try:
            while data := await reader.read(_CHUNK):
                queue.put_nowait((self._departure_time(len(data)), data))
                await self._wait_until(self._free - self._shaper.queue_bytes / self._rate)
            queue.put_nowait((self._free, b""))
            await sender
        finally:
            sender.cancel()

    @property
    def _rate(self) -> float:
        return self._shaper.mbps * 1e6 / 8 or float("inf")

    def _departure_time(self, nbytes: int) -> float:
        self._free = max(self._free, time.monotonic()) + nbytes / self._rate
        return self._free

    async def _send_delayed(
        self, queue: asyncio.Queue[tuple[float, bytes]], writer: asyncio.StreamWriter
    ) -> None:
        while True:
            at, data = await queue.get()
            await self._wait_until(at + self._shaper.delay_ms / 1000)
            await self._shaper.whole.wait()
            if not data:
                writer.write_eof()
                return
            writer.write(data)
            await writer.drain()

    @staticmethod
    async def _wait_until(at: float) -> None:
        pause = at - time.monotonic()
        if pause > 0:
            await asyncio.sleep(pause)


class Shaper:
    """A proxy on a free loopback port, in a thread, during a ``with`` block."""

    def __init__(
        self,
        host: str,
        port: int,
        *,
        mbps: float = 0.0,
        delay_ms: float = 0.0,
        queue_bytes: int = 256 * 1024,
    ) -> None:
        """Forward to ``host:port``. Rate and delay are per direction and may change at any time."""
        self._target = (host, port)
        self.mbps, self.delay_ms, self.queue_bytes = mbps, delay_ms, queue_bytes
        #: Port to connect to.
        self.port = 0
        self.whole = asyncio.Event()
        self.whole.set()
        self._up, self._down = _Direction(self), _Direction(self)
        self._connections: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._listening = threading.Event()
        self._over = asyncio.Event()
        self._thread = threading.Thread(target=self._serve_all, name="wan-shaper", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        if not self._listening.wait(_START_TIMEOUT):
            raise TimeoutError("the shaper doesn't start")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join()

    def cut(self) -> None:
        """Hold all bytes."""
        self._loop.call_soon_threadsafe(self.whole.clear)

    def mend(self) -> None:
        """End a cut."""
        self._loop.call_soon_threadsafe(self.whole.set)

    def _serve_all(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._run_server())

    async def _run_server(self) -> None:
        server = await asyncio.start_server(self._accept_connection, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        self._listening.set()
        await self._over.wait()
        server.close()
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def _accept_connection(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        task = asyncio.ensure_future(self._relay_connection(reader, writer))
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)

    async def _relay_connection(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        with contextlib.closing(writer):
            try:
                far_reader, far_writer = await asyncio.open_connection(*self._target)
                with contextlib.closing(far_writer):
                    async with asyncio.TaskGroup() as both:
                        both.create_task(self._up.pass_on(reader, far_writer))
                        both.create_task(self._down.pass_on(far_reader, writer))
            except* OSError:
                pass  # one side closed, so both do
