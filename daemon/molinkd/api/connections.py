"""Connections of the endpoint: limits, fairness between clients, and the access log."""

import asyncio
import logging
import re
import secrets
from collections import Counter

from aiohttp import web
from aiohttp.abc import AbstractAccessLogger

from molink.plaintext import printable
from molinkd.api.access_guard import PUBLIC_PATHS, client_name
from molinkd.api.api_settings import ApiSettings
from molinkd.api.body_reader import BodyReader
from molinkd.api.problem import Problem, ProblemError, internal_problem

_VALID_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_KEY = web.RequestKey("request_id", str)


def assign_request_id(request: web.BaseRequest) -> None:
    """Assign an id to ``request``: the client's ``X-Request-Id`` if valid, else a random one."""
    given = request.headers.get("X-Request-Id", "")
    request[_KEY] = given if _VALID_ID.fullmatch(given) else f"req_{secrets.token_hex(12)}"


def get_request_id(request: web.BaseRequest) -> str:
    """Return the id; empty if the request was rejected before it got one."""
    found: str = request.get(_KEY, "")
    return found


_ACCESS_LOG = logging.getLogger("molinkd.api.access")

#: Paths that monitors poll; their requests are logged at debug level.
PROBE_PATHS = PUBLIC_PATHS | {"/metrics"}
#: How long a rejected connection stays open for the client to read the error, in seconds.
_REFUSAL_LINGER_S = 1.0
#: How many busy connections a client may have per unused connection.
_BUSY_PER_UNUSED = 8
#: Rejected connections kept open at once; further ones are closed at once.
_MAX_REFUSALS = 64


class AccessLog(AbstractAccessLogger):
    """Logs each request; probes at debug level."""

    def log(self, request: web.BaseRequest, response: web.StreamResponse, time: float) -> None:
        """Log a request that took ``time`` seconds (aiohttp's hook)."""
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
    """A connection that is closed if its first request does not arrive in time.

    aiohttp limits the pause between requests (keep-alive), but not the wait for the first one.
    Bodies are not decompressed, so that a rejected one is never inflated.
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
        """Start the timeout of the first request."""
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
        """Answer invalid HTTP with an error envelope and without a traceback in the log."""
        problem = internal_problem()
        if status < 500:
            problem = Problem(status, f"invalid HTTP: {message}", code="bad_request")
        else:
            super().handle_error(request, status, exc, message)  # logs it
        answer = problem.to_response()
        answer.force_close()
        return answer

    def connection_lost(self, exc: BaseException | None) -> None:
        """Release the connection."""
        self.on_request_start()
        self._others.remove_connection(self)
        super().connection_lost(exc)

    def on_request_start(self) -> None:
        """Mark the connection as busy; a request's headers are complete."""
        self._others.mark_busy(self)
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def assign_client(self, client: str) -> None:
        """Assign the current request to a client; see :meth:`Connections.assign_client`."""
        self._others.assign_client(self, client)

    def on_request_end(self) -> None:
        """Mark the connection as idle; the answer is written."""
        self._others.mark_idle(self)


class RefusedConnection(asyncio.Protocol):
    """A connection above the limit: sends an error and closes.

    It stays open briefly: closing while the client still sends would reset the connection before
    the client reads the error.
    """

    def __init__(self, refused: "set[RefusedConnection]") -> None:
        self._refused = refused
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the error; input is ignored."""
        assert isinstance(transport, asyncio.Transport)
        if len(self._refused) >= _MAX_REFUSALS:
            transport.abort()
            return
        self._refused.add(self)
        text = "too many connections to the endpoint; close some, or try again"
        body = Problem(503, text, "server_error", None, "too_many_connections").to_json()
        header = (
            "HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\nRetry-After: 1\r\nConnection: close\r\n\r\n"
        )
        transport.write(header.encode() + body)
        if transport.can_write_eof():
            transport.write_eof()
        self._timer = asyncio.get_running_loop().call_later(_REFUSAL_LINGER_S, transport.abort)

    def connection_lost(self, exc: BaseException | None) -> None:
        """Release the connection."""
        self._refused.discard(self)
        if self._timer is not None:
            self._timer.cancel()


class Connections:
    """Limits the connections of an endpoint to ``settings.max_connections``.

    Above the limit the connection that was idle longest is closed, of the address with the most
    idle connections; if none is idle, the one whose body is furthest behind. A new connection is
    rejected only if all others wait for answers.

    With several clients, each may have :data:`_BUSY_PER_UNUSED` busy connections per unused one:
    eight ninths of the limit for a single client, ``8 / (8 n + 1)`` each for ``n`` greedy clients,
    once older connections have ended (dynamic thresholds; Choudhury and Hahne, "Dynamic queue
    length thresholds for shared-memory packet switches", 1998). Some connections always remain for
    another client, and no answer is cut off.
    """

    def __init__(self, server: web.Server, settings: ApiSettings, bodies: BodyReader) -> None:
        self._server = server
        self._settings = settings
        self._body_reader = bodies
        #: All connections with their address; the idle ones, longest first; the busy ones with
        #: their client.
        self._open: dict[EndpointProtocol, str] = {}
        self._idle: dict[EndpointProtocol, str] = {}
        self._busy: dict[EndpointProtocol, str] = {}
        self._has_single_client = settings.loopback and len(settings.keys) < 2
        self._refused: set[RefusedConnection] = set()

    def create_protocol(self) -> asyncio.Protocol:
        """Create the protocol of an accepted connection."""
        loop = asyncio.get_running_loop()
        return EndpointProtocol(self._server, loop=loop, settings=self._settings, others=self)

    def admit_connection(
        self, connection: EndpointProtocol, transport: asyncio.BaseTransport
    ) -> bool:
        """Admit a new connection, perhaps in place of an idle one, or reject it."""
        if len(self._open) >= self._settings.max_connections and not self._drop_one():
            refusal = RefusedConnection(self._refused)
            transport.set_protocol(refusal)
            refusal.connection_made(transport)
            return False
        peer = transport.get_extra_info("peername")
        self._open[connection] = self._idle[connection] = str(peer[0]) if peer else ""
        return True

    def mark_busy(self, connection: EndpointProtocol) -> None:
        """Mark ``connection`` as busy."""
        self._idle.pop(connection, None)

    def assign_client(self, connection: EndpointProtocol, client: str) -> None:
        """Count a busy ``connection`` for ``client``.

        Raises:
            ProblemError: the client exceeds its share (429).
        """
        held = sum(name == client for name in self._busy.values()) + 1
        unused = self._settings.max_connections - len(self._busy) - 1
        if held > _BUSY_PER_UNUSED * unused and not self._has_single_client:
            text = f"{held - 1} of your connections are busy, which is your share; try again"
            problem = Problem(429, text, "rate_limit_error", None, "too_many_connections", 1.0)
            raise ProblemError(problem)
        self._busy[connection] = client

    def mark_idle(self, connection: EndpointProtocol) -> None:
        """Mark ``connection`` as idle."""
        self._busy.pop(connection, None)
        if connection in self._open:
            self._idle[connection] = self._open[connection]

    def remove_connection(self, connection: EndpointProtocol) -> None:
        """Remove a closed connection."""
        self._open.pop(connection, None)
        self._idle.pop(connection, None)
        self._busy.pop(connection, None)

    def _drop_one(self) -> bool:
        """Close one connection to make room; ``False`` if none can be closed."""
        if not self._idle:
            return self._body_reader.drop_slowest()
        ((most, _),) = Counter(self._idle.values()).most_common(1)
        longest = next(each for each, address in self._idle.items() if address == most)
        self.remove_connection(longest)
        longest.force_close()
        return True
