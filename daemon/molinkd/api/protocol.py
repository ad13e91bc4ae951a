"""Connections to the endpoint: how many there may be, and how long one may say nothing."""

import asyncio
import logging

from aiohttp import web

from molinkd.api.endpoint_settings import ApiSettings
from molinkd.api.problem import Problem, internal

#: Quiet unless someone sets it to ``INFO``.
_ACCESS_LOG = logging.getLogger("molinkd.api.access")

#: How long a refused connection may take to read why.
_REFUSAL_S = 1.0


class EndpointProtocol(web.RequestHandler):
    """A connection that is closed if its first request doesn't come in time.

    aiohttp bounds the pauses between requests (keep-alive) but not the wait for the first one.
    """

    __slots__ = ("_header_timeout", "_header_timer")

    def __init__(
        self, manager: web.Server, *, loop: asyncio.AbstractEventLoop, settings: ApiSettings
    ) -> None:
        super().__init__(
            manager,
            loop=loop,
            access_log=_ACCESS_LOG,
            keepalive_timeout=settings.keepalive_s,
            lingering_time=min(10.0, settings.body_timeout_s),
        )
        self._header_timeout = settings.header_timeout_s
        self._header_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Start the wait for a request."""
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
        """What is no HTTP gets an envelope as well, instead of aiohttp's plain text."""
        super().handle_error(request, status, exc, message)  # logs it
        problem = internal()
        if status < 500:
            problem = Problem(status, f"no valid HTTP: {message}", code="bad_request")
        answer = problem.response()
        answer.force_close()
        return answer

    def connection_lost(self, exc: BaseException | None) -> None:
        """The client has gone."""
        self.request_began()
        super().connection_lost(exc)

    def request_began(self) -> None:
        """A request's headers are complete."""
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None


class RefusedConnection(asyncio.Protocol):
    """A connection beyond the limit: told so and closed.

    It stays open for a moment, as closing it on what the client is still sending would reset it
    before the client has read the answer.
    """

    def __init__(self) -> None:
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Answer at once; what the client sends is ignored."""
        assert isinstance(transport, asyncio.Transport)
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
        if self._timer is not None:
            self._timer.cancel()


class ConnectionFactory:
    """Makes the protocol of each new connection; at most ``settings.max_connections`` real ones."""

    def __init__(
        self, server: web.Server, settings: ApiSettings, loop: asyncio.AbstractEventLoop
    ) -> None:
        self._server = server
        self._settings = settings
        self._loop = loop

    def __call__(self) -> asyncio.Protocol:
        """The protocol of a connection that has just been accepted."""
        if len(self._server.connections) >= self._settings.max_connections:
            return RefusedConnection()
        return EndpointProtocol(self._server, loop=self._loop, settings=self._settings)
