"""Baseline policies: first in first out, as in Helix, and concurrent, as in vLLM."""

from collections import deque
from collections.abc import Collection
from itertools import count

from molink.link.policies.base import (
    LinkAction,
    LinkEvent,
    PendingRows,
    RowsProducedEvent,
    SendRowsAction,
    WaitAction,
)
from molink.wire.messages.data_plane import Channel


class FifoPolicy:
    """Sends volumes in order of production; decode rows wait for earlier prefill rows."""

    name = "fifo"
    single_channel = True

    def __init__(self) -> None:
        self._waiting: deque[RowsProducedEvent] = deque()

    def handle(self, event: LinkEvent, now: float) -> None:
        """Record produced rows."""
        if isinstance(event, RowsProducedEvent):
            self._waiting.append(event)

    def choose_action(self, now: float, ready: Collection[Channel]) -> LinkAction:
        """Send the oldest volume once the channel is ready."""
        if not self._waiting or Channel.BULK not in ready:
            return WaitAction()
        first = self._waiting.popleft()
        return SendRowsAction(first.volume, first.rows)


#: Bytes per volume and round (at least one row).
FRAGMENT_BYTES = 16 * 1024


class ConcurrentPolicy:
    """Round robin over all unfinished volumes in small fragments.

    vLLM starts a send of each tensor as soon as it is computed, and the transport interleaves them
    in no particular order. Therefore decode rows have their own connection here, which competes
    with the bulk one. On a single connection the kernel's queue would order all bytes, which is
    :class:`~molink.link.policies.baselines.FifoPolicy`.
    """

    name = "concurrent"
    single_channel = False

    def __init__(self) -> None:
        self._pending: dict[int, PendingRows] = {}
        #: By channel, volumes in round-robin order.
        self._round: dict[Channel, deque[tuple[int, int]]] = {
            channel: deque() for channel in Channel
        }
        self._positions = count()

    def handle(self, event: LinkEvent, now: float) -> None:
        """Record produced rows."""
        if not isinstance(event, RowsProducedEvent) or event.rows <= 0:
            return
        there = self._pending.get(event.volume)
        if there is not None:
            there.rows += event.rows
            return
        self._pending[event.volume] = PendingRows(event.volume, event.rows, event.row_bytes)
        self._round[event.channel].append((next(self._positions), event.volume))

    def choose_action(self, now: float, ready: Collection[Channel]) -> LinkAction:
        """Send a fragment of the next volume whose channel is ready."""
        channels = [channel for channel in ready if self._round[channel]]
        if not channels:
            return WaitAction()
        channel = min(channels, key=lambda each: self._round[each][0])
        _, name = self._round[channel].popleft()
        volume = self._pending[name]
        rows = min(volume.rows, max(1, FRAGMENT_BYTES // volume.row_bytes))
        volume.rows -= rows
        if volume.rows:
            self._round[channel].append((next(self._positions), name))
        else:
            del self._pending[name]
        return SendRowsAction(name, rows)
