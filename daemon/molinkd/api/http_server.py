"""Runs the endpoint in its own thread with its own event loop.

Its routes are imported at the first connection: they take a quarter of a second of CPU and 20 MB,
which a PC that is never asked saves.

ZeroMQ needs a selector loop on Windows, whose ``select()`` is limited to 512 sockets, so the
endpoint uses a Proactor loop there. On every system a separate loop is unaffected by the daemon's
load.
"""

import asyncio
import contextlib
import errno
import logging
import socket
import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, cast

from molink.errors import PortInUse, UsageError
from molinkd.api.administration import Administration
from molinkd.api.api_settings import ApiSettings
from molinkd.api.backend import Backend

if TYPE_CHECKING:
    from molinkd.api.prompt_worker_pool import PromptTokenizer

_LOG = logging.getLogger(__name__)

DEFAULT_PORT = 5465
#: How many ports to try, starting with the requested one.
PORT_TRIES = 15
#: Interval of the check that the listener is still open, in seconds.
LISTENER_CHECK_S = 1.0
_START_TIMEOUT_S = 30.0
#: Backlog of the system, and connections accepted per loop iteration. The latter is small, so that
#: a new connection's request is read before it counts as the longest idle one.
_BACKLOG, _AT_ONCE = 512, 16
#: Bytes that the system buffers for a client, which it may double. By default it buffers megabytes:
#: a client that doesn't read would be given thousands of tokens before anybody notices.
SEND_BUFFER_BYTES = 64 * 1024
#: A second ``listen()`` has no effect on Windows, whose loop accepts one connection at a time.
_FIRST_BACKLOG = _BACKLOG if sys.platform == "win32" else _AT_ONCE
_IN_USE = frozenset({errno.EADDRINUSE, errno.EACCES, getattr(errno, "WSAEACCES", errno.EACCES)})


class _EarlyConnection(asyncio.Protocol):
    """A connection that waits, unread, for the routes."""

    def __init__(self, arrivals: "asyncio.Queue[asyncio.Transport | None]") -> None:
        self._arrivals = arrivals

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        connection = cast(asyncio.Transport, transport)
        connection.pause_reading()
        self._arrivals.put_nowait(connection)


class EndpointServer:
    """The endpoint's thread. :meth:`start` and :meth:`stop` may be called from any thread."""

    def __init__(
        self,
        backend: Backend,
        settings: ApiSettings,
        make_tokenizer: "Callable[[], PromptTokenizer]",
        make_administration: Callable[[], Administration] | None = None,
    ) -> None:
        """What ``make_tokenizer()`` returns is closed with the endpoint.

        Both are called with the first connection. Without ``make_administration`` there are no
        routes for the owner.
        """
        self._make_tokenizer = make_tokenizer
        self._make_administration = make_administration
        self._backend = backend
        self._settings = settings
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping: asyncio.Event | None = None
        self._started = threading.Event()
        self._failure: BaseException | None = None
        self._port = 0
        self._create_protocol: Callable[[], asyncio.BaseProtocol]
        self._listener: asyncio.Server

    @property
    def port(self) -> int:
        """The port it listens on; 0 before the start."""
        return self._port

    @property
    def loop(self) -> asyncio.AbstractEventLoop | None:
        """The event loop that calls the backend; ``None`` before the start."""
        return self._loop

    @property
    def url(self) -> str:
        """The API's URL for clients on this PC: ``http://127.0.0.1:5465/v1``."""
        host = self._settings.host
        if host in ("0.0.0.0", "::", ""):
            host = "127.0.0.1"
        return f"http://{f'[{host}]' if ':' in host else host}:{self._port}/v1"

    def start(self, port: int = DEFAULT_PORT, stop: int | None = None) -> int:
        """Listen on ``port``, or on the next free port below ``stop``; 0 means any port.

        Returns the port. With ``stop`` ``None`` the default number of ports is tried.

        Raises:
            PortInUse: no port is free.
            UsageError: the address does not belong to this PC.
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
        """Stop listening, let running answers finish briefly, and join the thread. Idempotent."""
        thread, loop, stopping = self._thread, self._loop, self._stopping
        if thread is None or loop is None or stopping is None:
            return
        if thread.is_alive():
            with contextlib.suppress(RuntimeError):  # the loop has already closed
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
        self._loop = asyncio.get_running_loop()
        self._stopping = asyncio.Event()
        # Connections before the routes are there; ``None`` at the end.
        arrivals: asyncio.Queue[asyncio.Transport | None] = asyncio.Queue()
        self._create_protocol = lambda: _EarlyConnection(arrivals)
        self._listener = await self._listen(port, stop)
        self._started.set()
        watching = asyncio.create_task(self._watch_listener(arrivals))
        try:
            first = await arrivals.get()
            if first is not None:
                await self._answer_requests(first, arrivals)
            await watching
        finally:
            watching.cancel()
            await _close(self._listener)

    async def _watch_listener(self, arrivals: "asyncio.Queue[asyncio.Transport | None]") -> None:
        """Keep the listener open until :meth:`stop`, then end ``arrivals``."""
        assert self._stopping is not None
        try:
            while not await _is_set_within(self._stopping, LISTENER_CHECK_S):
                # A Proactor loop closes its listener when a client resets early.
                if any(one.fileno() < 0 for one in self._listener.sockets):
                    self._listener.close()
                    self._listener = await self._listen(self._port)
        finally:
            arrivals.put_nowait(None)

    async def _answer_requests(
        self, first: asyncio.Transport, arrivals: "asyncio.Queue[asyncio.Transport | None]"
    ) -> None:
        """Load the routes, and answer all connections from ``first`` on until :meth:`stop`."""
        from aiohttp import web

        from molinkd.api.app import ANSWERS, BODIES, create_app
        from molinkd.api.connections import Connections

        tokenizer = self._make_tokenizer()
        make_owner = self._make_administration
        owner = None if make_owner is None else make_owner()
        app = create_app(self._backend, self._settings, tokenizer, owner)
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
            self._create_protocol = connections.create_protocol
            connection: asyncio.Transport | None = first
            while connection is not None:
                if not connection.is_closing():
                    protocol = connections.create_protocol()
                    connection.set_protocol(protocol)
                    protocol.connection_made(connection)
                    connection.resume_reading()
                connection = await arrivals.get()
            await _close(self._listener)
            await app[ANSWERS].shut_down(self._settings.shutdown_grace_period_s)
        finally:
            await runner.cleanup()
            await tokenizer.close()

    async def _listen(self, port: int, stop: int | None = None) -> asyncio.Server:
        loop = asyncio.get_running_loop()
        host = self._settings.host
        if stop is None:
            stop = min(port + PORT_TRIES, 65536) if port else 1
        for candidate in range(port, stop):
            try:
                listener = await loop.create_server(
                    lambda: self._create_protocol(), host, candidate, backlog=_FIRST_BACKLOG
                )
            except OSError as error:
                if error.errno not in _IN_USE:
                    raise UsageError(f"the endpoint can't listen on {host}: {error}") from error
                continue
            for waiting in listener.sockets:
                # Accepted sockets inherit it.
                waiting.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
                with waiting.dup() as copy:  # asyncio sets one number for both
                    copy.listen(_BACKLOG)
            self._port = int(listener.sockets[0].getsockname()[1])
            return listener
        span = f"port {port} is" if stop == port + 1 else f"ports {port} to {stop - 1} are"
        raise PortInUse(
            f"{span} in use (or not permitted) on {host}: free one, or choose another with "
            "--api-port"
        )


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    if sys.platform == "win32":
        return asyncio.ProactorEventLoop
    return None


async def _close(listener: asyncio.Server) -> None:
    """Close the listener once its accepted connections are handed over."""
    if sys.platform != "win32":  # a Proactor loop takes over at once
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
