"""The handlers of the OpenAI routes."""

from collections.abc import Callable

from aiohttp import web
from msgspec import json

import molink
from molinkd.api.backend import Backend, ServedModel
from molinkd.api.body import Bodies
from molinkd.api.catalogue import Catalogue
from molinkd.api.formats import ChatFormat, CompletionFormat, Format
from molinkd.api.generator import ClientRequest, Generator, json_answer
from molinkd.api.request_plan import Plan
from molinkd.api.schema import ChatBody, CompletionBody, GenerationBody, decode_body


class OpenAIRoutes:
    """``/v1/models``, ``/props``, ``/v1/chat/completions`` and ``/v1/completions``."""

    def __init__(
        self, backend: Backend, bodies: Bodies, catalogue: Catalogue, generator: Generator
    ) -> None:
        self._backend = backend
        self._bodies = bodies
        self._catalogue = catalogue
        self._generator = generator

    async def models(self, request: web.Request) -> web.Response:
        """``GET /v1/models``."""
        models = [_model_json(model) for model in self._backend.models()]
        return json_answer(json.encode({"object": "list", "data": models}))

    async def model(self, request: web.Request) -> web.Response:
        """``GET /v1/models/{name}``."""
        model = self._catalogue.find(request.match_info["name"])
        return json_answer(json.encode(_model_json(model)))

    async def props(self, request: web.Request) -> web.Response:
        """``GET /props`` of llama-server, by which its clients learn what fits (``?model=``)."""
        offer = await self._catalogue.offer(request.query.get("model"))
        model, template = offer.model, offer.tokenizer.template
        found = {
            "default_generation_settings": {"n_ctx": model.context},
            "model_alias": model.name,
            "chat_template": "" if template is None else template.source,
            "modalities": {"vision": False, "audio": False},
            "build_info": f"molink {molink.__version__}",
        }
        return json_answer(json.encode(found))

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
        stream = bool(body.stream)

        def form_of(plan: Plan) -> Format:
            return form(plan, stream and body.includes_usage)

        return await self._generator.answer(request, ClientRequest(body, form_of, stream, data))


def _model_json(model: ServedModel) -> dict[str, object]:
    return {
        "id": model.name,
        "object": "model",
        "created": model.created,
        "owned_by": "molink",
        # As vLLM's and llama-server's clients look for them.
        "root": model.name,
        "parent": None,
        "max_model_len": model.context,
        "meta": {"n_ctx": model.context, "size": model.size},
    }
