"""Models that the user of this PC wants the swarm to serve while its daemon runs."""

import asyncio
from collections.abc import Awaitable, Callable

from molink.errors import MolinkError, WorkerError
from molink.wire.messages.control import ControlMessage
from molink.wire.messages.requests import Bringing
from molinkd.peer.artifacts.founder import Founder


class Bringer:
    """The newest wish; an earlier one ends with it."""

    def __init__(
        self,
        begin: Callable[[str], Founder],
        serve: Callable[[ControlMessage], Awaitable[object]],
        served: Callable[[str], None],
    ) -> None:
        """``begin`` makes what finds a model; ``serve`` asks the coordinator for it.

        ``served`` is told of each wish that was carried out.
        """
        self._begin, self._serve, self._served = begin, serve, served
        self._model = ""
        self._founder: Founder | None = None
        self._task: asyncio.Task[None] | None = None

    async def ask(self, model: str) -> Bringing:
        """How far it is with ``model``; begins it if that is another wish, or the last has ended.

        Raises:
            MolinkError: it can't be found, read or served; says why.
        """
        if self._task is None or self._model != model:
            await self.close()
            self._model, self._founder = model, self._begin(model)
            loop = asyncio.get_running_loop()
            self._task = loop.create_task(self._bring(self._founder))
        founder, task = self._founder, self._task
        assert founder is not None
        if not task.done():
            done, total = founder.progress.shown
            return Bringing(ref=0, state=founder.state, name=founder.name, done=done, total=total)
        self._task = None
        try:
            await task
        except MolinkError:
            raise
        except Exception as error:
            raise WorkerError(f"{model} can't be served: internal error: {error!r}") from error
        return Bringing(ref=0, state="asked", name=founder.name)

    async def close(self) -> None:
        """End what is under way; what was fetched is kept."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _bring(self, founder: Founder) -> None:
        await founder.find_model()
        await founder.hash_model()
        order = founder.order()
        assert order is not None
        await self._serve(order)
        self._served(self._model)
