"""Messages that wait on a link: control messages, padding, rows of volumes."""

from collections import deque
from itertools import count

import msgspec

from molink.errors import MessageTooLarge, WireError
from molink.facts.dtypes import DTYPE_SIZES
from molink.link.policies.base import RowsProducedEvent, SendRowsAction
from molink.link.send_window import message_size
from molink.wire.messages.base import Payload
from molink.wire.messages.codec import MAX_PAYLOAD, Buffer
from molink.wire.messages.data_plane import Channel, Padding, RingMessage, Volume, VolumeFragment


class UnsentVolume:
    """Rows of a volume that have not been sent.

    Of ``total_rows`` rows, ``queued_rows`` have been queued, and ``sent_rows`` of these were sent.
    Rows stay in their original buffers without a copy, so a message never spans two buffers.
    """

    def __init__(self, header: Volume, channel: Channel) -> None:
        """``header.payload`` describes all rows, ``[total, hidden]``.

        Raises:
            WireError: it describes something else.
            MessageTooLarge: one row exceeds a message.
        """
        self.header = header
        self.channel = channel
        self.total_rows = header.count
        shape = header.payload.shape
        if len(shape) != 2 or shape[0] != self.total_rows or shape[1] < 1:
            raise WireError(f"volume {header.seq}: {list(shape)} are not {self.total_rows} rows")
        self.row_bytes = shape[1] * DTYPE_SIZES[header.payload.dtype]
        if self.row_bytes > MAX_PAYLOAD:
            raise MessageTooLarge(f"a row of {self.row_bytes} bytes is over {MAX_PAYLOAD}")
        self.queued_rows = 0
        self.sent_rows = 0
        self._buffers: deque[memoryview] = deque()

    @property
    def available_rows(self) -> int:
        """Rows that could be sent now."""
        return self.queued_rows - self.sent_rows

    @property
    def nbytes(self) -> int:
        """Bytes of these rows."""
        return self.available_rows * self.row_bytes

    def add_rows(self, rows: Buffer) -> int:
        """Add the next rows and return their number.

        Raises:
            WireError: not a whole number of rows, or too many.
        """
        view = memoryview(rows).cast("B")
        count, rest = divmod(view.nbytes, self.row_bytes)
        left = self.total_rows - self.queued_rows
        if rest or not 1 <= count <= left:
            raise WireError(
                f"volume {self.header.seq}: {view.nbytes} bytes are not 1 to {left} rows"
            )
        self._buffers.append(view)
        self.queued_rows += count
        return count

    def cut_fragment(
        self, rows: int, maximum: int
    ) -> tuple[Volume | VolumeFragment, memoryview, int]:
        """Cut the next message: at most ``rows`` rows in ``maximum`` bytes, but at least one row.

        Returns:
            Its body, its rows as bytes, and their number.
        """
        buffer = self._buffers[0]
        rows = min(rows, max(1, maximum // self.row_bytes), buffer.nbytes // self.row_bytes)
        data, rest = buffer[: rows * self.row_bytes], buffer[rows * self.row_bytes :]
        if rest.nbytes:
            self._buffers[0] = rest
        else:
            self._buffers.popleft()
        header, first = self.header, self.sent_rows
        payload = Payload(header.payload.dtype, (rows, header.payload.shape[1]))
        self.sent_rows += rows
        if first == 0:
            return msgspec.structs.replace(header, payload=payload), data, rows
        return VolumeFragment(header.seq, first, payload), data, rows

    def is_valid(self) -> bool:
        """Whether the sizes agree."""
        return (
            0 <= self.sent_rows <= self.queued_rows <= self.total_rows
            and sum(view.nbytes for view in self._buffers) == self.nbytes
            and self.sent_rows < self.total_rows
        )


class LinkQueues:
    """The queues of a link, and the rows that its policy has granted."""

    def __init__(self) -> None:
        self._control: deque[tuple[RingMessage, Buffer | None]] = deque()
        self._padding: deque[Buffer] = deque()
        #: Volumes with unsent rows, by the name that the policy uses.
        self._volumes: dict[int, UnsentVolume] = {}
        #: Volumes with rows still to be queued, by ``seq``.
        self._unfinished: dict[int, int] = {}
        self._names = count()
        #: Granted rows that were not sent yet, by channel: volume and number of rows.
        self._grants: dict[Channel, tuple[int, int]] = {}
        #: Bytes in all queues.
        self.nbytes = 0

    # --- input -----------------------------------------------------------------------------------

    def add_control(self, body: RingMessage, payload: Buffer | None) -> None:
        """Queue a message before all volumes, on the decode channel."""
        self._control.append((body, payload))
        self.nbytes += message_size(payload)

    def add_padding(self, payload: Buffer) -> None:
        """Queue bytes before all volumes on the bulk channel."""
        self._padding.append(payload)
        self.nbytes += message_size(payload)

    def add_volume(self, volume: UnsentVolume, rows: Buffer) -> RowsProducedEvent:
        """Queue a volume with its first rows, or all.

        Raises:
            WireError: the rows don't fit the header, or an earlier volume of that ``seq`` is
                incomplete.
        """
        seq = volume.header.seq
        if seq in self._unfinished:
            raise WireError(f"volume {seq} starts again before its end")
        return self._add(next(self._names), volume, rows)

    def add_rows(self, seq: int, rows: Buffer) -> RowsProducedEvent:
        """Queue the next rows of a volume.

        Raises:
            WireError: no volume of that ``seq`` lacks these rows.
        """
        name = self._unfinished.get(seq)
        if name is None:
            raise WireError(f"surplus rows of volume {seq}")
        return self._add(name, self._volumes[name], rows)

    def _add(self, name: int, volume: UnsentVolume, rows: Buffer) -> RowsProducedEvent:
        added, seq = volume.add_rows(rows), volume.header.seq
        self._volumes[name] = volume
        self.nbytes += added * volume.row_bytes
        if volume.queued_rows < volume.total_rows:
            self._unfinished[seq] = name
        else:
            self._unfinished.pop(seq, None)
        kind = Channel.BULK if volume.header.prefill else Channel.DECODE
        return RowsProducedEvent(name, kind, added, volume.row_bytes)

    # --- output ----------------------------------------------------------------------------------

    def pop_control(self) -> tuple[RingMessage, Buffer | None] | None:
        """Remove the oldest control message."""
        if not self._control:
            return None
        body, payload = self._control.popleft()
        self.nbytes -= message_size(payload)
        return body, payload

    def pop_padding(self) -> tuple[Padding, Buffer] | None:
        """Remove the oldest padding."""
        if not self._padding:
            return None
        payload = self._padding.popleft()
        self.nbytes -= message_size(payload)
        return Padding(Payload("u8", (memoryview(payload).nbytes,))), payload

    def grant_rows(self, decision: SendRowsAction) -> bool:
        """Grant the available rows of a decision; ``False`` if there are none."""
        volume = self._volumes.get(decision.volume)
        rows = min(decision.rows, volume.available_rows) if volume is not None else 0
        if volume is not None and rows > 0:
            self._grants[volume.channel] = (decision.volume, rows)
        return rows > 0

    def granted_volume(self, channel: Channel) -> UnsentVolume | None:
        """Return the volume with granted rows on ``channel``."""
        return self._volumes[self._grants[channel][0]] if channel in self._grants else None

    def pop_rows(
        self, channel: Channel, maximum: int
    ) -> tuple[Volume | VolumeFragment, memoryview]:
        """Cut the next message of granted rows: at most ``maximum`` bytes, but at least one row."""
        name, granted = self._grants.pop(channel)
        volume = self._volumes[name]
        body, data, rows = volume.cut_fragment(granted, maximum)
        self.nbytes -= data.nbytes
        if granted > rows:
            self._grants[channel] = (name, granted - rows)
        if volume.sent_rows == volume.total_rows:
            del self._volumes[name]
        return body, data

    # --- state -----------------------------------------------------------------------------------

    def bytes_on(self, channel: Channel) -> int:
        """Return the bytes queued for ``channel``."""
        first = (
            self._padding if channel is Channel.BULK else (payload for _, payload in self._control)
        )
        rows = sum(volume.nbytes for volume in self._volumes.values() if volume.channel is channel)
        return rows + sum(message_size(payload) for payload in first)

    def find_fault(self) -> str:
        """Describe a broken invariant; empty if there is none."""
        if not all(volume.is_valid() for volume in self._volumes.values()):
            return "a volume miscounts its rows"
        lacking = {
            v.header.seq: name for name, v in self._volumes.items() if v.queued_rows < v.total_rows
        }
        if lacking != self._unfinished:
            return "unfinished volumes are not indexed by seq"
        waiting = sum(volume.nbytes for volume in self._volumes.values())
        waiting += sum(message_size(payload) for _, payload in self._control)
        waiting += sum(message_size(payload) for payload in self._padding)
        if waiting != self.nbytes:
            return f"{waiting} bytes are queued, not {self.nbytes}"
        for name, rows in self._grants.values():
            there = self._volumes[name].available_rows if name in self._volumes else 0
            if not 0 < rows <= there:
                return f"volume {name}: {rows} rows granted of {there}"
        return ""
