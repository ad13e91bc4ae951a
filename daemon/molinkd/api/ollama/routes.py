"""The handlers of Ollama's routes."""

import asyncio
import re
from collections import Counter
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from aiohttp import web
from msgspec import json

from molink.checkpoint.config_fields import read_bytes
from molink.errors import MolinkError, RequestError
from molink.swarm.controller.status_schema import decode_status
from molink.text.generation_defaults import GenerationDefaults
from molinkd.api.backend import Backend, ServedModel
from molinkd.api.body_reader import BodyReader
from molinkd.api.generation_handler import ClientRequest, GenerationHandler, json_response
from molinkd.api.model_catalog import ModelCatalog
from molinkd.api.ollama.encoder import OllamaEncoder, format_now
from molinkd.api.ollama.schema import FIELD_NAMES, ChatRequest, GenerateRequest, ModelReference
from molinkd.api.openai.encoder import ResponseEncoder
from molinkd.api.openai.schema import ChatBody
from molinkd.api.request_plan import RequestPlan
from molinkd.api.tool_validation import model_capabilities

#: The emulated version of Ollama; clients check it for features.
OLLAMA_VERSION = "0.12.0"
#: The form of weights that are not quantized: ``none (bf16)``.
_PLAIN_FORM = re.compile(r"none \((.+)\)")
#: The ``expires_at`` of models, which stay loaded.
_NEVER_EXPIRES = "2318-01-01T00:00:00Z"


@dataclass(frozen=True, slots=True)
class OllamaRoutes:
    """``/api/chat``, ``generate``, ``tags``, ``show``, ``ps`` and ``version``."""

    backend: Backend
    body_reader: BodyReader
    catalog: ModelCatalog
    handler: GenerationHandler

    @property
    def routes(self) -> list[web.RouteDef]:
        """All routes."""
        return [
            web.post("/api/chat", self.create_chat),
            web.post("/api/generate", self.generate_text),
            web.get("/api/tags", self.list_models),
            web.post("/api/show", self.show_model),
            web.get("/api/ps", self.list_running),
            web.get("/api/version", self.get_version),
        ]

    async def create_chat(self, request: web.Request) -> web.StreamResponse:
        """``POST /api/chat``."""
        body = await self.body_reader.decode_request(request, ChatRequest)

        def form(plan: RequestPlan) -> ResponseEncoder:
            return OllamaEncoder(plan, chat=True)

        openai_body = body.as_openai()
        if not body.messages:
            return await self._load_response(
                body, {"message": {"role": "assistant", "content": ""}}
            )
        client_request = ClientRequest(
            openai_body, form, body.stream is not False, field_names=FIELD_NAMES
        )
        return await self.handler.handle_request(request, client_request)

    async def generate_text(self, request: web.Request) -> web.StreamResponse:
        """``POST /api/generate``."""
        body = await self.body_reader.decode_request(request, GenerateRequest)
        openai_body = body.as_openai()

        def form(plan: RequestPlan) -> ResponseEncoder:
            return OllamaEncoder(plan, chat=False)

        if not body.prompt:
            return await self._load_response(body, {"response": ""})
        names = FIELD_NAMES | ({"messages": "prompt"} if isinstance(openai_body, ChatBody) else {})
        client_request = ClientRequest(
            openai_body, form, body.stream is not False, field_names=names
        )
        return await self.handler.handle_request(request, client_request)

    async def list_models(self, request: web.Request) -> web.Response:
        """``GET /api/tags``: all models."""
        models = [await _model_json(model) for model in self.catalog.list_models()]
        return json_response(json.encode({"models": models}))

    async def list_running(self, request: web.Request) -> web.Response:
        """``GET /api/ps``: models that are ready."""
        models = self.catalog.list_models()
        ready = [model for model in models if self.backend.is_ready(model.pipeline_model)]
        gpu_bytes = await self._count_gpu_bytes() if ready else {}
        found = [
            {
                **await _model_json(model),
                "expires_at": _NEVER_EXPIRES,
                "size_vram": gpu_bytes.get(model.pipeline_model, 0),
                "context_length": model.max_model_len,
            }
            for model in ready
        ]
        return json_response(json.encode({"models": found}))

    async def show_model(self, request: web.Request) -> web.Response:
        """``POST /api/show``."""
        body = await self.body_reader.decode_request(request, ModelReference)
        if body.served_name is None:
            raise RequestError("`model`: required", "model")
        loaded_model = await self.catalog.load_model(body.served_name)
        model, template = loaded_model.model, loaded_model.tokenizer.chat_template
        model_json = await _model_json(model)
        family = model_json["details"]["family"]
        sizes = {"general.parameter_count": model.parameters} if model.parameters else {}
        if model.hidden_size:
            sizes[f"{family}.embedding_length"] = model.hidden_size
        capabilities = ["completion", *model_capabilities(loaded_model)]
        if model.task.name == "embed":
            capabilities = ["embedding"]
        found = {
            "modelfile": "",
            "parameters": _format_defaults(loaded_model.tokenizer.defaults),
            "template": "" if template is None else template.source,
            "details": model_json["details"],
            "model_info": {
                "general.architecture": family,
                f"{family}.context_length": model.max_model_len,
                **sizes,
            },
            "capabilities": capabilities,
            "modified_at": model_json["modified_at"],
        }
        return json_response(json.encode(found))

    async def _count_gpu_bytes(self) -> dict[str, int]:
        """Return the bytes of weights on GPUs, by model; empty if the status is unavailable."""
        found: Counter[str] = Counter()
        try:
            status = decode_status(await self.backend.fetch_status())
        except MolinkError:
            return found
        models = {one.id: one.model or status.model or "" for one in status.pipelines}
        for peer in status.peers:
            for worker in peer.workers if peer.device.startswith("cuda") else ():
                if worker.load is not None and worker.pipeline in models:
                    found[models[worker.pipeline]] += worker.load.weights
        return found

    async def get_version(self, request: web.Request) -> web.Response:
        """``GET /api/version``."""
        return json_response(json.encode({"version": OLLAMA_VERSION}))

    async def _load_response(
        self, body: ChatRequest | GenerateRequest, fields: dict[str, Any]
    ) -> web.Response:
        """Answer a request that only loads or unloads a model, which has no effect."""
        loaded_model = await self.catalog.load_model(body.served_name)
        reason = "unload" if body.keep_alive in (0, "0", "0s", "0m", "0h") else "load"
        found = {"model": loaded_model.model.name, "created_at": format_now(), **fields}
        return json_response(json.encode({**found, "done": True, "done_reason": reason}))


async def read_family(model: ServedModel) -> str:
    """Return the architecture in the model's config; ``unknown`` if it can't be read."""
    return await asyncio.to_thread(_read_family, model.folder / "config.json")


async def _model_json(model: ServedModel) -> dict[str, Any]:
    """Return a model as ``/api/tags`` lists it."""
    family = await read_family(model)
    return {
        "name": model.name,
        "model": model.name,
        "modified_at": datetime.fromtimestamp(model.created, UTC).isoformat(),
        "size": model.size,
        "digest": model.root.partition(":")[0],
        "details": {
            "parent_model": model.base,
            "format": "safetensors",
            "family": family,
            "families": [family],
            "parameter_size": format_count(model.parameters),
            "quantization_level": _PLAIN_FORM.sub(r"\1", model.quantization).upper(),
        },
    }


def format_count(parameters: int) -> str:
    """Format a number of parameters as Ollama does: ``5.2M``, ``8.2B``; empty if unknown."""
    if not parameters:
        return ""
    return f"{parameters / 1e9:.1f}B" if parameters >= 1e9 else f"{parameters / 1e6:.2f}M"


def _format_defaults(defaults: GenerationDefaults) -> str:
    """Format the model's own sampling as the lines of a Modelfile, without ``PARAMETER``."""
    names = ("temperature", "top_k", "top_p", "min_p")
    given = ((name, getattr(defaults, name)) for name in names)
    return "\n".join(f"{name} {value:g}" for name, value in given if value is not None)


def _read_family(path: Path) -> str:
    try:
        config = json.decode(read_bytes(path), type=dict[str, Any])
    except (MolinkError, OSError, ValueError):
        return "unknown"
    return str(config.get("model_type", "unknown"))
