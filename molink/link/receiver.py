"""The receiving end of a link, without I/O: every message once, in order, volumes whole."""

from collections import deque
from dataclasses import dataclass

from molink.errors import InvariantError, WireError
from molink.link.assembly import Assembly
from molink.wire.base import DType
from molink.wire.data import Ack, Frame, Lane, RingBody, Volume, VolumePart


@dataclass(frozen=True, slots=True)
class Arrival:
    """A message of the previous stage; a volume comes with all of its rows.

    ``payload`` belongs to the receiver of the arrival: it may be changed and kept.
    """

    body: RingBody
    payload: bytearray | None


@dataclass(frozen=True, slots=True)
class ReceiverLimits:
    """When to acknowledge, and how much memory to use, in seconds and bytes."""

    #: Frames of the decode lane per acknowledgement; on the bulk lane each one is acknowledged.
    ack_every: int = 8
    #: The longest that an acknowledgement waits for more frames.
    ack_delay: float = 0.005
    #: Volumes under assembly.
    assembly: int = 256 << 20


@dataclass(slots=True)
class ReceiverCounters:
    """What happened so far; all but the first three were dropped."""

    frames: int = 0
    nbytes: int = 0
    volumes: int = 0
    duplicates: int = 0
    gaps: int = 0
    old_epochs: int = 0
    garbage: int = 0


@dataclass(slots=True)
class _InLane:
    next: int = 0
    unacknowledged: int = 0
    ack_at: float | None = None


class LinkReceiver:
    """Takes the frames of one epoch; nothing that arrives makes it raise."""

    def __init__(
        self, epoch: int, hidden: int, dtype: DType, limits: ReceiverLimits | None = None
    ) -> None:
        """``hidden`` and ``dtype`` are those of the rows that this stage is sent."""
        self.epoch = epoch
        self._limits = limits or ReceiverLimits()
        self._lanes = {lane: _InLane() for lane in Lane}
        self._assembly = Assembly(hidden, dtype, self._limits.assembly)
        self._story: deque[str] = deque(maxlen=64)
        self.counters = ReceiverCounters()
        #: Why the last frame that made no sense was dropped.
        self.fault = ""

    def frame(self, frame: Frame, payload: memoryview | None, now: float) -> list[Arrival]:
        """A frame has come: what is complete by it.

        Frames of another epoch, those that have come before, and those that come too early are
        dropped: the sender sends them again.
        """
        lane = self._lanes[frame.lane]
        if frame.epoch != self.epoch:
            self.counters.old_epochs += 1
            return []
        if frame.seq != lane.next:
            self._out_of_order(frame, lane, now)
            return []
        lane.next += 1
        lane.unacknowledged += 1
        self._ack_by(lane, now + self._limits.ack_delay)
        if frame.lane is Lane.BULK or lane.unacknowledged >= self._limits.ack_every:
            lane.ack_at = now
        self.counters.frames += 1
        self.counters.nbytes += 0 if payload is None else payload.nbytes
        try:
            return self._arrive(frame.body, payload)
        except WireError as error:
            self.counters.garbage += 1
            self.fault = str(error)
            self._note(now, f"{frame.lane.name} {frame.seq}: {error}")
            return []

    def _arrive(self, body: RingBody, payload: memoryview | None) -> list[Arrival]:
        if not isinstance(body, Volume | VolumePart):
            return [Arrival(body, None if payload is None else bytearray(payload))]
        if payload is None:
            raise WireError(f"volume {body.tick} without rows")
        if isinstance(body, Volume):
            whole = self._assembly.begin(body, payload)
        else:
            whole = self._assembly.add(body, payload)
        if whole is None:
            return []
        self.counters.volumes += 1
        return [Arrival(*whole)]

    def _out_of_order(self, frame: Frame, lane: _InLane, now: float) -> None:
        if frame.seq < lane.next:
            self.counters.duplicates += 1
            self._ack_by(lane, now + self._limits.ack_delay)
        else:
            self.counters.gaps += 1
            self._note(now, f"{frame.lane.name} {frame.seq} came, {lane.next} was due")

    # --- acknowledgements --------------------------------------------------------------------

    def acks(self, now: float) -> list[Ack]:
        """The acknowledgements that are due."""
        due = []
        for name, lane in self._lanes.items():
            if lane.ack_at is not None and lane.ack_at <= now:
                due.append(self.ack(name))
        return due

    def ack(self, name: Lane) -> Ack:
        """What has arrived on a lane; nothing is left to acknowledge there by then."""
        lane = self._lanes[name]
        lane.unacknowledged = 0
        lane.ack_at = None
        return Ack(self.epoch, name, lane.next)

    @property
    def wake_at(self) -> float | None:
        """When the next acknowledgement is due."""
        due = [lane.ack_at for lane in self._lanes.values() if lane.ack_at is not None]
        return min(due, default=None)

    @staticmethod
    def _ack_by(lane: _InLane, at: float) -> None:
        lane.ack_at = at if lane.ack_at is None else min(lane.ack_at, at)

    # --- state -------------------------------------------------------------------------------

    def validate(self) -> None:
        """Check the invariants.

        Raises:
            InvariantError: one doesn't hold.
        """
        if not self._assembly.valid():
            raise InvariantError("sizes of volumes under assembly disagree", self._story)
        for name, lane in self._lanes.items():
            if lane.unacknowledged and lane.ack_at is None:
                raise InvariantError(f"{name.name} is never acknowledged", self._story)

    def _note(self, now: float, what: str) -> None:
        self._story.append(f"{now:.3f} {what}")
