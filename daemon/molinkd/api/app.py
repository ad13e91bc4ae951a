"""The endpoint as an aiohttp application."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from aiohttp import web
from msgspec import json

from molinkd.api.access_guard import OLLAMA_PREFIX, AccessGuard, client_name
from molinkd.api.administration import Administration
from molinkd.api.anthropic.encoder import encode_envelope as message_envelope
from molinkd.api.anthropic.routes import MESSAGES_PREFIX, MessageRoutes
from molinkd.api.api_settings import ApiSettings
from molinkd.api.backend import Backend
from molinkd.api.body_reader import BodyReader
from molinkd.api.chat_page import ChatPage
from molinkd.api.connections import PROBE_PATHS, EndpointProtocol, assign_request_id, get_request_id
from molinkd.api.generation_handler import GenerationHandler, RunningAnswers
from molinkd.api.ignored_fields import add_ignored_fields
from molinkd.api.image_memory import ImageMemory
from molinkd.api.lm_studio import LMStudioRoutes
from molinkd.api.metrics import RequestRecorder, create_registry, render_metrics
from molinkd.api.model_catalog import ModelCatalog
from molinkd.api.ollama.encoder import encode_envelope as ollama_envelope
from molinkd.api.ollama.pull_route import PullRoute
from molinkd.api.ollama.routes import OllamaRoutes
from molinkd.api.openai.routes import OpenAIRoutes
from molinkd.api.openapi import OpenAPIRoute
from molinkd.api.owner_routes import OwnerRoutes
from molinkd.api.pooling.embedding_routes import EmbeddingRoutes
from molinkd.api.pooling.handler import PoolingHandler
from molinkd.api.pooling.rerank_routes import RerankRoutes
from molinkd.api.problem import Envelope, Problem, internal_problem, problem_of
from molinkd.api.prompt_worker_pool import PromptTokenizer
from molinkd.api.responses.routes import ResponseRoutes
from molinkd.api.swarm_summary import SwarmRoute

_LOG = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

#: Response headers that keep other sites from reading or reinterpreting an answer.
_HEADERS = {"X-Content-Type-Options": "nosniff", "Cross-Origin-Resource-Policy": "same-origin"}

#: Reads the bodies of requests.
BODIES = web.AppKey("bodies", BodyReader)

#: Tracks running answers, so that shutdown can wait for them.
ANSWERS = web.AppKey("answers", RunningAnswers)

#: A client that waited longer than this, in seconds, before a 503 gets no retry hint: official
#: clients would wait twice more.
_NO_RETRY_AFTER_S = 3.0

#: The status recorded for a request whose client disconnected early (nginx's 499).
_CLIENT_CLOSED_REQUEST = "499"


def create_app(
    backend: Backend,
    settings: ApiSettings,
    reader: PromptTokenizer,
    administration: Administration | None = None,
) -> web.Application:
    """Create the application that serves ``backend``; ``reader`` tokenizes prompts.

    Without ``administration`` there are no routes for the owner.
    Run it with ``handler_cancellation=True``, as ``EndpointServer`` does, so that a client's
    disconnect cancels its generation.
    """
    recorder = RequestRecorder()
    image_memory = ImageMemory(settings.max_image_bytes)
    shell = _Middleware(AccessGuard(settings), recorder, settings, image_memory)
    app = web.Application(middlewares=[shell.handle_request])
    app[BODIES] = bodies = BodyReader(
        settings, image_memory, lambda: any(model.sees_images for model in backend.list_models())
    )
    catalog = ModelCatalog(backend, settings.tool_call_parser)
    generator = GenerationHandler(backend, settings, recorder, reader, catalog, image_memory)
    app[ANSWERS] = generator.running_answers
    pooler = PoolingHandler(
        backend,
        recorder,
        reader,
        generator.running_answers,
        share_prefix_cache=settings.share_prefix_cache,
    )
    if administration is not None:
        patience = settings.stall_timeout_s
        app.add_routes(PullRoute(administration, bodies, catalog, patience).routes)
        app.add_routes(OwnerRoutes(backend, administration, bodies, patience).routes)
    openai = OpenAIRoutes(backend, bodies, catalog, generator)
    embeddings = EmbeddingRoutes(bodies, catalog, pooler)
    for table in (
        openai.routes,
        _StatusRoutes(backend, recorder).routes,
        embeddings.routes,
        RerankRoutes(bodies, catalog, pooler).routes,
        OllamaRoutes(backend, bodies, catalog, generator).routes,
        LMStudioRoutes(backend, catalog, openai, embeddings).routes,
        ResponseRoutes(bodies, generator).routes,
        MessageRoutes(bodies, generator).routes,
        OpenAPIRoute().routes,
        SwarmRoute(backend, administration).routes,
        ChatPage().routes,
    ):
        app.add_routes(table)
    app.on_response_prepare.append(shell.add_headers)
    return app


class _Middleware:
    """Middleware: authentication, error envelopes, metrics."""

    def __init__(
        self,
        guard: AccessGuard,
        recorder: RequestRecorder,
        settings: ApiSettings,
        image_memory: ImageMemory,
    ) -> None:
        self._guard = guard
        self._image_memory = image_memory
        self._recorder = recorder
        self._settings = settings

    @web.middleware
    async def handle_request(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Handle one request (an aiohttp middleware)."""
        assign_request_id(request)
        connection = request.protocol if isinstance(request.protocol, EndpointProtocol) else None
        if connection is not None:
            connection.on_request_start()
        status = _CLIENT_CLOSED_REQUEST
        try:
            answer = await self._call_handler(request, handler)
            await self._send_response(request, answer)
            status = str(answer.status)
            return answer
        except ConnectionError:
            raise asyncio.CancelledError from None
        finally:
            self._image_memory.release_request(request)
            if connection is not None:
                connection.on_request_end()
            resource = request.match_info.route.resource
            route = resource.canonical if resource is not None else "other"
            self._recorder.requests[route, status] += 1

    async def add_headers(self, request: web.Request, response: web.StreamResponse) -> None:
        """Add the headers that every response has."""
        own = get_request_id(request)
        headers = {**_HEADERS, "X-Request-Id": own}
        if request.path.startswith(MESSAGES_PREFIX):
            headers["Request-Id"] = own  # Anthropic's clients read this name
        for name, value in headers.items():
            response.headers.setdefault(name, value)
        add_ignored_fields(request, response)
        self._guard.origins.add_headers(request, response)

    async def _call_handler(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            self._guard.check_request(request)
            if isinstance(request.protocol, EndpointProtocol) and request.path not in PROBE_PATHS:
                request.protocol.assign_client(client_name(request))
            preflight = self._guard.origins.preflight_response(request)
            return await handler(request) if preflight is None else preflight
        except ConnectionError:
            raise
        except Exception as error:
            problem = problem_of(error, f"{request.method} {request.path}")
            if problem is None:
                _LOG.exception(
                    "%s %s (%s) failed", request.method, request.path, get_request_id(request)
                )
                problem = internal_problem()
            answer = problem.to_response(_error_envelope(request.path))
            waited = problem.status == 503 and loop.time() - began > _NO_RETRY_AFTER_S
            if waited or problem.status == 504:
                answer.headers["X-Should-Retry"] = "false"
            if isinstance(error, web.HTTPMethodNotAllowed):
                answer.headers["Allow"] = ", ".join(sorted(error.allowed_methods))
            return answer

    async def _send_response(self, request: web.Request, answer: web.StreamResponse) -> None:
        """Send ``answer`` within a time limit.

        Raises:
            ConnectionError: the client does not read.
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
            raise ConnectionResetError("the client does not read") from None


def _error_envelope(path: str) -> Envelope | None:
    """Return the error format of a route; ``None`` means OpenAI's."""
    if path.startswith(MESSAGES_PREFIX):
        return message_envelope
    return ollama_envelope if path.startswith(OLLAMA_PREFIX) else None


class _StatusRoutes:
    """``/health``, ``/readyz`` and ``/metrics``."""

    def __init__(self, backend: Backend, recorder: RequestRecorder) -> None:
        self._backend = backend
        self._registry = create_registry(recorder, backend)

    @property
    def routes(self) -> list[web.RouteDef]:
        """All routes."""
        return [
            web.get("/health", self.get_health),
            web.get("/readyz", self.get_readiness),
            web.get("/metrics", self.get_metrics),
        ]

    async def get_health(self, request: web.Request) -> web.Response:
        """Report that the process is alive."""
        return web.Response(body=b'{"status":"ok"}', content_type="application/json")

    async def get_readiness(self, request: web.Request) -> web.Response:
        """Report whether a pipeline is ready (``?model=`` for one model); 503 if not."""
        model = request.query.get("model")
        if not self._backend.is_ready(model):
            text = "no pipeline is ready; `molink status` shows the reason"
            return Problem(503, text, "server_error", None, "unavailable", 1.0).to_response()
        return web.Response(body=json.encode({"status": "ready"}), content_type="application/json")

    async def get_metrics(self, request: web.Request) -> web.Response:
        """Return the metrics in Prometheus text format."""
        return web.Response(
            body=render_metrics(self._registry),
            headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"},
        )
