"""The handlers of the OpenAI routes."""

from collections.abc import Callable
from dataclasses import dataclass

from aiohttp import web
from msgspec import json

import molink
from molinkd.api.backend import Backend, ServedModel
from molinkd.api.body_reader import BodyReader
from molinkd.api.generation_handler import ClientRequest, GenerationHandler, json_response
from molinkd.api.model_catalog import ModelCatalog
from molinkd.api.openai.encoder import ChatEncoder, CompletionEncoder, ResponseEncoder
from molinkd.api.openai.schema import (
    ChatBody,
    CompletionBody,
    GenerationBody,
)
from molinkd.api.request_plan import RequestPlan


@dataclass(frozen=True, slots=True)
class OpenAIRoutes:
    """``/v1/models``, ``/props``, ``/v1/chat/completions`` and ``/v1/completions``."""

    backend: Backend
    body_reader: BodyReader
    catalog: ModelCatalog
    handler: GenerationHandler

    @property
    def routes(self) -> list[web.RouteDef]:
        """All routes."""
        return [
            web.get("/v1/models", self.list_models),
            web.get("/v1/models/{name:.+}", self.get_model),
            web.get("/props", self.get_props),
            web.post("/v1/chat/completions", self.create_chat_completion),
            web.post("/v1/completions", self.create_completion),
        ]

    async def list_models(self, request: web.Request) -> web.Response:
        """``GET /v1/models``."""
        models = [_model_json(model) for model in self.catalog.list_models()]
        return json_response(json.encode({"object": "list", "data": models}))

    async def get_model(self, request: web.Request) -> web.Response:
        """``GET /v1/models/{name}``."""
        model = self.catalog.find_model(request.match_info["name"])
        return json_response(json.encode(_model_json(model)))

    async def get_props(self, request: web.Request) -> web.Response:
        """``GET /props`` of llama-server, with the context length (``?model=``)."""
        loaded_model = await self.catalog.load_model(request.query.get("model"))
        model, template = loaded_model.model, loaded_model.tokenizer.chat_template
        found = {
            "default_generation_settings": {"n_ctx": model.max_model_len},
            "model_alias": model.name,
            "chat_template": "" if template is None else template.source,
            "modalities": {"vision": model.sees_images, "audio": False},
            "build_info": f"molink {molink.__version__}",
        }
        return json_response(json.encode(found))

    async def create_chat_completion(self, request: web.Request) -> web.StreamResponse:
        """``POST /v1/chat/completions``."""
        return await self.handle_generation(request, ChatBody, ChatEncoder)

    async def create_completion(self, request: web.Request) -> web.StreamResponse:
        """``POST /v1/completions``."""
        return await self.handle_generation(request, CompletionBody, CompletionEncoder)

    async def handle_generation(
        self,
        request: web.Request,
        kind: type[GenerationBody],
        encoder: Callable[[RequestPlan, bool], ResponseEncoder],
    ) -> web.StreamResponse:
        """Answer a body of ``kind``, in the format of ``encoder``."""
        body = await self.body_reader.decode_request(request, kind)
        stream = bool(body.stream)

        def form_of(plan: RequestPlan) -> ResponseEncoder:
            return encoder(plan, stream and body.includes_usage)

        return await self.handler.handle_request(request, ClientRequest(body, form_of, stream))


def _model_json(model: ServedModel) -> dict[str, object]:
    return {
        "id": model.name,
        "object": "model",
        "created": model.created,
        "owned_by": "molink",
        # Fields that clients of vLLM and llama-server read.
        "root": model.name,
        "parent": model.base or None,
        "max_model_len": model.max_model_len,
        "meta": {
            "n_ctx": model.max_model_len,
            "n_params": model.parameters,
            "size": model.size,
        },
        "capabilities": {"vision": model.sees_images},
    }
