"""From a request of any protocol to its answer: the one way that all of them go.

A protocol's adapter says what is asked in the terms of the OpenAI bodies (:class:`ClientRequest`),
and how the answer looks (:class:`molinkd.api.formats.Format`).
"""

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import msgspec
from aiohttp import web

from molink.errors import RequestError
from molinkd.api.adapting import renamed
from molinkd.api.answer import Usage, generate_all
from molinkd.api.backend import Backend
from molinkd.api.catalogue import Catalogue
from molinkd.api.choice import TextPiece
from molinkd.api.endpoint_settings import ApiSettings
from molinkd.api.formats import Format
from molinkd.api.guard import caller, client
from molinkd.api.metrics import RequestRecorder
from molinkd.api.problem import internal, problem_of
from molinkd.api.prompt_reader import PromptReader
from molinkd.api.request_id import id_of
from molinkd.api.request_plan import Plan, best_of, check_counts, make_plan
from molinkd.api.running import RunningAnswers
from molinkd.api.schema import ChatBody, GenerationBody
from molinkd.api.server_events import EventStream

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ClientRequest:
    """What a client asks for. ``body`` is a :class:`ChatBody` or a :class:`CompletionBody`.

    ``data`` is that body as JSON, where the client's own is one. ``names`` are the protocol's for
    fields of the body, for errors (:func:`molinkd.api.adapting.renamed`).
    """

    body: GenerationBody
    form: Callable[[Plan], Format]
    stream: bool
    data: bytes = b""
    names: Mapping[str, str] = field(default_factory=dict)


class Generator:
    """Has prompts read, plans made and answers generated, and writes these as they come."""

    def __init__(
        self,
        backend: Backend,
        settings: ApiSettings,
        recorder: RequestRecorder,
        reader: PromptReader,
        catalogue: Catalogue,
    ) -> None:
        self._backend = backend
        self._settings = settings
        self._recorder = recorder
        self._reader = reader
        self._catalogue = catalogue
        self.running = RunningAnswers()

    async def answer(self, request: web.Request, ask: ClientRequest) -> web.StreamResponse:
        """The answer to ``request``, which has asked for ``ask``.

        Raises:
            MolinkError: nothing has been sent yet.
            ConnectionError: the client has gone.
        """
        plan, usage = await self._plan(request, ask)
        form = ask.form(plan)
        if ask.stream:
            return await self._stream(request, plan, form, usage)
        answers: list[list[TextPiece]] = [[] for _ in plan.choices]

        async def emit(index: int, piece: TextPiece) -> None:
            answers[index].append(piece)

        async with self.running.one():
            await generate_all(self._backend, plan, self._recorder, usage, emit)
        if plan.chooses:
            plan, answers = best_of(plan, answers, usage.scores)
            form = ask.form(plan)
        return json_answer(form.whole(answers, usage))

    async def prompt_tokens(self, request: web.Request, ask: ClientRequest) -> int:
        """Tokens of the prompts of ``ask``.

        Raises:
            MolinkError: they can't be read.
        """
        plan, _ = await self._plan(request, ask)
        return plan.prompt_tokens

    async def _plan(self, request: web.Request, ask: ClientRequest) -> tuple[Plan, Usage]:
        began = time.perf_counter()
        try:
            check_counts(ask.body, self._settings.max_choices)
            offer = await self._catalogue.offer(ask.body.model)
            loaded = time.perf_counter()
            data = ask.data or msgspec.json.encode(ask.body)
            chat = isinstance(ask.body, ChatBody)
            read = await self._reader.read(caller(request), offer, data, chat=chat)
            spent = time.perf_counter() - began
            plan = make_plan(ask.body, offer, read, client(request), spent)
        except RequestError as error:
            raise renamed(error, ask.names) from None
        return plan, Usage(plan.prompt_tokens, began, loaded)

    async def _stream(
        self, request: web.Request, plan: Plan, form: Format, usage: Usage
    ) -> web.StreamResponse:
        stream = EventStream(request, self._settings.stall_timeout_s, form.content_type)
        opened = [False] * len(plan.choices)

        async def emit(index: int, piece: TextPiece) -> None:
            if not opened[index]:
                opened[index] = True
                stream.push(form.opening(index))
            stream.push(form.event(index, piece))
            await stream.room()

        try:
            try:
                async with self.running.one():
                    stream.keep_alive(form.keepalive, self._settings.keepalive_event_s)
                    await generate_all(self._backend, plan, self._recorder, usage, emit)
                stream.push(form.closing(usage))
            except Exception as error:
                if not stream.begun or isinstance(error, ConnectionError):
                    raise
                problem = problem_of(error)
                if problem is None:
                    _LOG.error("a stream (%s) failed", id_of(request), exc_info=error)
                    problem = internal()
                stream.push(form.failure(problem))
            return await stream.finish()
        except BaseException:
            await stream.abandon()
            raise


def json_answer(body: bytes) -> web.Response:
    """``body``, which is JSON, as an answer."""
    return web.Response(body=body, content_type="application/json")
