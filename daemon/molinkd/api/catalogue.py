"""The models that can be asked for, with their tokenizers, loaded once and off the event loop."""

import asyncio
from pathlib import Path

from molink.errors import ModelNotFound, RequestError, Unavailable
from molink.text.calls.create import FormatChoice
from molink.text.tokenizer import Tokenizer
from molinkd.api.backend import Backend, ServedModel
from molinkd.api.offer import Offer


class Catalogue:
    """Finds models by name; a tokenizer is loaded when its model is first asked for."""

    def __init__(self, backend: Backend, answer_format: FormatChoice = "auto") -> None:
        self._backend = backend
        self._answer_format = answer_format
        self._loads: dict[Path, asyncio.Task[Tokenizer]] = {}

    def find(self, name: str | None) -> ServedModel:
        """The model called ``name``; without a name, the only one that is served.

        Raises:
            ModelNotFound: there is none; the message lists those that there are.
            RequestError: no name, and there is a choice.
            Unavailable: no model at all is served now.
        """
        models = self._backend.models()
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

    async def offer(self, name: str | None) -> Offer:
        """The model called ``name`` (see :meth:`find`), ready to tokenize.

        Raises:
            RequestError: no name, and there is a choice.
            ModelNotFound: there is no such model.
            Unavailable: no model at all is served now.
            BrokenModel: its tokenizer can't be loaded.
        """
        model = self.find(name)
        return Offer(model, await self._tokenizer(model.folder), self._answer_format)

    async def _tokenizer(self, folder: Path) -> Tokenizer:
        load = self._loads.get(folder)
        if load is None:
            served = {model.folder for model in self._backend.models()}
            self._loads = {path: old for path, old in self._loads.items() if path in served}
            load = asyncio.create_task(asyncio.to_thread(Tokenizer.open, folder))
            load.add_done_callback(_retrieve)
            self._loads[folder] = load
        try:
            return await asyncio.shield(load)  # others may wait for it when this client leaves
        except Exception:
            if self._loads.get(folder) is load:
                del self._loads[folder]  # so that a mended folder is read again
            raise


def _retrieve(load: asyncio.Task[Tokenizer]) -> None:
    """Take note of a failure, in case every client that waited for it has left."""
    if not load.cancelled():
        load.exception()
