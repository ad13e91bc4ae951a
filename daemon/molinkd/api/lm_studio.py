"""LM Studio's list of models, with their types and states."""

from dataclasses import dataclass

from aiohttp import web
from msgspec import json

from molinkd.api.backend import Backend, ServedModel
from molinkd.api.generation_handler import json_response
from molinkd.api.model_catalog import ModelCatalog
from molinkd.api.ollama.routes import read_family


@dataclass(frozen=True, slots=True)
class LMStudioRoutes:
    """``/api/v0/models``."""

    backend: Backend
    catalog: ModelCatalog

    @property
    def routes(self) -> list[web.RouteDef]:
        """All routes."""
        return [
            web.get("/api/v0/models", self.list_models),
            web.get("/api/v0/models/{name:.+}", self.get_model),
        ]

    async def list_models(self, request: web.Request) -> web.Response:
        """``GET /api/v0/models``."""
        models = [await self._model_json(model) for model in self.catalog.list_models()]
        return json_response(json.encode({"object": "list", "data": models}))

    async def get_model(self, request: web.Request) -> web.Response:
        """``GET /api/v0/models/{name}``."""
        model = self.catalog.find_model(request.match_info["name"])
        return json_response(json.encode(await self._model_json(model)))

    async def _model_json(self, model: ServedModel) -> dict[str, object]:
        is_ready = self.backend.is_ready(model.pipeline_model)
        return {
            "id": model.name,
            "object": "model",
            "type": "embeddings" if model.task.name == "embed" else "llm",
            "publisher": "",
            "arch": await read_family(model),
            "compatibility_type": "safetensors",
            "quantization": model.quantization,
            "state": "loaded" if is_ready else "not-loaded",
            "max_context_length": model.max_model_len,
            **({"loaded_context_length": model.max_model_len} if is_ready else {}),
        }
