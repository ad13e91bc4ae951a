"""The endpoint as an aiohttp application."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from aiohttp import web
from msgspec import json

from molinkd.api.backend import Backend
from molinkd.api.body import Bodies
from molinkd.api.catalogue import Catalogue
from molinkd.api.embeddings import EmbeddingRoutes
from molinkd.api.endpoint_settings import ApiSettings
from molinkd.api.generator import Generator
from molinkd.api.guard import OLLAMA, Guard, caller
from molinkd.api.messages.formats import envelope as message_envelope
from molinkd.api.messages.routes import MESSAGES, MessageRoutes
from molinkd.api.metrics import RequestRecorder, create_registry, exposition
from molinkd.api.ollama.formats import envelope as ollama_envelope
from molinkd.api.ollama.routes import OllamaRoutes
from molinkd.api.openapi import OpenAPIRoute
from molinkd.api.page import ChatPage
from molinkd.api.problem import Envelope, Problem, internal, problem_of
from molinkd.api.prompt_reader import PromptReader
from molinkd.api.protocol import PROBES, EndpointProtocol
from molinkd.api.request_id import give_id, id_of
from molinkd.api.responses.routes import ResponseRoutes
from molinkd.api.routes import OpenAIRoutes
from molinkd.api.running import RunningAnswers
from molinkd.api.swarm_picture import SwarmRoute

_LOG = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

#: What every answer says, so that no page of another site can use it in a way of its own.
_HEADERS = {"X-Content-Type-Options": "nosniff", "Cross-Origin-Resource-Policy": "same-origin"}

#: What reads the bodies of an application's requests.
BODIES = web.AppKey("bodies", Bodies)

#: Its answers, which may be given time to end.
ANSWERS = web.AppKey("answers", RunningAnswers)

#: A client that has waited for longer than this, in seconds, for nothing is told not to ask again
#: by itself: official clients would wait twice more.
_WAITED_S = 3.0

#: The status under which a request counts whose client left before its answer was complete.
_CLIENT_LEFT = "499"


def create_app(backend: Backend, settings: ApiSettings, reader: PromptReader) -> web.Application:
    """The application that serves ``backend``; prompts are read by ``reader``.

    Run it with ``handler_cancellation=True``, as ``EndpointServer`` does:
    a request whose client has gone is cancelled, and with it its generation.
    """
    recorder = RequestRecorder()
    shell = _Shell(Guard(settings), recorder, settings)
    app = web.Application(middlewares=[shell.handle])
    app[BODIES] = bodies = Bodies(settings)
    catalogue = Catalogue(backend, settings.answer_format)
    generator = Generator(backend, settings, recorder, reader, catalogue)
    app[ANSWERS] = generator.running
    routes = OpenAIRoutes(backend, bodies, catalogue, generator)
    status = _StatusRoutes(backend, recorder)
    app.add_routes(
        [
            web.get("/v1/models", routes.models),
            web.get("/v1/models/{name:.+}", routes.model),
            web.get("/props", routes.props),
            web.post("/v1/chat/completions", routes.chat),
            web.post("/v1/completions", routes.completions),
            web.get("/health", status.health),
            web.get("/readyz", status.readyz),
            web.get("/metrics", status.metrics),
        ]
    )
    for table in (
        EmbeddingRoutes(bodies).table,
        OllamaRoutes(backend, bodies, catalogue, generator).table,
        ResponseRoutes(bodies, generator).table,
        MessageRoutes(bodies, generator).table,
        OpenAPIRoute().table,
        SwarmRoute(backend).table,
        ChatPage().table,
    ):
        app.add_routes(table)
    app.on_response_prepare.append(shell.add_headers)
    return app


class _Shell:
    """Around every handler: the guard before it, errors as envelopes and figures after it."""

    def __init__(self, guard: Guard, recorder: RequestRecorder, settings: ApiSettings) -> None:
        self._guard = guard
        self._recorder = recorder
        self._settings = settings

    @web.middleware
    async def handle(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """aiohttp's middleware."""
        give_id(request)
        connection = request.protocol if isinstance(request.protocol, EndpointProtocol) else None
        if connection is not None:
            connection.request_began()
        status = _CLIENT_LEFT
        try:
            answer = await self._answer(request, handler)
            await self._write(request, answer)
            status = str(answer.status)
            return answer
        except ConnectionError:
            raise asyncio.CancelledError from None
        finally:
            if connection is not None:
                connection.request_ended()
            resource = request.match_info.route.resource
            route = resource.canonical if resource is not None else "other"
            self._recorder.requests[route, status] += 1

    async def add_headers(self, request: web.Request, response: web.StreamResponse) -> None:
        """What every answer says."""
        own = id_of(request)
        headers = {**_HEADERS, "X-Request-Id": own}
        if request.path.startswith(MESSAGES):
            headers["Request-Id"] = own  # as Anthropic's clients read it
        for name, value in headers.items():
            response.headers.setdefault(name, value)
        self._guard.origins.mark(request, response)

    async def _answer(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            self._guard.check(request)
            if isinstance(request.protocol, EndpointProtocol) and request.path not in PROBES:
                request.protocol.claim(caller(request))
            preflight = self._guard.origins.preflight(request)
            return await handler(request) if preflight is None else preflight
        except ConnectionError:
            raise
        except Exception as error:
            problem = problem_of(error, f"{request.method} {request.path}")
            if problem is None:
                _LOG.exception("%s %s (%s) failed", request.method, request.path, id_of(request))
                problem = internal()
            answer = problem.response(_envelope(request.path))
            waited = problem.status == 503 and loop.time() - began > _WAITED_S
            if waited or problem.status == 504:
                answer.headers["X-Should-Retry"] = "false"
            if isinstance(error, web.HTTPMethodNotAllowed):
                answer.headers["Allow"] = ", ".join(sorted(error.allowed_methods))
            return answer

    async def _write(self, request: web.Request, answer: web.StreamResponse) -> None:
        """Send ``answer``, but not at any pace: a client that takes nothing has gone.

        Raises:
            ConnectionError: it has.
        """
        size = answer.content_length or 0 if isinstance(answer, web.Response) else 0
        patience = self._settings.stall_timeout_s + size / self._settings.min_body_rate
        try:
            async with asyncio.timeout(patience):
                await answer.prepare(request)
                await answer.write_eof()
        except TimeoutError:
            if request.transport is not None:
                request.transport.abort()
            raise ConnectionResetError("the client takes nothing") from None


def _envelope(path: str) -> Envelope | None:
    """How errors of that route look, where not as OpenAI's."""
    if path.startswith(MESSAGES):
        return message_envelope
    return ollama_envelope if path.startswith(OLLAMA) else None


class _StatusRoutes:
    """``/health``, ``/readyz`` and ``/metrics``."""

    def __init__(self, backend: Backend, recorder: RequestRecorder) -> None:
        self._backend = backend
        self._registry = create_registry(recorder, backend)

    async def health(self, request: web.Request) -> web.Response:
        """The process is alive."""
        return web.Response(body=b'{"status":"ok"}', content_type="application/json")

    async def readyz(self, request: web.Request) -> web.Response:
        """A pipeline can serve (``?model=`` asks for one model's); 503 if not."""
        model = request.query.get("model")
        if not self._backend.ready(model):
            text = "no pipeline can serve now; `molink status` says what is missing"
            return Problem(503, text, "server_error", None, "unavailable", 1.0).response()
        return web.Response(body=json.encode({"status": "ready"}), content_type="application/json")

    async def metrics(self, request: web.Request) -> web.Response:
        """Prometheus text."""
        return web.Response(
            body=exposition(self._registry),
            headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"},
        )
