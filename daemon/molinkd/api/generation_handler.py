"""Handles generation requests of all protocols.

A protocol's routes convert its body to an OpenAI body (:class:`ClientRequest`) and choose the
encoder of the answer (:class:`molinkd.api.openai.encoder.ResponseEncoder`).
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field

from aiohttp import web

from molink.errors import RequestError, Unavailable
from molinkd.api.access_guard import client_id, client_name
from molinkd.api.api_settings import ApiSettings
from molinkd.api.backend import Backend, ServedModel
from molinkd.api.cache_salts import CacheSalts
from molinkd.api.event_stream import EventStream, find_stream_problem
from molinkd.api.generation_runner import Usage, generate_all
from molinkd.api.image_memory import ImageMemory
from molinkd.api.metrics import RequestRecorder
from molinkd.api.model_catalog import ModelCatalog
from molinkd.api.openai.encoder import ResponseEncoder
from molinkd.api.openai.schema import GenerationBody
from molinkd.api.output_processor import TextPiece
from molinkd.api.prompt_worker_pool import PromptTokenizer
from molinkd.api.protocol_conversion import rename_error_fields
from molinkd.api.request_plan import RequestPlan, check_choice_count, make_plan, select_best

_SHUTDOWN_MESSAGE = (
    "molink is shutting down on this PC; retry later, or use another PC of the swarm"
)


class RunningAnswers:
    """Answers run inside :meth:`track_answer`; at shutdown they have a grace period."""

    def __init__(self) -> None:
        self._scopes: set[asyncio.Timeout] = set()
        self._all_ended = asyncio.Event()
        self._is_shutting_down = False

    @contextlib.asynccontextmanager
    async def track_answer(self) -> AsyncIterator[None]:
        """Track an answer while the context is open.

        Raises:
            Unavailable: the endpoint is shutting down.
        """
        if self._is_shutting_down:
            raise Unavailable(_SHUTDOWN_MESSAGE)
        scope = asyncio.timeout(None)
        try:
            async with scope:
                self._scopes.add(scope)
                try:
                    yield
                finally:
                    self._scopes.discard(scope)
                    if not self._scopes:
                        self._all_ended.set()
        except TimeoutError:
            if not scope.expired():
                raise
            raise Unavailable(_SHUTDOWN_MESSAGE) from None

    async def shut_down(self, seconds: float) -> None:
        """Reject new answers, and end those still running after ``seconds``."""
        self._is_shutting_down = True
        if self._scopes:
            self._all_ended.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._all_ended.wait(), seconds)
        for scope in self._scopes:
            scope.reschedule(asyncio.get_running_loop().time())


@dataclass(frozen=True, slots=True)
class ClientRequest:
    """A client's request as an OpenAI body.

    ``field_names`` maps fields of ``body`` to the protocol's own names, for errors
    (:func:`molinkd.api.protocol_conversion.rename_error_fields`).
    """

    body: GenerationBody
    create_encoder: Callable[[RequestPlan], ResponseEncoder]
    stream: bool
    field_names: Mapping[str, str] = field(default_factory=dict)


class GenerationHandler:
    """Tokenizes prompts, runs generations and sends the answers."""

    def __init__(
        self,
        backend: Backend,
        settings: ApiSettings,
        recorder: RequestRecorder,
        reader: PromptTokenizer,
        catalog: ModelCatalog,
        image_memory: ImageMemory,
    ) -> None:
        self._backend = backend
        self._settings = settings
        self._recorder = recorder
        self._prompt_tokenizer = reader
        self._catalog = catalog
        self._image_memory = image_memory
        self._cache_salts = CacheSalts(is_shared=settings.share_prefix_cache)
        self.running_answers = RunningAnswers()

    async def handle_request(
        self, request: web.Request, client_request: ClientRequest
    ) -> web.StreamResponse:
        """Answer ``request``, which was converted to ``client_request``.

        Raises:
            MolinkError: nothing was sent yet.
            ConnectionError: the client disconnected.
        """
        plan, usage = await self._make_plan(request, client_request)
        encoder = client_request.create_encoder(plan)
        if client_request.stream:
            return await self._stream_answer(request, plan, encoder, usage)
        answers: list[list[TextPiece]] = [[] for _ in plan.choices]

        async def emit(index: int, piece: TextPiece) -> None:
            answers[index].append(piece)

        async with self.running_answers.track_answer():
            await generate_all(self._backend, plan, self._recorder, usage, emit)
        if plan.is_best_of:
            plan, answers = select_best(plan, answers, usage.scores)
            encoder = client_request.create_encoder(plan)
        return json_response(encoder.encode_response(answers, usage))

    async def count_prompt_tokens(self, request: web.Request, client_request: ClientRequest) -> int:
        """Count the prompt tokens of ``client_request``.

        Raises:
            MolinkError: the prompts are invalid.
        """
        plan, _ = await self._make_plan(request, client_request)
        return plan.prompt_tokens

    async def _make_plan(
        self, request: web.Request, client_request: ClientRequest
    ) -> tuple[RequestPlan, Usage]:
        started_at = time.perf_counter()
        try:
            check_choice_count(client_request.body, self._settings.max_choices)
            loaded_model = await self._catalog.load_model(client_request.body.model)
            _check_generates(loaded_model.model)
            loaded_at = time.perf_counter()
            tokenized = await self._prompt_tokenizer.tokenize_prompts(
                client_name(request), loaded_model, client_request.body
            )
            images = (image for prompt in tokenized.prompts for image in prompt.images)
            self._image_memory.add_bytes(request, sum(len(image.pixels) for image in images))
            plan = make_plan(
                client_request.body,
                loaded_model,
                tokenized,
                client_id(request),
                time.perf_counter() - started_at,
                self._cache_salts.derive_salt(request, client_request.body.cache_salt),
            )
        except RequestError as error:
            raise rename_error_fields(error, client_request.field_names) from None
        return plan, Usage(plan.prompt_tokens, started_at, loaded_at)

    async def _stream_answer(
        self, request: web.Request, plan: RequestPlan, encoder: ResponseEncoder, usage: Usage
    ) -> web.StreamResponse:
        stream = EventStream(request, self._settings.stall_timeout_s, encoder.content_type)
        opened = [False] * len(plan.choices)

        async def emit(index: int, piece: TextPiece) -> None:
            if not opened[index]:
                opened[index] = True
                stream.push_event(encoder.encode_start(index))
            stream.push_event(encoder.encode_piece(index, piece))
            await stream.drain_buffer()

        try:
            try:
                async with self.running_answers.track_answer():
                    stream.start_keepalive(
                        encoder.encode_keepalive, self._settings.keepalive_interval_s
                    )
                    await generate_all(self._backend, plan, self._recorder, usage, emit)
                stream.push_event(encoder.encode_end(usage))
            except Exception as error:
                if not stream.has_started or isinstance(error, ConnectionError):
                    raise
                stream.push_event(encoder.encode_error(find_stream_problem(request, error)))
            return await stream.finish_stream()
        except BaseException:
            await stream.abort_stream()
            raise


def _check_generates(model: ServedModel) -> None:
    """Refuse a model that has no output head."""
    if model.task.name == "embed":
        raise RequestError(
            f"`model`: {model.name} is an embedding model: it writes no answers, use "
            "/v1/embeddings",
            "model",
        )


def json_response(body: bytes) -> web.Response:
    """Respond with encoded JSON."""
    return web.Response(body=body, content_type="application/json")
