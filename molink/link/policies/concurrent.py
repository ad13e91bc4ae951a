"""Every volume at once, sharing the link, as vLLM's unscheduled sends do."""

from collections import deque
from collections.abc import Collection
from itertools import count

from molink.link.policies.backlog import Pending
from molink.link.policies.base import Decision, Event, Produced, SendRows, Wait
from molink.wire.messages.data import Lane

#: Bytes that a volume sends at its turn (at least one row).
PIECE = 16 * 1024


class Concurrent:
    """Round robin over all unfinished volumes, a small piece of each.

    vLLM hands each tensor to a send of its own as soon as it is computed, and nothing orders them:
    the transport interleaves their bytes. So decode rows keep a connection of their own here, which
    competes with that of the bulk; on a single one the kernel's queue would make them wait for all
    bytes before them, which is :class:`~molink.link.policies.fifo.Fifo`.
    """

    name = "concurrent"
    one_lane = False

    def __init__(self) -> None:
        self._pending: dict[int, Pending] = {}
        #: Of each lane the volumes and their places in the round, the next one first.
        self._round: dict[Lane, deque[tuple[int, int]]] = {lane: deque() for lane in Lane}
        self._places = count()

    def handle(self, event: Event, now: float) -> None:
        """Only what was produced matters here."""
        if not isinstance(event, Produced) or event.rows <= 0:
            return
        there = self._pending.get(event.volume)
        if there is not None:
            there.rows += event.rows
            return
        self._pending[event.volume] = Pending(event.volume, event.rows, event.row_bytes)
        self._round[event.lane].append((next(self._places), event.volume))

    def decide(self, now: float, ready: Collection[Lane]) -> Decision:
        """A piece of the volume whose turn it is, of those whose lane is ready."""
        lanes = [lane for lane in ready if self._round[lane]]
        if not lanes:
            return Wait()
        lane = min(lanes, key=lambda each: self._round[each][0])
        _, name = self._round[lane].popleft()
        volume = self._pending[name]
        rows = min(volume.rows, max(1, PIECE // volume.row_bytes))
        volume.rows -= rows
        if volume.rows:
            self._round[lane].append((next(self._places), name))
        else:
            del self._pending[name]
        return SendRows(name, rows)
