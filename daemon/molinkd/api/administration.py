"""What this PC's owner may do over the endpoint, as a protocol. The daemon implements it."""

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from molink.facts.model import Quantize


@dataclass(frozen=True, slots=True)
class ModelProgress:
    """Progress of fetching or loading a model, in bytes; ``total`` is 0 while it is unknown.

    ``state`` is ``looking``, ``fetching``, ``hashing``, or ``asked`` once the swarm serves it as
    ``name``.
    """

    state: str
    done: int = 0
    total: int = 0
    name: str = ""


class LocalModel(msgspec.Struct, frozen=True):
    """A model on this PC's disk; ``size`` in bytes. A ``partial`` one lacks files.

    ``source`` is what :meth:`Administration.serve_model` takes; empty if that can't serve it.
    """

    name: str
    size: int
    partial: bool = False
    source: str = ""


class PcSetting(msgspec.Struct, frozen=True):
    """A setting of this PC for its next start; any text is valid without ``choices``.

    ``source`` says what sets it, empty for its default.
    """

    name: str
    about: str
    value: str
    choices: tuple[str, ...] = ()
    source: str = ""


class Administration(Protocol):
    """The owner's actions. All are called on the endpoint's event loop and may raise
    ``MolinkError``."""

    @property
    def peer_id(self) -> str:
        """This PC's id."""
        ...

    @property
    def quantize(self) -> Quantize:
        """How this PC serves models."""
        ...

    def pull_model(self, model: str) -> AsyncGenerator[ModelProgress, None]:
        """Fetch a model's files to this PC; yields the progress until they are complete.

        Closing the generator stops the download, unless another client waits for it.
        """
        ...

    def serve_model(self, model: str) -> AsyncGenerator[ModelProgress, None]:
        """Have the swarm serve a model in place of those it serves; yields the progress.

        The last one has the state ``asked``. Closing the generator stops nothing.
        """
        ...

    async def stop_model(self, name: str) -> None:
        """Unload a served model on all PCs."""
        ...

    async def decide_pairing(self, code: str, *, refuse: bool) -> str:
        """Approve or refuse the PC that shows ``code``; returns its name."""
        ...

    async def set_drained(self, drained: bool) -> None:
        """Move this PC's layers away, or take some again."""
        ...

    async def list_settings(self) -> Sequence[PcSetting]:
        """List the settings of this PC that may be changed here."""
        ...

    async def change_setting(self, name: str, value: str) -> None:
        """Change a setting from the next start on; an empty value forgets the change."""
        ...

    async def list_local_models(self) -> Sequence[LocalModel]:
        """List the models on this PC's disk."""
        ...
