"""Loads models that the user requests while the daemon runs."""

import asyncio
from collections.abc import Awaitable, Callable

from molink.errors import MolinkError, WorkerError
from molink.wire.messages.admin import LoadModelReply
from molink.wire.messages.control_plane import ControlMessage
from molinkd.peer.artifacts.bootstrap import Bootstrap
from molinkd.tasks import cancel_tasks


class ModelLoader:
    """Handles the newest request; a newer model cancels an older one."""

    def __init__(
        self,
        make_bootstrap: Callable[[str], Bootstrap],
        serve: Callable[[ControlMessage], Awaitable[object]],
        on_served: Callable[[str], None],
    ) -> None:
        """``make_bootstrap`` creates the loader of a model, ``serve`` calls the coordinator.

        ``on_served`` gets the model of each completed request.
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
        """The progress of loading ``model``; starts it unless it is running already.

        Raises:
            MolinkError: The model can't be found, read or served.
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
            raise WorkerError(f"can't serve {model}: internal error: {error!r}") from error
        return LoadModelReply(ref=0, state="asked", name=bootstrap.name)

    async def close(self) -> None:
        """Cancel the running request; fetched files stay."""
        task, self._task = self._task, None
        await cancel_tasks(task)

    async def _load(self, bootstrap: Bootstrap) -> None:
        await bootstrap.find_model()
        await bootstrap.hash_model()
        order = bootstrap.build_order()
        assert order is not None
        await self._request_serving(order)
        self._on_served(self._model)
