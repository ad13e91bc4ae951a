"""Connections to the endpoint: how many there may be, which go first, what of them is logged."""

import asyncio
import logging
from collections import Counter

from aiohttp import web
from aiohttp.abc import AbstractAccessLogger

from molink.plaintext import printable
from molinkd.api.access_guard import PUBLIC_PATHS, client_name
from molinkd.api.api_settings import ApiSettings
from molinkd.api.body_reader import BodyReader
from molinkd.api.problem import Problem, ProblemError, internal_problem
from molinkd.api.request_id import get_request_id

_ACCESS_LOG = logging.getLogger("molinkd.api.access")

#: What is asked every second, by whoever watches a daemon: no news.
PROBE_PATHS = PUBLIC_PATHS | {"/metrics"}
#: How long a client whose connection or body was refused may take to read why.
_REFUSAL_LINGER_S = 1.0
#: How many connections a client may have at work for each that nobody uses.
_BUSY_PER_UNUSED = 8
#: Refused connections that may be reading at once; further ones are cut off without a word.
_MAX_REFUSALS = 64


class AccessLog(AbstractAccessLogger):
    """A line for each request that is no probe."""

    def log(self, request: web.BaseRequest, response: web.StreamResponse, time: float) -> None:
        """aiohttp's: ``request`` was answered, in ``time`` seconds."""
        level = logging.DEBUG if request.path in PROBE_PATHS else logging.INFO
        path = printable(request.path[:256])
        client = printable(client_name(request)[:64])
        self.logger.log(
            level,
            "%s %s %d %.3f s, for %s, %s",
            request.method,
            path,
            response.status,
            time,
            client,
            get_request_id(request),
        )


class EndpointProtocol(web.RequestHandler):
    """A connection that is closed if its first request doesn't come in time.

    aiohttp bounds the pauses between requests (keep-alive) but not the wait for the first one.
    Bodies stay as they came: one that is refused must not be inflated before.
    """

    __slots__ = ("_header_timeout", "_header_timer", "_others")

    def __init__(
        self,
        manager: web.Server,
        *,
        loop: asyncio.AbstractEventLoop,
        settings: ApiSettings,
        others: "Connections",
    ) -> None:
        super().__init__(
            manager,
            loop=loop,
            access_log=_ACCESS_LOG,
            access_log_class=AccessLog,
            auto_decompress=False,
            keepalive_timeout=settings.keepalive_s,
            lingering_time=_REFUSAL_LINGER_S,
        )
        self._others = others
        self._header_timeout = settings.header_timeout_s
        self._header_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Start the wait for a request."""
        if not self._others.admit_connection(self, transport):
            return
        super().connection_made(transport)
        loop = asyncio.get_running_loop()
        self._header_timer = loop.call_later(self._header_timeout, self.force_close)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """What is no HTTP gets an envelope as well, and no traceback in the log."""
        problem = internal_problem()
        if status < 500:
            problem = Problem(status, f"no valid HTTP: {message}", code="bad_request")
        else:
            super().handle_error(request, status, exc, message)  # logs it
        answer = problem.to_response()
        answer.force_close()
        return answer

    def connection_lost(self, exc: BaseException | None) -> None:
        """The client has gone."""
        self.on_request_start()
        self._others.remove_connection(self)
        super().connection_lost(exc)

    def on_request_start(self) -> None:
        """A request's headers are complete."""
        self._others.mark_busy(self)
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def assign_client(self, client: str) -> None:
        """The request that has begun is of ``who``; see :meth:`Connections.assign_client`."""
        self._others.assign_client(self, client)

    def on_request_end(self) -> None:
        """Its answer has been written."""
        self._others.mark_idle(self)


class RefusedConnection(asyncio.Protocol):
    """A connection beyond the limit: told so and closed.

    It stays open for a moment, as closing it on what the client is still sending would reset it
    before the client has read the answer.
    """

    def __init__(self, refused: "set[RefusedConnection]") -> None:
        self._refused = refused
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Answer at once; what the client sends is ignored."""
        assert isinstance(transport, asyncio.Transport)
        if len(self._refused) >= _MAX_REFUSALS:
            transport.abort()
            return
        self._refused.add(self)
        text = "too many connections to the endpoint; close some, or try again"
        body = Problem(503, text, "server_error", None, "too_many_connections").to_json()
        head = (
            "HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\nRetry-After: 1\r\nConnection: close\r\n\r\n"
        )
        transport.write(head.encode() + body)
        if transport.can_write_eof():
            transport.write_eof()
        self._timer = asyncio.get_running_loop().call_later(_REFUSAL_LINGER_S, transport.abort)

    def connection_lost(self, exc: BaseException | None) -> None:
        """The client has gone."""
        self._refused.discard(self)
        if self._timer is not None:
            self._timer.cancel()


class Connections:
    """The connections of an endpoint; at most ``settings.max_connections`` that are served.

    Beyond that the one goes that has been idle for longest, of the address with most of them; if
    all are at work, the one whose body is late most. Only where every one waits for its answer a
    new one is refused.

    Where there may be several clients, each has :data:`_BUSY_PER_UNUSED` times as many connections
    at work as there are that nobody has: eight ninths of all if it is alone, and ``n`` that want as
    many as they can get ``8 / (8 n + 1)`` each, once those have ended that were there before
    (dynamic thresholds; Choudhury and Hahne, "Dynamic queue length thresholds for shared-memory
    packet switches", 1998). So there are always some for another one, and no answer is cut off for
    it.
    """

    def __init__(self, server: web.Server, settings: ApiSettings, bodies: BodyReader) -> None:
        self._server = server
        self._settings = settings
        self._body_reader = bodies
        #: Those that are served; of them, those without a request that is answered, longest first,
        #: with their clients' addresses, and those with one, with their clients' names.
        self._open: dict[EndpointProtocol, str] = {}
        self._idle: dict[EndpointProtocol, str] = {}
        self._busy: dict[EndpointProtocol, str] = {}
        self._has_single_client = settings.loopback and len(settings.keys) < 2
        self._refused: set[RefusedConnection] = set()

    def create_protocol(self) -> asyncio.Protocol:
        """The protocol of a connection that has just been accepted."""
        loop = asyncio.get_running_loop()
        return EndpointProtocol(self._server, loop=loop, settings=self._settings, others=self)

    def admit_connection(
        self, connection: EndpointProtocol, transport: asyncio.BaseTransport
    ) -> bool:
        """Let a new connection in, for which another may have to go; else it is told so."""
        if len(self._open) >= self._settings.max_connections and not self._drop_one():
            refusal = RefusedConnection(self._refused)
            transport.set_protocol(refusal)
            refusal.connection_made(transport)
            return False
        peer = transport.get_extra_info("peername")
        self._open[connection] = self._idle[connection] = str(peer[0]) if peer else ""
        return True

    def mark_busy(self, connection: EndpointProtocol) -> None:
        """A request of ``connection`` is answered now."""
        self._idle.pop(connection, None)

    def assign_client(self, connection: EndpointProtocol, client: str) -> None:
        """Count ``connection``, which is at work, as one of ``who``.

        Raises:
            ProblemError: so many are at work for it that others would find none (429).
        """
        held = sum(name == client for name in self._busy.values()) + 1
        unused = self._settings.max_connections - len(self._busy) - 1
        if held > _BUSY_PER_UNUSED * unused and not self._has_single_client:
            text = f"{held - 1} connections are at work for you, which is your share; try again"
            problem = Problem(429, text, "rate_limit_error", None, "too_many_connections", 1.0)
            raise ProblemError(problem)
        self._busy[connection] = client

    def mark_idle(self, connection: EndpointProtocol) -> None:
        """An answer has been written."""
        self._busy.pop(connection, None)
        if connection in self._open:
            self._idle[connection] = self._open[connection]

    def remove_connection(self, connection: EndpointProtocol) -> None:
        """A client has gone, or has to."""
        self._open.pop(connection, None)
        self._idle.pop(connection, None)
        self._busy.pop(connection, None)

    def _drop_one(self) -> bool:
        """Have one connection go; ``False`` if none should."""
        if not self._idle:
            return self._body_reader.drop_slowest()
        ((most, _),) = Counter(self._idle.values()).most_common(1)
        longest = next(each for each, address in self._idle.items() if address == most)
        self.remove_connection(longest)
        longest.force_close()
        return True
