"""Gets files for a stage that is to be, while another pipeline still serves."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

import msgspec

from molink.errors import MolinkError
from molink.swarm.artifacts.supply import Supply
from molink.swarm.membership.hygiene import MAX_REASON
from molink.wire.messages.instructions import Prefetch
from molink.wire.messages.reports import Prefetched
from molinkd.peer.artifacts.progress import Progress
from molinkd.peer.artifacts.store import Store

log = logging.getLogger(__name__)


class Prefetcher:
    """The newest :class:`Prefetch` of the coordinator; an earlier one ends with it."""

    def __init__(
        self, store: Store, on_change: Callable[[], None], ready: Callable[[], Awaitable[None]]
    ) -> None:
        """``ready()`` waits until a stage could begin here at once.

        Where a device has no room for two stages, what serves ends before the next one begins; then
        everybody waits for the slowest PC.
        """
        self._store = store
        self._on_change = on_change
        self._ready = ready
        self._message: Prefetch | None = None
        self._task: asyncio.Task[None] | None = None
        self._progress = Progress()
        self._state: Prefetched | None = None

    @property
    def state(self) -> Prefetched | None:
        """What reports say of it."""
        if self._state is None or self._state.state != "fetching":
            return self._state
        done, total = self._progress.shown
        return msgspec.structs.replace(self._state, done=done, total=total)

    def begin(self, message: Prefetch) -> None:
        """Get the files; the same wish again changes nothing while it is carried out or done."""
        if self._message == message and self._state is not None and self._state.state != "failed":
            self._on_change()
            return
        self.cancel()
        self._message = message
        self._progress = Progress()
        self._say(Prefetched(number=message.number, state="fetching"))
        self._task = asyncio.get_running_loop().create_task(self._fetch(message))

    def cancel(self) -> None:
        """End the transfer; what is whole is kept."""
        if self._task is not None:
            self._task.cancel()
        self._message = self._task = self._state = None

    async def close(self) -> None:
        """End the transfer and wait for it."""
        task = self._task
        self.cancel()
        if task is not None:
            await asyncio.gather(task, return_exceptions=True)

    @property
    def under_way(self) -> str:
        """What is fetched, for a person; empty if nothing is."""
        if self._message is None or self._state is None or self._state.state != "fetching":
            return ""
        return "to hold layers {}:{} soon; their files come first".format(*self._message.layers)

    async def _fetch(self, message: Prefetch) -> None:
        reason = ""
        try:
            await self._store.stage(
                message.model,
                message.root,
                message.layers,
                Supply.of(message),
                self._progress,
                paced=True,
            )
            await self._ready()
        except MolinkError as error:
            reason = str(error)
            log.warning("layers %d:%d of %s: %s", *message.layers, message.model, reason)
        except Exception as error:
            reason = f"internal error: {error!r}"
            log.exception("layers %d:%d of %s", *message.layers, message.model)
        number = message.number
        if reason:
            self._say(Prefetched(number=number, state="failed", reason=reason[:MAX_REASON]))
        else:
            self._say(Prefetched(number=number, state="done"))

    def _say(self, said: Prefetched) -> None:
        self._state = said
        self._on_change()
