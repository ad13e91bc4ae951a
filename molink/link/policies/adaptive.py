"""Decode rows strictly first, prefill rows within credits and just in time: ours."""

from collections.abc import Collection

from molink.link.policies.backlog import Backlog, Pending
from molink.link.policies.base import Decision, Event, Produced, SendRows, Sent, Wait
from molink.link.policies.credit import CHUNK_S, CreditWindow
from molink.link.policies.interval import IdleInterval
from molink.link.policies.outflow import Outflow, Shrinkage
from molink.wire.messages.data import Lane

#: While prefill rows wait and have credit, a chunk of them is sent at least so often, in seconds.
EVERY = 0.05
#: Times that differ by less are the same, in seconds.
_INSTANT = 0.0005


class Adaptive:
    """Decode volumes go at once, on their own connection; prefill rows in chunks beside them.

    A chunk is about 5 ms of the link's rate (16 to 256 KB, whole rows, at least one). It is sent
    if it fits the :class:`~.credit.CreditWindow`, which keeps the queue in front of a decode volume
    to about its :data:`~.credit.TARGET`, and, with ``predict``, if it will have left before the
    next decode rows are there (``T_a × rate``, :class:`~.interval.IdleInterval`), so that they find
    no queue at all. While those are overdue, one chunk at a time is under way: the link does not
    idle, and they wait for no more than that.

    Bounds. No decode volume that could be sent ever waits here for two chunks in a row. And
    against starvation: while prefill rows wait, their lane is ready and the window has room, a
    whole chunk leaves at least every :data:`EVERY` = 50 ms, be there decode volumes without end or
    no free interval, ever. That is a tenth of the link (5 of 50 ms), and what decode rows can lose.
    """

    one_lane = False

    def __init__(self, predict: bool = True) -> None:
        """Without ``predict`` only the credit window bounds what is in flight."""
        self.name = "adaptive" if predict else "adaptive-unpredicted"
        self._predict = predict
        self._decode = Backlog()
        self._bulk = Backlog()
        self._window = CreditWindow()
        self._interval = IdleInterval()
        self._outflow = Outflow()
        self._packing = Shrinkage()
        #: When the last whole chunk was sent, or prefill rows began to wait if that was later.
        self._waits_since = 0.0

    def handle(self, event: Event, now: float) -> None:
        """Everything matters here."""
        if isinstance(event, Produced):
            if event.lane is Lane.BULK and not self._bulk:
                self._waits_since = now
            (self._decode if event.lane is Lane.DECODE else self._bulk).add(event)
            return
        if isinstance(event, Sent) and event.lane is Lane.BULK:
            self._packing.sent(event.nbytes)
        self._window.handle(event, now)
        self._interval.handle(event, now)
        self._outflow.handle(event, now)

    def decide(self, now: float, ready: Collection[Lane]) -> Decision:
        """The oldest decode volume, or a chunk of the oldest prefill volume."""
        decode = self._decode.first if Lane.DECODE in ready else None
        bulk = self._bulk.first if Lane.BULK in ready else None
        rows = chunk = 0 if bulk is None else self._chunk(bulk)
        if bulk is not None and not self._window.fits(int(chunk * self._wire_bytes(bulk))):
            bulk = None
        starving = bulk is not None and now >= self._starves_at
        if decode is not None and not starving:
            self._decode.take(count := decode.rows)
            return SendRows(decode.volume, count)
        if bulk is None:
            return Wait()
        if not starving:
            rows = min(chunk, self._rows_now(bulk, now))
            if rows == 0:
                return Wait(self._until(bulk, now))
        self._bulk.take(rows)
        self._packing.granted(rows * bulk.row_bytes)
        if rows == chunk:
            self._waits_since = now
        return SendRows(bulk.volume, rows)

    def _chunk(self, volume: Pending) -> int:
        return max(1, min(volume.rows, int(self._window.chunk / self._wire_bytes(volume))))

    def _wire_bytes(self, volume: Pending) -> float:
        """What a row takes on its way."""
        return volume.row_bytes * self._packing.share

    def _rows_now(self, volume: Pending, now: float) -> int:
        """Rows that may go now, but for credit: none before their time, and no more than fit."""
        if now < self._window.opens_at:
            return 0
        free, rate = self._free(now), self._outflow.rate
        if free is None or rate is None:
            return volume.rows
        left = max(free, CHUNK_S if free < _INSTANT else 0.0) - self._unsent_s(now)
        return max(0, int(left * rate / self._wire_bytes(volume)))

    def _free(self, now: float) -> float | None:
        """``T_a``; ``None`` if it is unknown or not asked for."""
        return self._interval.at(now) if self._predict else None

    def _unsent_s(self, now: float) -> float:
        """Seconds until what was sent will have left."""
        return max(0.0, self._outflow.leaves_at - now)

    @property
    def _starves_at(self) -> float:
        return self._waits_since + EVERY

    def _until(self, bulk: Pending, now: float) -> float:
        """When prefill rows that are held back may go, if nothing happens."""
        if now < self._window.opens_at:
            return min(self._window.opens_at, max(self._starves_at, now + _INSTANT))
        free, rate = self._free(now), self._outflow.rate
        assert free is not None
        assert rate is not None
        row_s = self._wire_bytes(bulk) / rate
        room_at = now + max(free, self._unsent_s(now) - CHUNK_S + row_s)
        return max(now + _INSTANT, min(self._starves_at, room_at))
