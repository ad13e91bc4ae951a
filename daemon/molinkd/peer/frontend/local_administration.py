"""Carries out the owner's requests to the endpoint."""

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass

from molink.checkpoint.model_source import check_model_name
from molink.errors import Overloaded
from molinkd.api.administration import ModelProgress
from molinkd.peer.artifacts.hashing import run_in_thread
from molinkd.peer.artifacts.pulling import fetch_whole_model
from molinkd.peer.artifacts.transfers import POLL_INTERVAL_S, Progress
from molinkd.peer.home import Home
from molinkd.tasks import cancel_tasks

#: Maximum number of downloads at once.
MAX_PULLS = 4


@dataclass(slots=True)
class _Pull:
    task: asyncio.Task[object]
    progress: Progress
    num_watchers: int = 0


class LocalAdministration:
    """Implements :class:`molinkd.api.administration.Administration`."""

    def __init__(self, home: Home) -> None:
        self._home = home
        self._pulls: dict[str, _Pull] = {}

    async def pull_model(self, model: str) -> AsyncGenerator[ModelProgress, None]:
        """Fetch a model's files to this PC; clients that name the same model share the download.

        Raises:
            ModelError: no such model, or it is not accessible.
            Overloaded: :data:`MAX_PULLS` downloads are in progress.
        """
        pull = self._pulls.get(model) or self._start_pull(model)
        pull.num_watchers += 1
        try:
            while not pull.task.done():
                yield ModelProgress("fetching", *pull.progress.totals)
                await asyncio.wait([pull.task], timeout=POLL_INTERVAL_S)
            pull.task.result()
        finally:
            pull.num_watchers -= 1
            if not pull.num_watchers:
                del self._pulls[model]
                await cancel_tasks(pull.task)

    def _start_pull(self, model: str) -> _Pull:
        if len(self._pulls) >= MAX_PULLS:
            raise Overloaded(f"{MAX_PULLS} models are being fetched; wait for one", 60.0)
        progress = Progress(source="hub")

        async def fetch() -> object:
            await asyncio.to_thread(check_model_name, model)
            return await run_in_thread(
                lambda stop: fetch_whole_model(model, self._home, progress, stop)
            )

        pull = self._pulls[model] = _Pull(asyncio.create_task(fetch()), progress)
        return pull
