"""The default policy: decode rows strictly first, prefill rows just in time within credits."""

from collections.abc import Collection

from molink.link.policies.base import (
    DecodeFinishedEvent,
    DecodeStartedEvent,
    HeartbeatEchoedEvent,
    LinkAction,
    LinkEvent,
    MessageSentEvent,
    PendingRows,
    RowBacklog,
    RowsProducedEvent,
    SendRowsAction,
    WaitAction,
)
from molink.link.policies.credit import CHUNK_S, CreditWindow
from molink.link.policies.interval import IdleInterval
from molink.link.policies.outflow import Outflow, PackingRatio
from molink.util.ewma import Ewma
from molink.wire.messages.data_plane import Channel

#: Maximum seconds between prefill chunks while prefill rows have credit. If a chunk takes longer
#: than 5 ms, prefill gets a tenth of the time instead.
MAX_CHUNK_INTERVAL = 0.05
CHUNK_SHARE = 0.1
#: Share of the time until the next decode rows that prefill rows may use. Decode rows may come
#: early, and would then wait for data in the sockets.
COMMITTED_SHARE = 0.7
#: Seconds' worth of prefill rows in flight while decode rows are overdue: the shortest reliable
#: timer, to which the recent lateness of timers is added.
LEAD_S = 0.001
#: Weight of the last timer's lateness.
_WEIGHT = 0.1
#: Times that differ by less (in seconds) count as equal.
_TIME_EPSILON = 0.0005
#: Tolerance of a quotient that is rounded down.
_ROW_EPSILON = 1e-6


class AdaptivePolicy:
    """Sends decode volumes at once on one connection, and prefill rows in chunks on the other.

    A chunk is about 5 ms of the link's rate (16 to 256 KB, at least one row). It is sent if it fits
    the :class:`~.credit.CreditWindow`, which bounds the queue in front of a decode volume to about
    :data:`~.credit.TARGET_DELAY`, and, with ``predict``, if it will have left well before the next
    decode rows (:data:`COMMITTED_SHARE` of ``T_a × rate``, :class:`~.interval.IdleInterval`).
    Chunks shrink as the next decode rows approach, so that even early ones meet almost no queue.
    While decode rows are overdue, :data:`LEAD_S` seconds' worth is in flight, which keeps the link
    busy. :class:`~.outflow.Outflow` tracks what is in flight.

    Bounds: no decode volume waits here for two chunks in a row. Against starvation, while prefill
    rows wait with credit and a ready channel, a whole chunk leaves at least every
    :data:`MAX_CHUNK_INTERVAL`, for any number of decode volumes. Decode rows lose at most this
    tenth of the link (5 of 50 ms). If the smallest chunk takes longer, it leaves less often.
    """

    single_channel = False

    def __init__(self, predict: bool = True) -> None:
        """Without ``predict`` only the credit window bounds prefill rows."""
        self.name = "adaptive" if predict else "adaptive-unpredicted"
        self._predict = predict
        self._decode = RowBacklog()
        self._bulk = RowBacklog()
        self._window = CreditWindow()
        self._interval = IdleInterval()
        self._outflow = Outflow()
        self._packing_ratio = PackingRatio()
        #: When the last whole chunk was sent or, if later, prefill rows began to wait.
        self._starving_since = 0.0
        #: Whether the last sent chunk delayed a decode volume.
        self._has_delayed_decode = False
        #: When to be asked again, and the usual lateness of the call.
        self._wake_at: float | None = None
        self._lateness = Ewma(_WEIGHT, 0.0)

    def handle(self, event: LinkEvent, now: float) -> None:
        """Pass the event to all parts that it concerns."""
        match event:
            case RowsProducedEvent():
                if event.channel is Channel.BULK and not self._bulk:
                    self._starving_since = now
                (self._decode if event.channel is Channel.DECODE else self._bulk).add_rows(event)
            case DecodeStartedEvent() | DecodeFinishedEvent():
                self._interval.handle(event, now)
            case HeartbeatEchoedEvent():
                self._window.handle(event, now)
            case _:
                if isinstance(event, MessageSentEvent) and event.channel is Channel.BULK:
                    self._packing_ratio.on_sent(event.nbytes)
                self._window.handle(event, now)
                self._outflow.handle(event, now)

    def choose_action(self, now: float, ready: Collection[Channel]) -> LinkAction:
        """Send the oldest decode volume, or a chunk of the oldest prefill volume."""
        self._note_lateness(now)
        decode = self._decode.first if Channel.DECODE in ready else None
        bulk = self._bulk.first if Channel.BULK in ready else None
        rows = chunk = 0 if bulk is None else self._chunk_rows(bulk)
        if bulk is not None and not self._window.has_credit(int(chunk * self._wire_bytes(bulk))):
            bulk = None
        starving = bulk is not None and now >= self._starves_at(bulk)
        if decode is not None and (not starving or self._has_delayed_decode):
            self._has_delayed_decode = False
            self._decode.take_rows(count := decode.rows)
            return SendRowsAction(decode.volume, count)
        if bulk is None:
            return WaitAction()
        if not starving:
            rows = min(chunk, self._sendable_rows(bulk, now))
            if rows == 0:
                self._wake_at = self._retry_at(bulk, now)
                return WaitAction(self._wake_at)
        self._has_delayed_decode = decode is not None
        self._bulk.take_rows(rows)
        self._packing_ratio.on_granted(rows * bulk.row_bytes)
        if rows == chunk:
            self._starving_since = now
        return SendRowsAction(bulk.volume, rows)

    def _chunk_rows(self, volume: PendingRows) -> int:
        return max(1, min(volume.rows, int(self._window.chunk_bytes / self._wire_bytes(volume))))

    def _wire_bytes(self, volume: PendingRows) -> float:
        """Return the bytes of a row on the wire."""
        return volume.row_bytes * self._packing_ratio.ratio

    def _sendable_rows(self, volume: PendingRows, now: float) -> int:
        """Return how many rows may go now, apart from credit: as many as fit, not too early."""
        if now < self._window.opens_at:
            return 0
        free, rate = self._idle_s(now), self._outflow.rate
        if free is None or rate is None:
            return volume.rows
        row_s = self._wire_bytes(volume) / rate
        left = max(COMMITTED_SHARE * free, self._lead_s(row_s)) - self._unsent_s(now)
        return max(0, int(left / row_s + _ROW_EPSILON))

    def _lead_s(self, row_s: float) -> float:
        """Return the seconds' worth of rows that may always be in flight; at least one row's."""
        return max(row_s, LEAD_S + self._lateness.get_or(0.0))

    def _note_lateness(self, now: float) -> None:
        if self._wake_at is not None and now >= self._wake_at:
            late = min(now - self._wake_at, CHUNK_S)
            self._lateness.add_sample(late)
        self._wake_at = None

    def _idle_s(self, now: float) -> float | None:
        """``T_a``; ``None`` if unknown or not predicted."""
        return self._interval.interval_at(now) if self._predict else None

    def _unsent_s(self, now: float) -> float:
        """Seconds until everything sent will have left."""
        return max(0.0, self._outflow.leaves_at - now)

    def _starves_at(self, bulk: PendingRows) -> float:
        every, rate = MAX_CHUNK_INTERVAL, self._outflow.rate
        if rate is not None:
            every = max(every, self._chunk_rows(bulk) * self._wire_bytes(bulk) / rate / CHUNK_SHARE)
        return self._starving_since + every

    def _retry_at(self, bulk: PendingRows, now: float) -> float:
        """Return when held-back prefill rows may go if no event comes."""
        starves_at = self._starves_at(bulk)
        if now < self._window.opens_at:
            return min(self._window.opens_at, max(starves_at, now + _TIME_EPSILON))
        free, rate = self._idle_s(now), self._outflow.rate
        assert free is not None
        assert rate is not None
        # Room grows as data leaves, while the idle interval shrinks. Single rows would be too many
        # messages on a fast link.
        row_s = self._wire_bytes(bulk) / rate
        lacking = self._unsent_s(now) + max(row_s, min(LEAD_S / 2, bulk.rows * row_s))
        room_in = min(
            (lacking - COMMITTED_SHARE * free) / (1 - COMMITTED_SHARE),
            lacking - self._lead_s(row_s),
        )
        return max(now + _TIME_EPSILON, min(starves_at, now + room_in))
