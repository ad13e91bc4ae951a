"""The handlers of the OpenAI routes."""

import logging
from collections.abc import Callable

from aiohttp import web
from msgspec import json

from molinkd.api.answer import generate_all
from molinkd.api.backend import Backend, ServedModel
from molinkd.api.body import Bodies
from molinkd.api.catalogue import Catalogue
from molinkd.api.choice import TextPiece
from molinkd.api.endpoint_settings import ApiSettings
from molinkd.api.formats import DONE, ChatFormat, CompletionFormat, Format
from molinkd.api.guard import caller
from molinkd.api.metrics import RequestRecorder
from molinkd.api.problem import internal, problem_of
from molinkd.api.prompt_reader import PromptReader
from molinkd.api.request_plan import Plan, check_counts, make_plan
from molinkd.api.schema import ChatBody, CompletionBody, GenerationBody, decode_body
from molinkd.api.server_events import EventStream

_LOG = logging.getLogger(__name__)


class OpenAIRoutes:
    """``/v1/models``, ``/v1/chat/completions`` and ``/v1/completions``."""

    def __init__(
        self,
        backend: Backend,
        settings: ApiSettings,
        recorder: RequestRecorder,
        bodies: Bodies,
        reader: PromptReader,
    ) -> None:
        self._backend = backend
        self._settings = settings
        self._recorder = recorder
        self._bodies = bodies
        self._reader = reader
        self._catalogue = Catalogue(backend)

    async def models(self, request: web.Request) -> web.Response:
        """``GET /v1/models``."""
        models = [_model_json(model) for model in self._backend.models()]
        return _json(json.encode({"object": "list", "data": models}))

    async def model(self, request: web.Request) -> web.Response:
        """``GET /v1/models/{name}``."""
        model = self._catalogue.find(request.match_info["name"])
        return _json(json.encode(_model_json(model)))

    async def chat(self, request: web.Request) -> web.StreamResponse:
        """``POST /v1/chat/completions``."""
        return await self._generate(request, ChatBody, ChatFormat)

    async def completions(self, request: web.Request) -> web.StreamResponse:
        """``POST /v1/completions``."""
        return await self._generate(request, CompletionBody, CompletionFormat)

    async def _generate(
        self,
        request: web.Request,
        kind: type[GenerationBody],
        form: Callable[[Plan, bool], Format],
    ) -> web.StreamResponse:
        data = await self._bodies.read(request)
        body = decode_body(data, kind)
        check_counts(body, self._settings.max_choices)
        offer = await self._catalogue.offer(body.model)
        prompts = await self._reader.read(caller(request), offer, data, chat=kind is ChatBody)
        plan = make_plan(body, offer, prompts)
        if body.stream:
            form_of_stream = form(plan, body.includes_usage)
            return await self._stream(request, plan, form_of_stream, body.includes_usage)
        answers: list[list[TextPiece]] = [[] for _ in plan.choices]

        async def emit(index: int, piece: TextPiece) -> None:
            answers[index].append(piece)

        usage = await generate_all(self._backend, plan, self._recorder, emit)
        return _json(form(plan, False).whole(answers, usage.as_json()))

    async def _stream(
        self, request: web.Request, plan: Plan, form: Format, with_usage: bool
    ) -> web.StreamResponse:
        stream = EventStream(request, self._settings.stall_timeout_s)
        opened = [False] * len(plan.choices)

        async def emit(index: int, piece: TextPiece) -> None:
            if not opened[index]:
                opened[index] = True
                stream.push(form.opening(index))
            stream.push(form.event(index, piece))
            await stream.room()

        try:
            try:
                usage = await generate_all(self._backend, plan, self._recorder, emit)
                if with_usage:
                    stream.push(form.usage_event(usage.as_json()))
                stream.push(DONE)
            except Exception as error:
                if not stream.begun or isinstance(error, ConnectionError):
                    raise
                stream.push(_error_event(error))
            return await stream.finish()
        except BaseException:
            await stream.abandon()
            raise


def _error_event(error: Exception) -> bytes:
    """An error after the stream began: the envelope, as an event."""
    problem = problem_of(error)
    if problem is None:
        _LOG.error("a stream failed", exc_info=error)
        problem = internal()
    return b"event: error\ndata: " + problem.body() + b"\n\n"


def _json(body: bytes) -> web.Response:
    return web.Response(body=body, content_type="application/json")


def _model_json(model: ServedModel) -> dict[str, object]:
    return {
        "id": model.name,
        "object": "model",
        "created": model.created,
        "owned_by": "molink",
        "max_model_len": model.context,
    }
