"""Whole volumes in the order in which they were produced, as Helix sends them."""

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
    """First produced, first sent, whatever the channel: a decode waits for the prefill before
    it."""

    name = "fifo"
    single_channel = True

    def __init__(self) -> None:
        self._waiting: deque[RowsProducedEvent] = deque()

    def handle(self, event: LinkEvent, now: float) -> None:
        """Only what was produced matters here."""
        if isinstance(event, RowsProducedEvent):
            self._waiting.append(event)

    def choose_action(self, now: float, ready: Collection[Channel]) -> LinkAction:
        """The oldest volume, or nothing while the channel of all can't take it."""
        if not self._waiting or Channel.BULK not in ready:
            return WaitAction()
        first = self._waiting.popleft()
        return SendRowsAction(first.volume, first.rows)


#: Bytes that a volume sends at its turn (at least one row).
FRAGMENT_BYTES = 16 * 1024


class ConcurrentPolicy:
    """Round robin over all unfinished volumes, a small piece of each.

    vLLM hands each tensor to a send of its own as soon as it is computed, and nothing orders them:
    the transport interleaves their bytes. So decode rows keep a connection of their own here, which
    competes with that of the bulk; on a single one the kernel's queue would make them wait for all
    bytes before them, which is :class:`~molink.link.policies.baselines.FifoPolicy`.
    """

    name = "concurrent"
    single_channel = False

    def __init__(self) -> None:
        self._pending: dict[int, PendingRows] = {}
        #: Of each channel the volumes and their places in the round, the next one first.
        self._round: dict[Channel, deque[tuple[int, int]]] = {
            channel: deque() for channel in Channel
        }
        self._positions = count()

    def handle(self, event: LinkEvent, now: float) -> None:
        """Only what was produced matters here."""
        if not isinstance(event, RowsProducedEvent) or event.rows <= 0:
            return
        there = self._pending.get(event.volume)
        if there is not None:
            there.rows += event.rows
            return
        self._pending[event.volume] = PendingRows(event.volume, event.rows, event.row_bytes)
        self._round[event.channel].append((next(self._positions), event.volume))

    def choose_action(self, now: float, ready: Collection[Channel]) -> LinkAction:
        """A piece of the volume whose turn it is, of those whose channel is ready."""
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
