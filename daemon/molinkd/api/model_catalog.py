"""The models that can be asked for, with their tokenizers, loaded once and off the event loop."""

import asyncio
from pathlib import Path

from molink.errors import ModelNotFound, RequestError, Unavailable
from molink.text.tokenizer import Tokenizer
from molink.text.tool_calls.create import ToolCallParserChoice
from molinkd.api.backend import Backend, ServedModel
from molinkd.api.loaded_model import LoadedModel


class ModelCatalog:
    """Finds models by name; a tokenizer is loaded when its model is first asked for."""

    def __init__(self, backend: Backend, tool_call_parser: ToolCallParserChoice = "auto") -> None:
        self._backend = backend
        self._tool_call_parser = tool_call_parser
        self._loads: dict[Path, asyncio.Task[Tokenizer]] = {}

    def find_model(self, name: str | None) -> ServedModel:
        """The model called ``name``; without a name, the only one that is served.

        Raises:
            ModelNotFound: there is none; the message lists those that there are.
            RequestError: no name, and there is a choice.
            Unavailable: no model at all is served now.
        """
        models = self._backend.list_models()
        if not models:
            raise Unavailable(
                "no model is served here now: `molink status` says why, and `molink run MODEL` has "
                "the swarm serve one"
            )
        if name is None:
            if len(models) == 1:
                return models[0]
            served = ", ".join(model.name for model in models)
            raise RequestError(f"`model`: which one? There are: {served}", "model")
        for model in models:
            if model.name == name:
                return model
        names = ", ".join(model.name for model in models)
        raise ModelNotFound(f"there is no model {name[:128]!r} here; available: {names}")

    async def load_model(self, name: str | None) -> LoadedModel:
        """The model called ``name`` (see :meth:`find_model`), ready to tokenize.

        Raises:
            RequestError: no name, and there is a choice.
            ModelNotFound: there is no such model.
            Unavailable: no model at all is served now.
            BrokenModel: its tokenizer can't be loaded.
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
            return await asyncio.shield(load)  # others may wait for it when this client leaves
        except Exception:
            if self._loads.get(folder) is load:
                del self._loads[folder]  # so that a mended folder is read again
            raise


def _retrieve_exception(load: asyncio.Task[Tokenizer]) -> None:
    """Take note of a failure, in case every client that waited for it has left."""
    if not load.cancelled():
        load.exception()
