"""Weighted-priority transmission scheduling: Algorithm 1 of the MoLink paper (§4)."""

from collections.abc import Collection

from molink.link.policies.base import (
    LinkAction,
    LinkEvent,
    MessageSentEvent,
    PendingRows,
    RowBacklog,
    RowsProducedEvent,
    SendRowsAction,
    WaitAction,
)
from molink.link.policies.interval import IdleInterval
from molink.link.policies.outflow import Outflow, PackingRatio
from molink.wire.messages.data_plane import Channel

#: ``N`` of the paper: maximum decode volumes for which prefill rows wait.
MAX_WAITING = 30
#: Bytes of a chunk before the link's rate is known.
FIRST_CHUNK = 64 * 1024


class MoLinkPolicy:
    """Sends decode volumes first and prefill volumes in just-in-time chunks between them.

    One decision is one iteration of the paper's loop. Transmissions block: the next decision
    follows when the previous data has left, as predicted from the link's rate
    (:class:`~.outflow.Outflow`). As in the paper, all volumes travel on one connection in order of
    decisions, so only the decisions keep prefill data out of the way. Only ``adaptive`` has a
    second connection for decode rows.

    Differences from the paper: the round trip of case 3 (``T_o + T_m``) is multiplied by its recent
    slowdown; the expected batch is the one due first instead of the iteration's first
    (:class:`molink.ring.round_trip.RoundTripClock`); and packed rows count as their packed bytes.
    Choices that the paper leaves open: a chunk has at least one row; it is the whole remainder if
    no decode rows are expected (any more, :data:`~.interval.OVERDUE`), and :data:`FIRST_CHUNK`
    bytes while the rate is unknown.
    """

    name = "molink"
    single_channel = True

    def __init__(self) -> None:
        self._decode = RowBacklog()  # vq1
        self._prefill = RowBacklog()  # vq2
        self._interval = IdleInterval()
        self._outflow = Outflow()
        self._packing_ratio = PackingRatio()
        #: ``W``: decode volumes sent while prefill rows waited; at most :data:`MAX_WAITING`.
        self.weight = 0

    def handle(self, event: LinkEvent, now: float) -> None:
        """Do line 1 of the algorithm for produced rows, and pass every event to the predictors."""
        if isinstance(event, RowsProducedEvent):
            (self._decode if event.channel is Channel.DECODE else self._prefill).add_rows(event)
        elif isinstance(event, MessageSentEvent):
            self._packing_ratio.on_sent(event.nbytes)
        self._interval.handle(event, now)
        self._outflow.handle(event, now)

    def choose_action(self, now: float, ready: Collection[Channel]) -> LinkAction:
        """Do lines 2 to 4 of the algorithm."""
        decode, prefill = self._decode.first, self._prefill.first
        if Channel.BULK not in ready or (decode is None and prefill is None):
            return WaitAction()
        if self._outflow.is_busy(now):
            return WaitAction(None if self._outflow.rate is None else self._outflow.leaves_at)
        if decode is not None and prefill is not None:
            self.weight += 1
        if decode is not None and self.weight < MAX_WAITING:
            return self._send(self._decode, decode, decode.rows)
        assert prefill is not None  # the weight rises only while prefill rows wait
        rows = prefill.rows if self.weight >= MAX_WAITING else self._chunk_rows(prefill, now)
        self.weight = 0
        return self._send(self._prefill, prefill, rows)

    def _send(self, queue: RowBacklog, volume: PendingRows, rows: int) -> SendRowsAction:
        self._packing_ratio.on_granted(rows * volume.row_bytes)
        queue.take_rows(rows)
        return SendRowsAction(volume.volume, rows)

    def _chunk_rows(self, volume: PendingRows, now: float) -> int:
        """Compute ``chunk()`` of the paper: the rows that the link carries in ``T_a``."""
        free = self._interval.interval_at(now)
        if free is None:
            return volume.rows
        rate = self._outflow.rate
        nbytes = FIRST_CHUNK if rate is None else free * rate
        return max(
            1, min(volume.rows, int(nbytes / (volume.row_bytes * self._packing_ratio.ratio)))
        )
