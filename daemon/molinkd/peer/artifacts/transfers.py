"""The transfers of model files to this PC: what is told of them, and to whom."""

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from molink.swarm.artifacts.transfer import TransferRate
from molink.wire.messages.peer_reports import MAX_TRANSFERS, TransferState
from molinkd.peer.artifacts.progress import Progress

#: Between two looks at what is under way, in seconds.
POLL_INTERVAL_S = 0.5


@dataclass(slots=True)
class _Transfer:
    model: str
    progress: Progress
    is_replica: bool
    throughput: TransferRate

    @property
    def has_begun(self) -> bool:
        """Whether there is anything to be told; the rest of an earlier one is told there."""
        progress = self.progress
        return progress.prerequisite is None and progress.done < progress.total


@dataclass(slots=True)
class Transfers:
    """All transfers under way."""

    clock: Callable[[], float] = time.monotonic
    _transfers: list[_Transfer] = field(default_factory=list)
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    @contextmanager
    def track_transfer(
        self, model: str, progress: Progress, *, copy: bool = False
    ) -> Iterator[None]:
        """Meanwhile a transfer of ``model`` is told of; nobody waits for a ``copy``."""
        speed = TransferRate(self.clock(), progress.done - progress.existing)
        one = _Transfer(model, progress, copy, speed)
        self._transfers.append(one)
        self._changed.set()
        try:
            yield
        finally:
            self._transfers.remove(one)
            self._changed.set()

    def transfer_states(self) -> tuple[TransferState, ...]:
        """Those that have begun; first those that somebody waits for."""
        now = self.clock()
        found = []
        for one in self._transfers:
            progress = one.progress
            one.throughput.observe_bytes(progress.done - progress.existing, now)
            if one.has_begun:
                state = TransferState(
                    model=one.model,
                    done=progress.done,
                    total=progress.total,
                    rate=round(one.throughput.rate),
                    source=progress.source,
                    is_replica=one.is_replica,
                )
                found.append(state)
        found.sort(key=lambda state: state.is_replica)
        return tuple(found[:MAX_TRANSFERS])

    async def watch_transfers(self, tell: Callable[[], None]) -> None:
        """Call ``tell`` twice a second while any is under way, and once when they are over."""
        told = False
        while True:
            self._changed.clear()
            shown = bool(self.transfer_states())
            if shown or told:
                tell()
            told = shown
            with suppress(TimeoutError):
                async with asyncio.timeout(POLL_INTERVAL_S if self._transfers else None):
                    await self._changed.wait()
