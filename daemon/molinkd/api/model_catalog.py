"""The served models and their tokenizers, each loaded once off the event loop."""

import asyncio
from dataclasses import dataclass
from pathlib import Path

from molink.checkpoint.hub_catalog import load_catalog
from molink.checkpoint.model_names import short_name
from molink.errors import ModelNotFound, RequestError, Unavailable
from molink.text.tokenizer import Tokenizer
from molink.text.tool_calls.formats import ToolCallParserChoice
from molinkd.api.backend import Backend, ServedModel


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model, its tokenizer, and the parser of its answers."""

    model: ServedModel
    tokenizer: Tokenizer
    tool_call_parser: ToolCallParserChoice = "auto"


class ModelCatalog:
    """Finds models by name and loads a model's tokenizer on first use."""

    def __init__(self, backend: Backend, tool_call_parser: ToolCallParserChoice = "auto") -> None:
        self._backend = backend
        self._tool_call_parser = tool_call_parser
        self._loads: dict[Path, asyncio.Task[Tokenizer]] = {}

    def list_models(self) -> list[ServedModel]:
        """The served models, then their adapters; a model hides an adapter of its name."""
        models = {model.name: model for model in self._backend.list_models()}
        for model in [*models.values()]:
            for adapter in model.list_adapters():
                models.setdefault(adapter.name, adapter)
        return [*models.values()]

    def find_model(self, name: str | None) -> ServedModel:
        """Return the model or adapter called ``name``, or the only model if it is ``None``.

        Raises:
            ModelNotFound: no such model; the message lists those available.
            RequestError: ``name`` is missing and several models are served.
            Unavailable: no model is served.
        """
        models = self.list_models()
        if not models:
            raise Unavailable(
                "no model is served: `molink status` shows why, `molink run MODEL` loads one"
            )
        if name is None:
            whole = [model for model in models if not model.base]
            if len(whole) == 1:
                return whole[0]
            served = ", ".join(model.name for model in models)
            raise RequestError(f"`model` is required; available: {served}", "model")
        for model in models:
            if model.name == name:
                return model
        entry = load_catalog().find_entry(name)
        for model in models:
            if entry is not None and model.name == short_name(entry.source):
                return model
        served = ", ".join(model.name for model in models)
        raise ModelNotFound(f"model {name[:128]!r} not found; available: {served}")

    async def load_model(self, name: str | None) -> LoadedModel:
        """Return the model called ``name`` with its tokenizer; see :meth:`find_model`.

        Raises:
            RequestError: ``name`` is missing and several models are served.
            ModelNotFound: no such model.
            Unavailable: no model is served.
            BrokenModel: the tokenizer can't be loaded.
        """
        model = self.find_model(name)
        return LoadedModel(model, await self._load_tokenizer(model.folder), self._tool_call_parser)

    async def _load_tokenizer(self, folder: Path) -> Tokenizer:
        load = self._loads.get(folder)
        if load is None:
            served = {model.folder for model in self._backend.list_models()}
            self._loads = {path: old for path, old in self._loads.items() if path in served}
            load = asyncio.create_task(asyncio.to_thread(Tokenizer.open, folder))
            load.add_done_callback(_retrieve_exception)
            self._loads[folder] = load
        try:
            return await asyncio.shield(load)  # other clients may wait for it too
        except Exception:
            if self._loads.get(folder) is load:
                del self._loads[folder]  # retry after the folder was repaired
            raise


def _retrieve_exception(load: asyncio.Task[Tokenizer]) -> None:
    """Retrieve the exception, in case no client waits for the load any more."""
    if not load.cancelled():
        load.exception()
