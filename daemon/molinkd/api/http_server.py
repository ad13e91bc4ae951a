"""Runs the endpoint on an event loop of its own, in a thread of its own.

ZeroMQ needs a selector loop on Windows, whose ``select()`` ends at 512 sockets; the endpoint has a
Proactor loop there, and everywhere it is safe from whatever keeps the daemon's loop busy.
"""

import asyncio
import contextlib
import errno
import logging
import sys
import threading
from collections.abc import Callable

from aiohttp import web

from molink.errors import PortInUse, UsageError
from molinkd.api.api_settings import ApiSettings
from molinkd.api.app import ANSWERS, BODIES, create_app
from molinkd.api.backend import Backend
from molinkd.api.connections import Connections
from molinkd.api.prompt_worker_pool import PromptTokenizer

_LOG = logging.getLogger(__name__)

DEFAULT_PORT = 5465
#: How many ports are tried from the one asked for.
PORT_TRIES = 15
#: How often to look whether the listener is still there, in seconds.
LISTENER_CHECK_S = 1.0
_START_TIMEOUT_S = 30.0
#: Connections that the system keeps until they are accepted, and that are accepted in one round of
#: the loop. Few, so that a new one's request is read before it counts as the longest idle one.
_BACKLOG, _AT_ONCE = 512, 16
#: A second ``listen()`` changes nothing on Windows, whose loop accepts one at a time anyway.
_FIRST_BACKLOG = _BACKLOG if sys.platform == "win32" else _AT_ONCE
_IN_USE = frozenset({errno.EADDRINUSE, errno.EACCES, getattr(errno, "WSAEACCES", errno.EACCES)})


class EndpointServer:
    """The endpoint as a thread: :meth:`start` it, :meth:`stop` it, both from any thread."""

    def __init__(
        self,
        backend: Backend,
        settings: ApiSettings,
        reader: PromptTokenizer,
    ) -> None:
        """``reader`` is closed with the endpoint."""
        self._prompt_tokenizer = reader
        self._backend = backend
        self._settings = settings
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping: asyncio.Event | None = None
        self._started = threading.Event()
        self._failure: BaseException | None = None
        self._port = 0

    @property
    def port(self) -> int:
        """The port it listens on; 0 before it started."""
        return self._port

    @property
    def loop(self) -> asyncio.AbstractEventLoop | None:
        """The event loop that the backend is called on; ``None`` before it started."""
        return self._loop

    @property
    def url(self) -> str:
        """Where a client on this PC finds the API: ``http://127.0.0.1:5465/v1``."""
        host = self._settings.host
        if host in ("0.0.0.0", "::", ""):
            host = "127.0.0.1"
        return f"http://{f'[{host}]' if ':' in host else host}:{self._port}/v1"

    def start(self, port: int = DEFAULT_PORT, stop: int | None = None) -> int:
        """Listen on ``port``, or on the next free one below ``stop``; 0 takes any.

        Returns the port taken. ``None``: as many are tried as usual.

        Raises:
            PortInUse: neither ``port`` nor one of the next is free.
            UsageError: the address is none of this PC's.
        """
        if self._thread is not None:
            raise UsageError("the endpoint has already been started")
        self._thread = threading.Thread(
            target=self._run, args=(port, stop), name="molink-endpoint", daemon=True
        )
        self._thread.start()
        if not self._started.wait(_START_TIMEOUT_S):
            raise UsageError(f"the endpoint did not start within {_START_TIMEOUT_S:.0f} s")
        if self._failure is not None:
            self._thread.join()
            raise self._failure
        return self._port

    def stop(self) -> None:
        """Stop listening, give running answers a moment, end the thread. May be called twice."""
        thread, loop, stopping = self._thread, self._loop, self._stopping
        if thread is None or loop is None or stopping is None:
            return
        if thread.is_alive():
            with contextlib.suppress(RuntimeError):  # the loop has closed: it stopped by itself
                loop.call_soon_threadsafe(stopping.set)
            thread.join()

    def _run(self, port: int, stop: int | None) -> None:
        try:
            with asyncio.Runner(loop_factory=_loop_factory()) as runner:
                runner.run(self._serve(port, stop))
        except BaseException as error:
            self._failure = error
            if self._started.is_set():
                _LOG.exception("the endpoint stopped")
        finally:
            self._started.set()

    async def _serve(self, port: int, stop: int | None) -> None:
        loop = asyncio.get_running_loop()
        app = create_app(self._backend, self._settings, self._prompt_tokenizer)
        runner = web.AppRunner(
            app,
            handler_cancellation=True,
            access_log=None,
            shutdown_timeout=self._settings.close_timeout_s,
        )
        await runner.setup()
        try:
            assert runner.server is not None
            connections = Connections(runner.server, self._settings, app[BODIES])
            listener = await self._listen(connections, port, stop)
            try:
                stopping = self._stopping = asyncio.Event()
                self._loop = loop
                self._started.set()
                while not await _is_set_within(stopping, LISTENER_CHECK_S):
                    # A Proactor loop closes its listener when a client resets too early.
                    if any(socket.fileno() < 0 for socket in listener.sockets):
                        listener.close()
                        listener = await self._listen(connections, self._port)
            finally:
                await _close(listener)
            await app[ANSWERS].shut_down(self._settings.shutdown_grace_period_s)
        finally:
            await runner.cleanup()
            await self._prompt_tokenizer.close()

    async def _listen(
        self, connections: Connections, port: int, stop: int | None = None
    ) -> asyncio.Server:
        loop = asyncio.get_running_loop()
        host = self._settings.host
        if stop is None:
            stop = min(port + PORT_TRIES, 65536) if port else 1
        for candidate in range(port, stop):
            try:
                listener = await loop.create_server(
                    connections.create_protocol, host, candidate, backlog=_FIRST_BACKLOG
                )
            except OSError as error:
                if error.errno not in _IN_USE:
                    raise UsageError(f"the endpoint can't listen on {host}: {error}") from error
                continue
            for waiting in listener.sockets:
                with waiting.dup() as copy:  # asyncio has one number for both
                    copy.listen(_BACKLOG)
            self._port = int(listener.sockets[0].getsockname()[1])
            return listener
        span = f"port {port} is" if stop == port + 1 else f"ports {port} to {stop - 1} are"
        raise PortInUse(
            f"{span} taken (or not allowed) on {host}: free one, or choose another with --api-port"
        )


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    if sys.platform == "win32":
        return asyncio.ProactorEventLoop
    return None


async def _close(listener: asyncio.Server) -> None:
    """Listen no more. A closed server never takes up what it accepted a moment ago, so that goes
    first."""
    with contextlib.suppress(NotImplementedError):  # a Proactor loop takes up as it accepts
        for waiting in listener.sockets:
            asyncio.get_running_loop().remove_reader(waiting)
        await asyncio.sleep(0)
    listener.close()


async def _is_set_within(event: asyncio.Event, seconds: float) -> bool:
    try:
        await asyncio.wait_for(event.wait(), seconds)
    except TimeoutError:
        return False
    return True
