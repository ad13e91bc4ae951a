"""Tracks the transfers of model files to this PC."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from molink.swarm.artifacts.transfer import TransferRate
from molink.wire.messages.peer_reports import MAX_TRANSFERS, TransferState


@dataclass(slots=True)
class Progress:
    """Bytes done and in total; updated from any thread."""

    done: int = 0
    total: int = 0
    #: Bytes of ``done`` that existed before the transfer.
    existing: int = 0
    #: Current source: a peer id or ``hub``; empty before the first.
    source: str = ""
    #: Progress of another transfer that has to finish first.
    prerequisite: "Progress | None" = field(default=None, repr=False, compare=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    def add_bytes(self, nbytes: int) -> None:
        """Count ``nbytes`` as done."""
        with self._lock:
            self.done += nbytes

    def add_existing(self, nbytes: int) -> None:
        """Count ``nbytes`` as done before the transfer."""
        with self._lock:
            self.done += nbytes
            self.existing += nbytes

    def set_source(self, source: str) -> None:
        """Set the current source."""
        self.source = source

    def merge_prerequisite(self) -> None:
        """Count the finished prerequisite as part of this work."""
        ahead, self.prerequisite = self.prerequisite, None
        if ahead is not None:
            self.add_bytes(ahead.done)
            self.total += ahead.done

    @property
    def totals(self) -> tuple[int, int]:
        """Bytes done and in total, of the prerequisite first. The former never decreases."""
        if self.prerequisite is not None:
            return self.prerequisite.done, self.prerequisite.total
        return self.done, self.total

    def __str__(self) -> str:
        return f"{self.done / 1e6:.0f} of {self.total / 1e6:.0f} MB"


#: Polling interval while a transfer is in progress, in seconds.
POLL_INTERVAL_S = 0.5


@dataclass(slots=True)
class _Transfer:
    model: str
    progress: Progress
    is_replica: bool
    throughput: TransferRate

    @property
    def has_begun(self) -> bool:
        """Whether it has bytes to report; a waiting transfer is reported by its prerequisite."""
        progress = self.progress
        return progress.prerequisite is None and progress.done < progress.total


@dataclass(slots=True)
class Transfers:
    """All transfers in progress."""

    clock: Callable[[], float] = time.monotonic
    _transfers: list[_Transfer] = field(default_factory=list)
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    @contextmanager
    def track_transfer(
        self, model: str, progress: Progress, *, copy: bool = False
    ) -> Iterator[None]:
        """Track a transfer of ``model`` during the context; ``copy`` marks replication."""
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
        """Transfers that have begun, replication last."""
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

    async def watch_transfers(self, notify: Callable[[], None]) -> None:
        """Call ``notify`` twice a second during transfers, and once after the last."""
        was_active = False
        while True:
            self._changed.clear()
            is_active = bool(self.transfer_states())
            if is_active or was_active:
                notify()
            was_active = is_active
            with suppress(TimeoutError):
                async with asyncio.timeout(POLL_INTERVAL_S if self._transfers else None):
                    await self._changed.wait()
