"""LM Studio's REST routes: its lists of models, and answers with statistics."""

import contextlib
from dataclasses import dataclass

from aiohttp import web
from msgspec import json

import molink
from molink.errors import MolinkError
from molinkd.api.backend import Backend, ServedModel
from molinkd.api.generation_handler import json_response
from molinkd.api.generation_runner import Usage
from molinkd.api.model_catalog import ModelCatalog
from molinkd.api.ollama.routes import format_count, read_family
from molinkd.api.openai.encoder import ChatEncoder, CompletionEncoder
from molinkd.api.openai.routes import OpenAIRoutes
from molinkd.api.openai.schema import ChatBody, CompletionBody
from molinkd.api.pooling.embedding_routes import EmbeddingRoutes
from molinkd.api.tool_validation import model_capabilities

#: Why an answer ended, by LM Studio's names.
_STOP_REASONS = {
    "stop": "eosFound",
    "length": "maxPredictedTokensReached",
    "tool_calls": "toolCalls",
}


@dataclass(frozen=True, slots=True)
class LMStudioRoutes:
    """Version 0 of LM Studio's API, and ``/api/v1/models``.

    The rest of version 1 keeps chats or loads models, which clients can't do here.
    """

    backend: Backend
    catalog: ModelCatalog
    openai: OpenAIRoutes
    embeddings: EmbeddingRoutes

    @property
    def routes(self) -> list[web.RouteDef]:
        """All routes."""
        return [
            web.get("/api/v0/models", self.list_models),
            web.get("/api/v0/models/{name:.+}", self.get_model),
            web.post("/api/v0/chat/completions", self.create_chat_completion),
            web.post("/api/v0/completions", self.create_completion),
            web.post("/api/v0/embeddings", self.create_embeddings),
            web.get("/api/v1/models", self.list_models_and_instances),
        ]

    async def list_models(self, request: web.Request) -> web.Response:
        """``GET /api/v0/models``."""
        models = [await self._model_json(model) for model in self.catalog.list_models()]
        return json_response(json.encode({"object": "list", "data": models}))

    async def get_model(self, request: web.Request) -> web.Response:
        """``GET /api/v0/models/{name}``."""
        model = self.catalog.find_model(request.match_info["name"])
        return json_response(json.encode(await self._model_json(model)))

    async def create_chat_completion(self, request: web.Request) -> web.StreamResponse:
        """``POST /api/v0/chat/completions``."""
        return await self.openai.handle_generation(request, ChatBody, _ChatEncoder)

    async def create_completion(self, request: web.Request) -> web.StreamResponse:
        """``POST /api/v0/completions``."""
        return await self.openai.handle_generation(request, CompletionBody, _CompletionEncoder)

    async def create_embeddings(self, request: web.Request) -> web.Response:
        """``POST /api/v0/embeddings``."""
        return await self.embeddings.create_embeddings(request)

    async def list_models_and_instances(self, request: web.Request) -> web.Response:
        """``GET /api/v1/models``."""
        models = [await self._model_v1_json(model) for model in self.catalog.list_models()]
        return json_response(json.encode({"models": models}))

    async def _model_json(self, model: ServedModel) -> dict[str, object]:
        is_ready = self.backend.is_ready(model.pipeline_model)
        kind = "vlm" if model.sees_images else "llm"
        return {
            "id": model.name,
            "object": "model",
            "type": "embeddings" if model.task.name == "embed" else kind,
            "publisher": "",
            "arch": await read_family(model),
            "compatibility_type": "safetensors",
            "quantization": model.quantization,
            "state": "loaded" if is_ready else "not-loaded",
            "max_context_length": model.max_model_len,
            **({"loaded_context_length": model.max_model_len} if is_ready else {}),
        }

    async def _model_v1_json(self, model: ServedModel) -> dict[str, object]:
        is_ready = self.backend.is_ready(model.pipeline_model)
        instance = {"id": model.name, "config": {"context_length": model.max_model_len}}
        found: dict[str, object] = {
            "type": "embedding" if model.task.name == "embed" else "llm",
            "publisher": "",
            "key": model.name,
            "display_name": model.name,
            "quantization": {"name": model.quantization or None, "bits_per_weight": None},
            "size_bytes": model.size,
            "params_string": format_count(model.parameters) or None,
            "loaded_instances": [instance] if is_ready else [],
            "max_context_length": model.max_model_len,
            # LM Studio knows GGUF and MLX alone; a ring reads either as tensors.
            "format": None,
        }
        if model.task.name == "embed":
            return found
        capabilities: list[str] = []
        with contextlib.suppress(MolinkError):  # a model without a readable tokenizer is listed
            capabilities = model_capabilities(await self.catalog.load_model(model.name))
        return found | {
            "architecture": await read_family(model),
            "capabilities": {
                "vision": model.sees_images,
                "trained_for_tool_use": "tools" in capabilities,
            },
        }


class _ChatEncoder(ChatEncoder):
    """``chat.completion`` with statistics."""

    def _figures(self, usage: Usage) -> dict[str, object]:
        return super()._figures(usage) | _statistics(self._model, usage)


class _CompletionEncoder(CompletionEncoder):
    """``text_completion`` with statistics."""

    def _figures(self, usage: Usage) -> dict[str, object]:
        return super()._figures(usage) | _statistics(self._model, usage)


def _statistics(model: ServedModel, usage: Usage) -> dict[str, object]:
    """Return what LM Studio's version 0 adds to OpenAI's answers; times are in seconds."""
    reason = "stopStringFound" if usage.is_stop_string else _STOP_REASONS.get(usage.finish or "")
    return {
        "stats": {
            "tokens_per_second": usage.to_timings()["predicted_per_second"],
            "time_to_first_token": usage.prompt_s,
            "generation_time": usage.answer_s,
            "stop_reason": reason,
        },
        "model_info": {
            "quant": model.quantization,
            "format": "safetensors",
            "context_length": model.max_model_len,
        },
        "runtime": {
            "name": "molink",
            "version": molink.__version__,
            "supported_formats": ["safetensors", "gguf"],
        },
    }
