"""The sending end of a link, without I/O: what the policy decides becomes numbered frames."""

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass
from math import inf

from molink.errors import InvariantError, MessageTooLarge, Overloaded
from molink.link.estimate.estimator import LinkEstimator
from molink.link.packing.packing import PackedBytes, Packer
from molink.link.policies.base import (
    Acknowledged,
    Echoed,
    Event,
    LanePolicy,
    LinkEstimate,
    Reconnected,
    SendRows,
    Sent,
)
from molink.link.queues import LinkQueues
from molink.link.volume import UnsentVolume
from molink.link.window import Packet, SendWindow, header_fits
from molink.wire.messages.codec import MAX_HEADER, Buffer
from molink.wire.messages.data import Ack, Lane, RingBody, Volume

BOTH_LANES = (Lane.DECODE, Lane.BULK)


@dataclass(frozen=True, slots=True)
class SenderLimits:
    """Bounds of a link's memory and messages, in bytes and seconds."""

    #: Payload of one message.
    message: int = 192 * 1024
    #: Not acknowledged on one lane; more is not sent.
    window: int = 8 << 20
    #: Waiting and not acknowledged in all; above it the link is ``full``, at twice it refuses.
    total: int = 64 << 20
    #: A lane that is connected but acknowledges nothing for so long sends everything again.
    resend_after: float = 10.0


class LinkSender:
    """Numbers, cuts, sends, keeps and sends again; one object per epoch.

    Control messages go first, on the decode lane; volumes when the policy says so, each on its
    lane: prefill rows on the bulk lane, decode rows on the decode lane, or all on the bulk lane if
    the policy has one for both.
    """

    def __init__(
        self,
        epoch: int,
        policy: LanePolicy,
        limits: SenderLimits | None = None,
        packer: Packer | None = None,
        estimator: LinkEstimator | None = None,
    ) -> None:
        self.epoch = epoch
        self._policy = policy
        self._limits = limits or SenderLimits()
        self.packing = PackedBytes(packer)
        #: Learns from what is sent and acknowledged; whoever sends beats tells it of them.
        self.estimator = estimator or LinkEstimator()
        self._lanes = {lane: SendWindow(epoch, lane) for lane in BOTH_LANES}
        self._both = self._lanes[Lane.DECODE], self._lanes[Lane.BULK]
        self._queues = LinkQueues()
        self._story: deque[str] = deque(maxlen=64)
        #: When to poll again without an event; ``None`` if only an event can change anything.
        self.wake_at: float | None = None
        #: When a lane may have acknowledged nothing for too long, at the soonest.
        self._stalled_at = inf
        self.sent_frames = 0
        self.sent_bytes = 0
        self.stale_acks = 0

    # --- what is to be sent ------------------------------------------------------------------

    def control(self, body: RingBody, payload: Buffer | None = None) -> None:
        """Send anything but a volume, before every volume.

        Raises:
            MessageTooLarge: its header would be over 4 KiB.
            Overloaded: far more is waiting than the link can hold.
        """
        self._check(body)
        self._queues.control(body, payload)

    def probe(self, payload: Buffer) -> None:
        """Send bytes on the bulk lane, before every volume there, for the next stage to drop."""
        self._queues.probe(payload)

    def volume(self, header: Volume, rows: Buffer, now: float) -> None:
        """Send a volume, of which ``rows`` are the first rows or all.

        ``header.payload`` describes all of them, ``[total, hidden]``; the others are handed over
        with :meth:`more`. ``rows`` is not copied and must not change until it is acknowledged.

        Raises:
            WireError: ``rows`` is not what the header says, or a volume of that tick lacks rows.
            MessageTooLarge: its header, or one row, is over the bound of a message.
            Overloaded: far more is waiting than the link can hold.
        """
        lane = Lane.BULK if header.prefill or self._policy.one_lane else Lane.DECODE
        volume = UnsentVolume(header, lane)
        self._check(header)
        self.handle(self._queues.volume(volume, rows), now)

    def more(self, tick: int, rows: Buffer, now: float) -> None:
        """Send the next rows of a volume whose first rows have been handed over.

        They count as accepted with the first: a link that is far behind takes them too.

        Raises:
            WireError: no volume of that tick lacks rows, or they are more than it lacks.
        """
        self.handle(self._queues.more(tick, rows), now)

    def handle(self, event: Event, now: float) -> None:
        """Tell the policy what happened."""
        if isinstance(event, LinkEstimate):
            self.packing.measured(event.rate)
        self._policy.handle(event, now)

    def _tell(self, event: Sent | Acknowledged | Reconnected, now: float) -> None:
        """Tell the policy, and the estimator, what became of messages."""
        self.estimator.handle(event, now)
        self._policy.handle(event, now)

    def _check(self, body: RingBody) -> None:
        if self.queued_bytes + self.unacknowledged_bytes > 2 * self._limits.total:
            raise Overloaded("the link to the next stage is far behind")
        if not header_fits(body):
            raise MessageTooLarge(f"the header of a {type(body).__name__} is over {MAX_HEADER}")

    # --- what the connections tell -----------------------------------------------------------

    def reconnected(self, lane: Lane, now: float) -> None:
        """There is a new connection: what was not acknowledged goes again, before anything new."""
        out = self._lanes[lane]
        again = out.next > 0
        out.connected = True
        out.rewind()
        self._note(now, f"{lane.name} connected, from {out.base}")
        if again:
            self._tell(Reconnected(lane), now)

    def disconnected(self, lane: Lane, now: float) -> None:
        """The connection is gone: the lane waits for the next."""
        self._lanes[lane].connected = False
        self._note(now, f"{lane.name} disconnected")

    def ack(self, ack: Ack, now: float) -> None:
        """The next stage says what has arrived. One of another epoch, or nonsense, is counted."""
        freed = None
        if ack.epoch == self.epoch:
            freed = self._lanes[ack.lane].acknowledge(ack, now)
        if freed is None:
            self.stale_acks += 1
            return
        self._tell(Acknowledged(ack.lane, *freed), now)

    def beat_back(self, sent_at: float, now: float) -> bool:
        """The beat that left at ``sent_at`` is back; ``False`` if none did."""
        known = self.estimator.beat_back(sent_at, now)
        if known:
            self.handle(Echoed(now - sent_at), now)
        return known

    # --- sending -----------------------------------------------------------------------------

    def due(self, now: float) -> bool:
        """Whether :meth:`poll` may find anything now."""
        return now >= self._stalled_at or self.waiting

    def poll(
        self, now: float, ready: Collection[Lane] = BOTH_LANES, maximum: int = 16
    ) -> list[Packet]:
        """At most ``maximum`` messages to send now, on those lanes whose sockets are ``ready``."""
        may_stall = now >= self._stalled_at
        if may_stall:
            self._rewind_stalled(now)
        self.wake_at = None
        batch: list[Packet] = []
        while len(batch) < maximum and self.waiting:
            out = self._next(now, ready)
            if out is None:
                break
            batch.append(out)
            self.sent_frames += 1
            self.sent_bytes += out.nbytes
            self._tell(Sent(out.lane, out.nbytes), now)
        if batch or may_stall:
            self._expect_stalls()
        if self._stalled_at < inf:
            self.wake_at = min(self._stalled_at, inf if self.wake_at is None else self.wake_at)
        return batch

    def _next(self, now: float, ready: Collection[Lane]) -> Packet | None:
        for lane in ready:
            if self._lanes[lane].pending:
                return self._lanes[lane].take(now)
        ready = [lane for lane in ready if self._open(lane)]
        if Lane.DECODE in ready and (control := self._queues.take_control()) is not None:
            return self._emit(Lane.DECODE, *control, now)
        if Lane.BULK in ready and (probe := self._queues.take_probe()) is not None:
            return self._emit(Lane.BULK, *probe, now)
        # What was granted goes on first where it can; a lane that can't take it holds up no other.
        if not any(self._queues.granted(lane) for lane in ready):
            decision = self._policy.decide(now, ready)
            if not isinstance(decision, SendRows):
                self.wake_at = decision.until
                return None
            there = self._queues.grant(decision)
            self._require(there, f"{self._policy.name} sends what isn't there: {decision}")
        return self._next_rows(now, ready)

    def _open(self, lane: Lane) -> bool:
        out = self._lanes[lane]
        return out.connected and out.nbytes < self._limits.window

    def _next_rows(self, now: float, ready: Collection[Lane]) -> Packet | None:
        """The next message of what was granted."""
        for lane in ready:
            if (volume := self._queues.granted(lane)) is not None:
                body, rows = self._queues.take_rows(lane, self._limits.message)
                message = self.packing.message(body, rows, volume.header.prefill)
                return self._emit(lane, *message, now)
        return None

    def _emit(self, lane: Lane, body: RingBody, payload: Buffer | None, now: float) -> Packet:
        self._lanes[lane].append(body, payload, now)
        return self._lanes[lane].take(now)

    def _rewind_stalled(self, now: float) -> None:
        for out in self._lanes.values():
            waiting = out.connected and out.unacknowledged
            if waiting and now - out.progress_at >= self._limits.resend_after:
                out.rewind()
                self._note(now, f"{out.lane.name} acknowledges nothing: again from {out.base}")
                self._tell(Reconnected(out.lane), now)

    def _expect_stalls(self) -> None:
        waiting = [out for out in self._lanes.values() if out.connected and out.unacknowledged]
        since = min((out.progress_at for out in waiting), default=inf)
        self._stalled_at = since + self._limits.resend_after

    # --- state -------------------------------------------------------------------------------

    @property
    def unacknowledged_bytes(self) -> int:
        """Bytes sent, or to be sent again, and not acknowledged."""
        decode, bulk = self._both
        return decode.nbytes + bulk.nbytes

    @property
    def queued_bytes(self) -> int:
        """Bytes that have not been sent at all."""
        return self._queues.nbytes

    def queued_on(self, lane: Lane) -> int:
        """Bytes that are to go on ``lane`` and have not been sent at all."""
        return self._queues.nbytes_on(lane)

    def in_flight_on(self, lane: Lane) -> int:
        """Bytes sent on ``lane``, or to be sent again, and not acknowledged."""
        return self._lanes[lane].nbytes

    @property
    def waiting(self) -> bool:
        """Whether anything is to be sent, now or when something allows it."""
        decode, bulk = self._both
        return (
            self._queues.nbytes > 0
            or (decode.connected and decode.unsent > 0)
            or (bulk.connected and bulk.unsent > 0)
        )

    @property
    def full(self) -> bool:
        """Whether who produces should pause."""
        return self._queues.nbytes + self.unacknowledged_bytes >= self._limits.total

    @property
    def resent(self) -> int:
        """Frames that were sent more than once."""
        return sum(out.resent for out in self._lanes.values())

    def base(self, lane: Lane) -> int:
        """The number of the oldest frame of ``lane`` that is not acknowledged."""
        return self._lanes[lane].base

    def validate(self) -> None:
        """Check the invariants.

        Raises:
            InvariantError: one doesn't hold.
        """
        for out in self._lanes.values():
            self._require(out.valid(), f"{out.lane.name} has a gap or miscounts its bytes")
        fault = self._queues.fault()
        self._require(not fault, fault)

    def _require(self, holds: bool, message: str) -> None:
        if not holds:
            raise InvariantError(message, self._story)

    def _note(self, now: float, what: str) -> None:
        self._story.append(f"{now:.3f} {what}")
