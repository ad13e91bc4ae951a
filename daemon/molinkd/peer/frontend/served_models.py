"""The models that the API offers: those with a route, once their tokenizer is on this PC."""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from molink.checkpoint.config import ModelConfig
from molink.errors import MolinkError
from molink.swarm.artifacts.sources import ModelSources
from molink.wire.messages.instructions import Route
from molinkd.api.backend import ServedModel
from molinkd.peer.artifacts.model_store import ModelStore
from molinkd.peer.artifacts.stored_model import read_stored_manifest
from molinkd.tasks import cancel_tasks

log = logging.getLogger(__name__)

#: Backoff of fetching a model's metadata, in seconds; the last pause repeats.
BACK_OFF_S = (0.2, 0.5, 1.0, 2.0, 5.0)


class ServedModels:
    """Fetches the metadata of every model with a route."""

    def __init__(
        self,
        store: ModelStore,
        on_change: Callable[[Sequence[ServedModel]], None],
        on_trouble: Callable[[str], None],
    ) -> None:
        """``on_trouble`` gets the message for a model that can't be offered."""
        self._store = store
        self._on_problem = on_trouble
        self._on_change = on_change
        self._routes: dict[str, Route] = {}
        self._served: dict[str, ServedModel] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def update_route(self, route: Route) -> None:
        """Offer the model of a route, with the pipelines' maximum request length.

        A model that has changed in all its pipelines is fetched again.
        """
        self._routes[route.pipeline] = route
        served = self._served.get(route.model)
        if served is not None and served.root in self._roots(route.model):
            context = self._max_model_len(route.model)
            if route.is_ready and context not in (0, served.max_model_len):
                self._served[route.model] = replace(served, max_model_len=context)
                self._on_change(tuple(self._served.values()))
        elif route.model not in self._tasks:
            task = asyncio.get_running_loop().create_task(self._fetch_model(route.model))
            self._tasks[route.model] = task

    def remove_pipeline(self, pipeline: str) -> None:
        """Drop a removed pipeline, and its model with its last pipeline."""
        route = self._routes.pop(pipeline, None)
        if route is None or self._find_route(route.model) is not None:
            return
        task = self._tasks.pop(route.model, None)
        if task is not None:
            task.cancel()
        if self._served.pop(route.model, None) is not None:
            self._on_change(tuple(self._served.values()))

    async def close(self) -> None:
        """Cancel transfers."""
        tasks = list(self._tasks.values())
        await cancel_tasks(*tasks)

    def _find_route(self, model: str) -> Route | None:
        return next((route for route in self._routes.values() if route.model == model), None)

    def _roots(self, model: str) -> set[str]:
        """What the model's pipelines serve."""
        return {route.root for route in self._routes.values() if route.model == model}

    def _max_model_len(self, model: str) -> int:
        """Tokens per request that every ready pipeline allows; 0 if unknown."""
        routes = [route for route in self._routes.values() if route.model == model]
        known = [route for route in routes if route.is_ready] or routes
        return min((route.max_model_len for route in known), default=0)

    async def _fetch_model(self, model: str) -> None:
        attempt = 0
        try:
            while (route := self._find_route(model)) is not None:
                try:
                    served = await self._load_model(route)
                except (MolinkError, OSError) as error:
                    log.warning("no tokenizer of %s yet: %s", model, error)
                    await asyncio.sleep(BACK_OFF_S[min(attempt, len(BACK_OFF_S) - 1)])
                    attempt += 1
                    continue
                self._served[model] = served
                self._on_change(tuple(self._served.values()))
                return
        except Exception as error:
            log.exception("fetching the tokenizer of %s failed", model)
            self._on_problem(f"can't offer {model}: {type(error).__name__}: {error}")
        finally:
            if self._tasks.get(model) is asyncio.current_task():
                del self._tasks[model]

    async def _load_model(self, route: Route) -> ServedModel:
        folder = await self._store.fetch_metadata(
            route.model, route.root, ModelSources.from_message(route), rate_limited=route.is_ready
        )
        config = await asyncio.to_thread(ModelConfig.load_folder, folder)
        context = self._max_model_len(route.model) or config.max_model_len
        size = await asyncio.to_thread(_weight_bytes, folder, route.root)
        # Readers of GGUF files and templates, which a PC that joins does not need yet.
        from molinkd.peer.artifacts.model_summary import describe_model

        about = await asyncio.to_thread(describe_model, [folder])
        return ServedModel(
            route.model,
            folder,
            context,
            int(time.time()),
            config.short_context,
            size,
            route.root,
            config.task,
            config.hidden_size,
            tuple(adapter.name for adapter in config.adapters),
            parameters=about.parameters or 0,
            quantization=about.quantization or "",
            sees_images=config.vision is not None,
        )


def _weight_bytes(folder: Path, root: str) -> int:
    """Bytes of a model's weights, most of which may be on other PCs."""
    manifest = read_stored_manifest(folder, root)
    if manifest is not None:
        return manifest.weight_bytes
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))
