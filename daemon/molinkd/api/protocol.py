"""Connections to the endpoint: how many there may be, which go first, what of them is logged."""

import asyncio
import logging

from aiohttp import web
from aiohttp.abc import AbstractAccessLogger

from molink.plaintext import printable
from molinkd.api.body import Bodies
from molinkd.api.endpoint_settings import ApiSettings
from molinkd.api.guard import OPEN_PATHS, caller
from molinkd.api.problem import Problem, internal
from molinkd.api.request_id import id_of

_ACCESS_LOG = logging.getLogger("molinkd.api.access")

#: What is asked every second, by whoever watches a daemon: no news.
_PROBES = OPEN_PATHS | {"/metrics"}
#: How long a client whose connection or body was refused may take to read why.
_REFUSAL_S = 1.0
#: Refused connections that may be reading at once; further ones are cut off without a word.
_MAX_REFUSALS = 64


class AccessLog(AbstractAccessLogger):
    """A line for each request that is no probe."""

    def log(self, request: web.BaseRequest, response: web.StreamResponse, time: float) -> None:
        """aiohttp's: ``request`` was answered, in ``time`` seconds."""
        level = logging.DEBUG if request.path in _PROBES else logging.INFO
        path = printable(request.path[:256])
        who = printable(caller(request)[:64])
        self.logger.log(
            level,
            "%s %s %d %.3f s, for %s, %s",
            request.method,
            path,
            response.status,
            time,
            who,
            id_of(request),
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
            lingering_time=_REFUSAL_S,
        )
        self._others = others
        self._header_timeout = settings.header_timeout_s
        self._header_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Start the wait for a request."""
        if not self._others.admit(self, transport):
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
        problem = internal()
        if status < 500:
            problem = Problem(status, f"no valid HTTP: {message}", code="bad_request")
        else:
            super().handle_error(request, status, exc, message)  # logs it
        answer = problem.response()
        answer.force_close()
        return answer

    def connection_lost(self, exc: BaseException | None) -> None:
        """The client has gone."""
        self.request_began()
        self._others.left(self)
        super().connection_lost(exc)

    def request_began(self) -> None:
        """A request's headers are complete."""
        self._others.works(self)
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def request_ended(self) -> None:
        """Its answer has been written."""
        self._others.rests(self)


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
        body = Problem(503, text, "server_error", None, "too_many_connections").body()
        head = (
            "HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\nRetry-After: 1\r\nConnection: close\r\n\r\n"
        )
        transport.write(head.encode() + body)
        if transport.can_write_eof():
            transport.write_eof()
        self._timer = asyncio.get_running_loop().call_later(_REFUSAL_S, transport.abort)

    def connection_lost(self, exc: BaseException | None) -> None:
        """The client has gone."""
        self._refused.discard(self)
        if self._timer is not None:
            self._timer.cancel()


class Connections:
    """The connections of an endpoint; at most ``settings.max_connections`` that are served.

    Beyond that the one goes that has been idle for longest; if all are at work, the one whose body
    is late most. Only where every one waits for its answer a new one is refused.
    """

    def __init__(self, server: web.Server, settings: ApiSettings, bodies: Bodies) -> None:
        self._server = server
        self._settings = settings
        self._bodies = bodies
        #: Those that are served; of them, those without a request that is answered, longest first.
        self._open: set[EndpointProtocol] = set()
        self._idle: dict[EndpointProtocol, None] = {}
        self._refused: set[RefusedConnection] = set()

    def create(self) -> asyncio.Protocol:
        """The protocol of a connection that has just been accepted."""
        loop = asyncio.get_running_loop()
        return EndpointProtocol(self._server, loop=loop, settings=self._settings, others=self)

    def admit(self, connection: EndpointProtocol, transport: asyncio.BaseTransport) -> bool:
        """Let a new connection in, for which another may have to go; else it is told so."""
        if len(self._open) >= self._settings.max_connections and not self._shed():
            refusal = RefusedConnection(self._refused)
            transport.set_protocol(refusal)
            refusal.connection_made(transport)
            return False
        self._open.add(connection)
        self._idle[connection] = None
        return True

    def works(self, connection: EndpointProtocol) -> None:
        """A request of ``connection`` is answered now."""
        self._idle.pop(connection, None)

    def rests(self, connection: EndpointProtocol) -> None:
        """An answer has been written."""
        if connection in self._open:
            self._idle[connection] = None

    def left(self, connection: EndpointProtocol) -> None:
        """A client has gone, or has to."""
        self._open.discard(connection)
        self._idle.pop(connection, None)

    def _shed(self) -> bool:
        """Have one connection go; ``False`` if none should."""
        if not self._idle:
            return self._bodies.shed()
        longest = next(iter(self._idle))
        self.left(longest)
        longest.force_close()
        return True
