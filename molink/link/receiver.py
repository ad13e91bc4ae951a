"""The receiving end of a link, without I/O: exactly-once delivery in order, volumes reassembled.

Frames of :mod:`molink.link.sender` arrive through :mod:`molink.link.in_link` and go to
``Ring.on_message``.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from molink.errors import InvariantError, WireError
from molink.facts.dtypes import DTYPE_SIZES, DType
from molink.link.send_window import header_fits
from molink.util.transition_log import TransitionLog
from molink.wire.messages.base import Coding, Payload
from molink.wire.messages.data_plane import (
    Ack,
    Admit,
    BlockTable,
    Channel,
    Frame,
    Grammar,
    History,
    Padding,
    PromptImages,
    Release,
    RingMessage,
    SwapIn,
    SwapOut,
    Volume,
    VolumeFragment,
)

if TYPE_CHECKING:
    from molink.link.packing.compression import RowCodec


class AssembledRows(msgspec.Struct, frozen=True):
    """The arrived rows of a volume.

    ``header`` describes all rows, ``[total, hidden]``, and ``data`` has room for all of them; the
    first ``rows`` have arrived. The assembly continues to fill ``data``.
    """

    header: Volume
    data: bytearray
    rows: int
    total: int


@dataclass(slots=True)
class _Partial:
    header: Volume
    rows: bytearray
    total: int
    done: int


class VolumeAssembly:
    """Reassembles volumes from fragments; memory is allocated only after validation.

    Incomplete volumes hold memory, whose total is bounded.
    """

    def __init__(self, hidden: int, dtype: DType, max_bytes: int) -> None:
        """``max_bytes`` bounds all incomplete volumes together."""
        self._hidden = hidden
        self._dtype = dtype
        self._row_bytes = hidden * DTYPE_SIZES[dtype]
        self._max_bytes = max_bytes
        self._partial: dict[int, _Partial] = {}
        #: Bytes of all incomplete volumes.
        self.nbytes = 0

    def __len__(self) -> int:
        """Number of incomplete volumes."""
        return len(self._partial)

    def start_volume(self, header: Volume, payload: memoryview) -> AssembledRows:
        """Add the first rows of a volume, or all.

        Raises:
            WireError: the volume is not what this stage expects.
        """
        total = header.count
        rows = self._check_rows(header.payload, payload)
        if rows > total:
            raise WireError(f"volume {header.seq} has {rows} rows where its header says {total}")
        if header.seq in self._partial:
            raise WireError(f"volume {header.seq} starts twice")
        if rows == total:
            return AssembledRows(header, bytearray(payload), rows, total)
        size = total * self._row_bytes
        if self.nbytes + size > self._max_bytes:
            raise WireError(f"volume {header.seq} of {size} bytes exceeds the assembly limit")
        whole = Payload(self._dtype, (total, self._hidden))
        header = msgspec.structs.replace(header, payload=whole)
        partial = _Partial(header, bytearray(size), total, 0)
        self._partial[header.seq] = partial
        self.nbytes += size
        return self._fill_rows(partial, rows, payload)

    def add_fragment(self, part: VolumeFragment, payload: memoryview) -> AssembledRows:
        """Add more rows of a volume.

        Raises:
            WireError: they are not the next rows of an incomplete volume.
        """
        rows = self._check_rows(part.payload, payload)
        partial = self._partial.get(part.seq)
        if partial is None:
            raise WireError(f"rows of volume {part.seq}, which never started")
        if part.first != partial.done or partial.done + rows > partial.total:
            raise WireError(f"volume {part.seq}: rows from {part.first}, expected {partial.done}")
        return self._fill_rows(partial, rows, payload)

    def _fill_rows(self, partial: _Partial, rows: int, payload: memoryview) -> AssembledRows:
        start = partial.done * self._row_bytes
        memoryview(partial.rows)[start : start + payload.nbytes] = payload
        partial.done += rows
        if partial.done == partial.total:
            del self._partial[partial.header.seq]
            self.nbytes -= len(partial.rows)
        return AssembledRows(partial.header, partial.rows, partial.done, partial.total)

    def _check_rows(self, payload: Payload, data: memoryview) -> int:
        rows = payload.shape[0]
        if payload.dtype != self._dtype or payload.shape != (rows, self._hidden) or rows < 1:
            wanted = f"{self._dtype} [n, {self._hidden}]"
            raise WireError(f"rows are {payload.dtype} {list(payload.shape)}, not {wanted}")
        if data.nbytes != rows * self._row_bytes:
            raise WireError(f"{rows} rows in {data.nbytes} bytes")
        return rows

    def is_valid(self) -> bool:
        """Whether the sizes agree."""
        return self.nbytes == sum(len(each.rows) for each in self._partial.values()) and all(
            0 < each.done < each.total for each in self._partial.values()
        )


#: Messages of the scheduler, which every stage forwards unchanged.
_FORWARDED = Admit | Grammar | History | PromptImages | BlockTable | SwapOut | SwapIn | Release


class Arrival(msgspec.Struct, frozen=True):
    """A message of the previous stage with its payload.

    A volume is reported once, with all its ``rows``. With cut-through, a prefill volume is reported
    with its first rows; its ``payload`` has room for all rows that ``body.payload`` describes, and
    later rows are written into it. Each :class:`VolumeFragment` then comes without a payload and
    reports the new total in ``rows``. The receiver of an arrival owns ``payload`` and may change
    rows that have arrived.
    """

    body: RingMessage
    payload: bytearray | None
    rows: int = 0


@dataclass(frozen=True, slots=True)
class ReceiverLimits:
    """Acknowledgement and memory limits, in seconds and bytes."""

    #: Frames per acknowledgement on the decode channel. Each bulk frame is acknowledged.
    ack_every: int = 8
    #: Maximum delay of an acknowledgement.
    ack_delay: float = 0.005
    #: Memory of incomplete volumes.
    assembly_bytes: int = 256 << 20


@dataclass(slots=True)
class ReceiverCounters:
    """Counters; all but the first three count dropped frames."""

    frames: int = 0
    nbytes: int = 0
    volumes: int = 0
    duplicates: int = 0
    gaps: int = 0
    old_epochs: int = 0
    garbage: int = 0


@dataclass(slots=True)
class _ReceiveChannel:
    next_frame: int = 0
    unacknowledged: int = 0
    ack_at: float | None = None


class LinkReceiver:
    """Receives the frames of one epoch. It never raises on input."""

    def __init__(
        self,
        epoch: int,
        hidden: int,
        dtype: DType,
        limits: ReceiverLimits | None = None,
        cut_through: bool = False,
    ) -> None:
        """Expect rows ``[n, hidden]`` of ``dtype``; ``cut_through`` reports prefill rows early."""
        self.epoch = epoch
        self._cut_through = cut_through
        self._limits = limits or ReceiverLimits()
        self._channels = {channel: _ReceiveChannel() for channel in Channel}
        self._assembly = VolumeAssembly(hidden, dtype, self._limits.assembly_bytes)
        self._codec: RowCodec | None = None
        self._transitions = TransitionLog(64)
        self.counters = ReceiverCounters()
        #: Why the last invalid frame was dropped.
        self.last_fault = ""

    def on_frame(self, frame: Frame, payload: memoryview | None, now: float) -> list[Arrival]:
        """Handle a frame; return the messages that it completes.

        Frames of other epochs, duplicates and frames after a gap are dropped; the sender repeats
        those after a gap.
        """
        channel = self._channels[frame.channel]
        if frame.epoch != self.epoch:
            self.counters.old_epochs += 1
            return []
        if frame.frame_number != channel.next_frame:
            self._on_unexpected_frame(frame, channel, now)
            return []
        channel.next_frame += 1
        channel.unacknowledged += 1
        self._ack_by(channel, now + self._limits.ack_delay)
        if frame.channel is Channel.BULK or channel.unacknowledged >= self._limits.ack_every:
            channel.ack_at = now
        self.counters.frames += 1
        self.counters.nbytes += 0 if payload is None else payload.nbytes
        try:
            return self._deliver(frame.body, payload)
        except WireError as error:
            self.counters.garbage += 1
            self.last_fault = str(error)
            self._transitions.add_entry(now, f"{frame.channel.name} {frame.frame_number}: {error}")
            return []

    def _deliver(self, body: RingMessage, payload: memoryview | None) -> list[Arrival]:
        if isinstance(body, Padding):
            return []
        if isinstance(body, _FORWARDED) and not header_fits(body):
            raise WireError(f"a {type(body).__name__} too large to forward")
        if not isinstance(body, Volume | VolumeFragment):
            return [Arrival(body, None if payload is None else bytearray(payload))]
        if payload is None:
            raise WireError(f"volume {body.seq} without rows")
        if body.payload.coding is not Coding.PLAIN:
            body, payload = self._unpack(body, payload)
        if isinstance(body, Volume):
            self._check_header(body)
            there = self._assembly.start_volume(body, payload)
        else:
            there = self._assembly.add_fragment(body, payload)
        whole = there.rows == there.total
        self.counters.volumes += whole
        if not (self._cut_through and there.header.prefill):
            return [Arrival(there.header, there.data, there.rows)] if whole else []
        if isinstance(body, VolumeFragment):
            return [Arrival(body, None, there.rows)]
        return [Arrival(there.header, there.data, there.rows)]

    @staticmethod
    def _check_header(volume: Volume) -> None:
        """Check that the volume can be forwarded with the header of all its rows."""
        shape = (volume.count, volume.payload.shape[-1])
        whole = msgspec.structs.replace(volume.payload, shape=shape)
        if not header_fits(msgspec.structs.replace(volume, payload=whole)):
            raise WireError(f"volume {volume.seq} has a header too large to forward")

    def _unpack(
        self, body: Volume | VolumeFragment, payload: memoryview
    ) -> tuple[Volume | VolumeFragment, memoryview]:
        """Unpack a message of packed rows."""
        if self._codec is None:
            # A late import: numpy is only needed for packed rows.
            from molink.link.packing.compression import RowCodec

            self._codec = RowCodec()
        header, rows = self._codec.unpack_rows(body.payload, payload)
        return msgspec.structs.replace(body, payload=header), rows

    def _on_unexpected_frame(self, frame: Frame, channel: _ReceiveChannel, now: float) -> None:
        if frame.frame_number < channel.next_frame:
            self.counters.duplicates += 1
            self._ack_by(channel, now + self._limits.ack_delay)
        else:
            self.counters.gaps += 1
            self._transitions.add_entry(
                now,
                f"{frame.channel.name} {frame.frame_number}, expected {channel.next_frame}",
            )

    # --- acknowledgements ------------------------------------------------------------------------

    def due_acks(self, now: float) -> list[Ack]:
        """Return the acknowledgements that are due."""
        due = []
        for name, channel in self._channels.items():
            if channel.ack_at is not None and channel.ack_at <= now:
                due.append(self.make_ack(name))
        return due

    def make_ack(self, name: Channel) -> Ack:
        """Create an acknowledgement of everything that has arrived on a channel."""
        channel = self._channels[name]
        channel.unacknowledged = 0
        channel.ack_at = None
        return Ack(self.epoch, name, channel.next_frame)

    @property
    def wake_at(self) -> float | None:
        """When the next acknowledgement is due."""
        due = [channel.ack_at for channel in self._channels.values() if channel.ack_at is not None]
        return min(due, default=None)

    @staticmethod
    def _ack_by(channel: _ReceiveChannel, at: float) -> None:
        channel.ack_at = at if channel.ack_at is None else min(channel.ack_at, at)

    # --- state -----------------------------------------------------------------------------------

    @property
    def num_unfinished(self) -> int:
        """Number of incomplete volumes."""
        return len(self._assembly)

    @property
    def unfinished_bytes(self) -> int:
        """Bytes of the incomplete volumes, once complete."""
        return self._assembly.nbytes

    def validate(self) -> None:
        """Check the invariants.

        Raises:
            InvariantError: one is broken.
        """
        if not self._assembly.is_valid():
            raise InvariantError(
                "sizes of incomplete volumes disagree", self._transitions.format_lines()
            )
        for name, channel in self._channels.items():
            if channel.unacknowledged and channel.ack_at is None:
                raise InvariantError(
                    f"{name.name} has no acknowledgement scheduled",
                    self._transitions.format_lines(),
                )
