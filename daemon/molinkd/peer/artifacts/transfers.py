"""The transfers of model files to this PC: what is told of them, and to whom."""

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from molink.swarm.throughput import Throughput
from molink.wire.messages.reports import MAX_TRANSFERS, TransferState
from molinkd.peer.artifacts.progress import Progress

#: Between two looks at what is under way, in seconds.
LOOK_S = 0.5


@dataclass(slots=True)
class _Running:
    model: str
    progress: Progress
    copy: bool
    speed: Throughput

    @property
    def begun(self) -> bool:
        """Whether there is anything to be told; the rest of an earlier one is told there."""
        progress = self.progress
        return progress.ahead is None and progress.done < progress.total


@dataclass(slots=True)
class Transfers:
    """All transfers under way."""

    clock: Callable[[], float] = time.monotonic
    _running: list[_Running] = field(default_factory=list)
    _news: asyncio.Event = field(default_factory=asyncio.Event)

    @contextmanager
    def under_way(self, model: str, progress: Progress, *, copy: bool = False) -> Iterator[None]:
        """Meanwhile a transfer of ``model`` is told of; nobody waits for a ``copy``."""
        speed = Throughput(self.clock(), progress.done - progress.kept)
        one = _Running(model, progress, copy, speed)
        self._running.append(one)
        self._news.set()
        try:
            yield
        finally:
            self._running.remove(one)
            self._news.set()

    def shown(self) -> tuple[TransferState, ...]:
        """Those that have begun; first those that somebody waits for."""
        now = self.clock()
        found = []
        for one in self._running:
            progress = one.progress
            one.speed.observe(progress.done - progress.kept, now)
            if one.begun:
                state = TransferState(
                    model=one.model,
                    done=progress.done,
                    total=progress.total,
                    rate=round(one.speed.rate),
                    source=progress.source,
                    copy=one.copy,
                )
                found.append(state)
        found.sort(key=lambda state: state.copy)
        return tuple(found[:MAX_TRANSFERS])

    async def watch(self, tell: Callable[[], None]) -> None:
        """Call ``tell`` twice a second while any is under way, and once when they are over."""
        told = False
        while True:
            self._news.clear()
            shown = bool(self.shown())
            if shown or told:
                tell()
            told = shown
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S if self._running else None):
                    await self._news.wait()
