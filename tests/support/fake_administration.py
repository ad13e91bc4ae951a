"""An owner's actions that are scripted and recorded."""

from collections.abc import AsyncGenerator
from dataclasses import dataclass, field

from molinkd.api.administration import ModelProgress

TOKEN = "the-owner's-token"
HEADERS = {"Authorization": f"Bearer {TOKEN}"}


@dataclass
class FakeAdministration:
    """Says ``progress``, then raises ``error``, to everything that takes a while."""

    progress: tuple[ModelProgress, ...] = (
        ModelProgress("fetching"),
        ModelProgress("fetching", 5, 10),
        ModelProgress("fetching", 10, 10),
    )
    error: Exception | None = None
    done: list[tuple[object, ...]] = field(default_factory=list)

    async def pull_model(self, model: str) -> AsyncGenerator[ModelProgress, None]:
        self.done.append(("pull", model))
        for one in self.progress:
            yield one
        if self.error is not None:
            raise self.error
