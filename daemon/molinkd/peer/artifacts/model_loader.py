"""Models that the user of this PC wants the swarm to serve while its daemon runs."""

import asyncio
from collections.abc import Awaitable, Callable

from molink.errors import MolinkError, WorkerError
from molink.wire.messages.admin import LoadModelReply
from molink.wire.messages.control_plane import ControlMessage
from molinkd.peer.artifacts.bootstrap import Bootstrap


class ModelLoader:
    """The newest wish; an earlier one ends with it."""

    def __init__(
        self,
        make_bootstrap: Callable[[str], Bootstrap],
        serve: Callable[[ControlMessage], Awaitable[object]],
        on_served: Callable[[str], None],
    ) -> None:
        """``make_bootstrap`` makes what finds a model; ``serve`` asks the coordinator for it.

        ``on_served`` is told of each wish that was carried out.
        """
        self._make_bootstrap, self._request_serving, self._on_served = (
            make_bootstrap,
            serve,
            on_served,
        )
        self._model = ""
        self._bootstrap: Bootstrap | None = None
        self._task: asyncio.Task[None] | None = None

    async def load_model(self, model: str) -> LoadModelReply:
        """How far it is with ``model``; begins it if that is another wish, or the last has ended.

        Raises:
            MolinkError: it can't be found, read or served; says why.
        """
        if self._task is None or self._model != model:
            await self.close()
            self._model, self._bootstrap = model, self._make_bootstrap(model)
            loop = asyncio.get_running_loop()
            self._task = loop.create_task(self._load(self._bootstrap))
        bootstrap, task = self._bootstrap, self._task
        assert bootstrap is not None
        if not task.done():
            done, total = bootstrap.progress.totals
            return LoadModelReply(
                ref=0, state=bootstrap.state, name=bootstrap.name, done=done, total=total
            )
        self._task = None
        try:
            await task
        except MolinkError:
            raise
        except Exception as error:
            raise WorkerError(f"{model} can't be served: internal error: {error!r}") from error
        return LoadModelReply(ref=0, state="asked", name=bootstrap.name)

    async def close(self) -> None:
        """End what is under way; what was fetched is kept."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _load(self, bootstrap: Bootstrap) -> None:
        await bootstrap.find_model()
        await bootstrap.hash_model()
        order = bootstrap.build_order()
        assert order is not None
        await self._request_serving(order)
        self._on_served(self._model)
