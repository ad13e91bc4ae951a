"""Fetches files for a future stage while another pipeline serves."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

import msgspec

from molink.errors import MolinkError
from molink.facts.layer_range import format_layers
from molink.swarm.artifacts.sources import ModelSources
from molink.swarm.membership.sanitize import MAX_REASON_CHARS
from molink.wire.messages.instructions import Prefetch
from molink.wire.messages.peer_reports import PrefetchState
from molinkd.peer.artifacts.model_store import ModelStore
from molinkd.peer.artifacts.transfers import Progress

log = logging.getLogger(__name__)


class Prefetcher:
    """Handles the coordinator's newest :class:`Prefetch`, which cancels an older one."""

    def __init__(
        self, store: ModelStore, on_change: Callable[[], None], ready: Callable[[], Awaitable[None]]
    ) -> None:
        """``ready()`` waits until a stage could start on this PC immediately.

        Where the device has no room for two stages, the serving one stops before the next one
        starts. The slowest PC then determines the downtime, so being ready is part of the prefetch.
        """
        self._store = store
        self._on_change = on_change
        self._wait_until_ready = ready
        self._message: Prefetch | None = None
        self._task: asyncio.Task[None] | None = None
        self._progress = Progress()
        self._state: PrefetchState | None = None

    @property
    def state(self) -> PrefetchState | None:
        """Progress for the peer report."""
        if self._state is None or self._state.state != "fetching":
            return self._state
        done, total = self._progress.totals
        return msgspec.structs.replace(self._state, done=done, total=total)

    def start_prefetch(self, message: Prefetch) -> None:
        """Start fetching, unless the same order is running or done."""
        if self._message == message and self._state is not None and self._state.state != "failed":
            self._on_change()
            return
        self.cancel_prefetch()
        self._message = message
        self._progress = Progress()
        self._set_state(PrefetchState(number=message.number, state="fetching"))
        self._task = asyncio.get_running_loop().create_task(self._fetch(message))

    def cancel_prefetch(self) -> None:
        """Cancel the transfer; complete files stay."""
        if self._task is not None:
            self._task.cancel()
        self._message = self._task = self._state = None

    async def close(self) -> None:
        """Cancel the transfer and wait for its end."""
        task = self._task
        self.cancel_prefetch()
        if task is not None:
            await asyncio.gather(task, return_exceptions=True)

    @property
    def transfer_text(self) -> str:
        """The running prefetch as text; empty if there is none."""
        if self._message is None or self._state is None or self._state.state != "fetching":
            return ""
        return f"fetching layers {format_layers(self._message.layers)} for a future stage"

    async def _fetch(self, message: Prefetch) -> None:
        reason = ""
        try:
            await self._store.fetch_stage(
                message.model,
                message.root,
                message.layers,
                ModelSources.from_message(message),
                self._progress,
                rate_limited=True,
            )
            await self._wait_until_ready()
        except MolinkError as error:
            reason = str(error)
            layers = format_layers(message.layers)
            log.warning("layers %s of %s: %s", layers, message.model, reason)
        except Exception as error:
            reason = f"internal error: {error!r}"
            log.exception("layers %s of %s", format_layers(message.layers), message.model)
        number = message.number
        if reason:
            self._set_state(
                PrefetchState(number=number, state="failed", reason=reason[:MAX_REASON_CHARS])
            )
        else:
            self._set_state(PrefetchState(number=number, state="done"))

    def _set_state(self, said: PrefetchState) -> None:
        self._state = said
        self._on_change()
