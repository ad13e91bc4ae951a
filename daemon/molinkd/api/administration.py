"""What this PC's owner may do over the endpoint, as a protocol. The daemon implements it."""

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class ModelProgress:
    """Progress of fetching or loading a model, in bytes; ``total`` is 0 while it is unknown."""

    state: str
    done: int = 0
    total: int = 0


class Administration(Protocol):
    """The owner's actions. All are called on the endpoint's event loop and may raise
    ``MolinkError``."""

    def pull_model(self, model: str) -> AsyncGenerator[ModelProgress, None]:
        """Fetch a model's files to this PC; yields the progress until they are complete.

        Closing the generator stops the download, unless another client waits for it.
        """
        ...
