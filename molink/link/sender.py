"""The sending end of a link, without I/O: what the policy decides becomes numbered frames."""

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass
from itertools import count

import msgspec

from molink.errors import InvariantError, MessageTooLarge, Overloaded, WireError
from molink.link.lane import Outgoing, OutLane, size_of
from molink.link.policy import Acknowledged, Event, Policy, Produced, Reconnected, Send, Sent
from molink.wire.base import DTYPE_SIZES, Payload
from molink.wire.codec import MAX_HEADER, MAX_PAYLOAD, Buffer
from molink.wire.data import Ack, Frame, Lane, RingBody, Volume, VolumePart

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


@dataclass(slots=True)
class _Volume:
    header: Volume
    rows: memoryview  # bytes, row-major
    row_bytes: int
    total: int
    done: int = 0


class LinkSender:
    """Numbers, cuts, sends, keeps and sends again; one object per epoch.

    Control messages go first, on the decode lane; volumes when the policy says so, each on its
    lane: prefill rows on the bulk lane, decode rows on the decode lane.
    """

    def __init__(self, epoch: int, policy: Policy, limits: SenderLimits | None = None) -> None:
        self.epoch = epoch
        self._policy = policy
        self._limits = limits or SenderLimits()
        self._lanes = {lane: OutLane(epoch, lane) for lane in BOTH_LANES}
        self._control: deque[tuple[RingBody, Buffer | None]] = deque()
        self._volumes: dict[int, _Volume] = {}
        self._names = count()
        #: What the policy has granted and has not left yet: volume and rows.
        self._grant: tuple[int, int] | None = None
        self._queued = 0
        self._story: deque[str] = deque(maxlen=64)
        #: When to poll again without an event; ``None`` if only an event can change anything.
        self.wake_at: float | None = None
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
        self._control.append((body, payload))
        self._queued += size_of(payload)

    def volume(self, header: Volume, rows: Buffer, now: float) -> None:
        """Send a volume: ``header.payload`` describes all of ``rows``, ``[n, hidden]``.

        ``rows`` is not copied and must not change until it has been acknowledged.

        Raises:
            WireError: ``rows`` is not what the header says.
            MessageTooLarge: its header, or one row, is over the bound of a message.
            Overloaded: far more is waiting than the link can hold.
        """
        view = memoryview(rows).cast("B")
        total = sum(group.count for group in header.rows)
        shape = header.payload.shape
        if len(shape) != 2 or shape[0] != total or view.nbytes != header.payload.nbytes:
            raise WireError(f"volume {header.tick}: {view.nbytes} bytes are not {total} rows")
        row_bytes = shape[1] * DTYPE_SIZES[header.payload.dtype]
        if row_bytes > MAX_PAYLOAD:
            raise MessageTooLarge(f"a row of {row_bytes} bytes is over {MAX_PAYLOAD}")
        self._check(header)
        name = next(self._names)
        self._volumes[name] = _Volume(header, view, row_bytes, total)
        self._queued += view.nbytes
        lane = Lane.BULK if header.prefill else Lane.DECODE
        self.handle(Produced(name, lane, total, row_bytes), now)

    def handle(self, event: Event, now: float) -> None:
        """Tell the policy what happened."""
        self._policy.handle(event, now)

    def _check(self, body: RingBody) -> None:
        if self._queued + self.unacknowledged_bytes > 2 * self._limits.total:
            raise Overloaded("the link to the next stage is far behind")
        widest = Frame(2**53, Lane.BULK, 2**53, body)
        if len(msgspec.msgpack.encode(widest)) > MAX_HEADER:
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
            self.handle(Reconnected(lane), now)

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
        self.handle(Acknowledged(ack.lane, *freed), now)

    # --- sending -----------------------------------------------------------------------------

    def poll(
        self, now: float, ready: Collection[Lane] = BOTH_LANES, most: int = 16
    ) -> list[Outgoing]:
        """At most ``most`` messages to send now, on those lanes whose sockets are ``ready``."""
        self._rewind_stalled(now)
        self.wake_at = None
        batch: list[Outgoing] = []
        while len(batch) < most:
            out = self._next(now, ready)
            if out is None:
                break
            batch.append(out)
            self.sent_frames += 1
            self.sent_bytes += out.nbytes
            self.handle(Sent(out.lane, out.nbytes), now)
        self._wake_for_stalled()
        return batch

    def _next(self, now: float, ready: Collection[Lane]) -> Outgoing | None:
        for lane in ready:
            if self._lanes[lane].pending:
                return self._lanes[lane].take(now)
        ready = [lane for lane in ready if self._open(lane)]
        if self._control and Lane.DECODE in ready:
            body, payload = self._control.popleft()
            self._queued -= size_of(payload)
            return self._emit(Lane.DECODE, body, payload, now)
        if self._grant is None:
            decision = self._policy.decide(now, ready)
            if not isinstance(decision, Send):
                self.wake_at = decision.until
                return None
            self._grant = (decision.volume, decision.rows)
        return self._next_rows(now, ready)

    def _open(self, lane: Lane) -> bool:
        out = self._lanes[lane]
        return out.connected and out.nbytes < self._limits.window

    def _next_rows(self, now: float, ready: Collection[Lane]) -> Outgoing | None:
        """The next message of what was granted."""
        assert self._grant is not None
        name, granted = self._grant
        volume = self._volumes[name]
        lane = Lane.BULK if volume.header.prefill else Lane.DECODE
        if lane not in ready:
            return None
        fit = max(1, self._limits.message // volume.row_bytes)
        rows = min(granted, fit, volume.total - volume.done)
        body, payload = _cut(volume, rows)
        volume.done += rows
        self._queued -= payload.nbytes
        self._grant = (name, granted - rows) if granted > rows else None
        if volume.done == volume.total:
            del self._volumes[name]
            self._grant = None
        return self._emit(lane, body, payload, now)

    def _emit(self, lane: Lane, body: RingBody, payload: Buffer | None, now: float) -> Outgoing:
        self._lanes[lane].append(body, payload, now)
        return self._lanes[lane].take(now)

    def _rewind_stalled(self, now: float) -> None:
        for out in self._lanes.values():
            waiting = out.connected and out.unacknowledged
            if waiting and now - out.progress_at >= self._limits.resend_after:
                out.rewind()
                self._note(now, f"{out.lane.name} acknowledges nothing: again from {out.base}")

    def _wake_for_stalled(self) -> None:
        for out in self._lanes.values():
            if out.connected and out.unacknowledged:
                at = out.progress_at + self._limits.resend_after
                self.wake_at = at if self.wake_at is None else min(at, self.wake_at)

    # --- state -------------------------------------------------------------------------------

    @property
    def unacknowledged_bytes(self) -> int:
        """Bytes sent, or to be sent again, and not acknowledged."""
        return sum(out.nbytes for out in self._lanes.values())

    @property
    def queued_bytes(self) -> int:
        """Bytes that have not been sent at all."""
        return self._queued

    @property
    def full(self) -> bool:
        """Whether who produces should pause."""
        return self._queued + self.unacknowledged_bytes >= self._limits.total

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
        waiting = sum((v.total - v.done) * v.row_bytes for v in self._volumes.values())
        waiting += sum(size_of(payload) for _, payload in self._control)
        self._require(waiting == self._queued, f"{waiting} bytes wait, not {self._queued}")
        if self._grant is not None:
            name, rows = self._grant
            self._require(name in self._volumes and rows > 0, f"a grant of nothing: {name}")

    def _require(self, holds: bool, message: str) -> None:
        if not holds:
            raise InvariantError(message, self._story)

    def _note(self, now: float, what: str) -> None:
        self._story.append(f"{now:.3f} {what}")


def _cut(volume: _Volume, rows: int) -> tuple[RingBody, memoryview]:
    """The message with the next ``rows`` rows of ``volume``, and those rows."""
    first, header = volume.done, volume.header
    payload = Payload(header.payload.dtype, (rows, header.payload.shape[1]))
    data = volume.rows[first * volume.row_bytes : (first + rows) * volume.row_bytes]
    if first == 0:
        return msgspec.structs.replace(header, payload=payload), data
    return VolumePart(header.tick, first, payload), data
