"""A volume on its way out: its rows as they were handed over, cut into messages."""

from collections import deque

import msgspec

from molink.errors import MessageTooLarge, WireError
from molink.facts.dtypes import DTYPE_SIZES
from molink.wire.messages.base import Payload
from molink.wire.messages.codec import MAX_PAYLOAD, Buffer
from molink.wire.messages.data_plane import Channel, Volume, VolumeFragment


class UnsentVolume:
    """The rows of one volume that have not been sent yet.

    ``total_rows`` rows are to come, ``queued_rows`` have been handed over and ``sent_rows`` of
    these have left. They stay in the buffers in which they came: nothing is copied, so no message
    has rows of two.
    """

    def __init__(self, header: Volume, channel: Channel) -> None:
        """``header.payload`` describes all rows, ``[total, hidden]``.

        Raises:
            WireError: it describes something else.
            MessageTooLarge: one row is over the bound of a message.
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
        """Bytes of the rows that could be sent now."""
        return self.available_rows * self.row_bytes

    def add_rows(self, rows: Buffer) -> int:
        """Take the next rows and say how many they are.

        Raises:
            WireError: they are not a number of whole rows, or more than are to come.
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
        """The next message: at most ``rows`` rows in at most ``maximum`` bytes (but a row).

        Returns:
            Its body, its rows as bytes, and how many they are.
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
        """Whether sizes agree."""
        return (
            0 <= self.sent_rows <= self.queued_rows <= self.total_rows
            and sum(view.nbytes for view in self._buffers) == self.nbytes
            and self.sent_rows < self.total_rows
        )
