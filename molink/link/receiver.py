"""The receiving end of a link, without I/O: every message once, in order, volumes put together.

What is sent by :mod:`molink.link.sender` comes here by :mod:`molink.link.incoming`, and goes to
``Ring.arrive``.
"""

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from molink.errors import InvariantError, WireError
from molink.facts.dtypes import DType
from molink.link.assembly import Assembly
from molink.link.window import header_fits
from molink.wire.messages.base import Coding
from molink.wire.messages.data import (
    Ack,
    Admit,
    Frame,
    Grammar,
    History,
    Lane,
    Probe,
    Release,
    RingBody,
    SwapIn,
    SwapOut,
    Table,
    Volume,
    VolumePart,
)

if TYPE_CHECKING:
    from molink.link.packing.compression import RowCodec


#: What the head has made, and a stage sends on as it is.
_FROM_HEAD = Admit | Grammar | History | Table | SwapOut | SwapIn | Release


class Arrival(msgspec.Struct, frozen=True):
    """A message of the previous stage, with what belongs to it.

    A volume is reported once, when all its ``rows`` have come; with cut-through, one of prefill
    rows is reported when the first have. Then ``payload`` has room for all that ``body.payload``
    describes, and further rows are written into it: each :class:`VolumePart`, without a payload,
    tells how many rows there are by now, in all.

    ``payload`` belongs to who is told: but for rows that are still to come, it may be changed and
    kept.
    """

    body: RingBody
    payload: bytearray | None
    rows: int = 0


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
        self,
        epoch: int,
        hidden: int,
        dtype: DType,
        limits: ReceiverLimits | None = None,
        cut_through: bool = False,
    ) -> None:
        """``hidden`` and ``dtype`` are those of the rows that this stage is sent.

        ``cut_through`` is whether to report prefill rows while more are coming.
        """
        self.epoch = epoch
        self._cut_through = cut_through
        self._limits = limits or ReceiverLimits()
        self._lanes = {lane: _InLane() for lane in Lane}
        self._assembly = Assembly(hidden, dtype, self._limits.assembly)
        self._codec: RowCodec | None = None
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
        if isinstance(body, Probe):
            return []
        if isinstance(body, _FROM_HEAD) and not header_fits(body):
            raise WireError(f"a {type(body).__name__} that can't be passed on")
        if not isinstance(body, Volume | VolumePart):
            return [Arrival(body, None if payload is None else bytearray(payload))]
        if payload is None:
            raise WireError(f"volume {body.tick} without rows")
        if body.payload.coding is not Coding.PLAIN:
            body, payload = self._unpack(body, payload)
        if isinstance(body, Volume):
            self._check_header(body)
            there = self._assembly.begin(body, payload)
        else:
            there = self._assembly.add(body, payload)
        whole = there.rows == there.total
        self.counters.volumes += whole
        if not (self._cut_through and there.header.prefill):
            return [Arrival(there.header, there.data, there.rows)] if whole else []
        if isinstance(body, VolumePart):
            return [Arrival(body, None, there.rows)]
        return [Arrival(there.header, there.data, there.rows)]

    @staticmethod
    def _check_header(volume: Volume) -> None:
        """The volume may be sent on with the header of all its rows."""
        shape = (volume.count, volume.payload.shape[-1])
        whole = msgspec.structs.replace(volume.payload, shape=shape)
        if not header_fits(msgspec.structs.replace(volume, payload=whole)):
            raise WireError(f"volume {volume.tick} has a header that can't be passed on")

    def _unpack(
        self, body: Volume | VolumePart, payload: memoryview
    ) -> tuple[Volume | VolumePart, memoryview]:
        """A message of packed rows as if it had come plain."""
        if self._codec is None:
            # Late: numpy is for those alone who are sent packed rows.
            from molink.link.packing.compression import RowCodec

            self._codec = RowCodec()
        header, rows = self._codec.unpack(body.payload, payload)
        return msgspec.structs.replace(body, payload=header), rows

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

    @property
    def unfinished(self) -> int:
        """How many volumes lack rows."""
        return len(self._assembly)

    @property
    def unfinished_bytes(self) -> int:
        """Memory that they take, once complete."""
        return self._assembly.nbytes

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
