"""A volume on its way out: its rows as they were handed over, cut into messages."""

from collections import deque

import msgspec

from molink.errors import MessageTooLarge, WireError
from molink.facts.dtypes import DTYPE_SIZES
from molink.wire.messages.base import Payload
from molink.wire.messages.codec import MAX_PAYLOAD, Buffer
from molink.wire.messages.data import Lane, Volume, VolumePart


class UnsentVolume:
    """The rows of one volume that have not been sent yet.

    ``total`` rows are to come, ``given`` have been handed over and ``sent`` of these have left.
    They stay in the buffers in which they came: nothing is copied, so no message has rows of two.
    """

    def __init__(self, header: Volume, lane: Lane) -> None:
        """``header.payload`` describes all rows, ``[total, hidden]``.

        Raises:
            WireError: it describes something else.
            MessageTooLarge: one row is over the bound of a message.
        """
        self.header = header
        self.lane = lane
        self.total = header.count
        shape = header.payload.shape
        if len(shape) != 2 or shape[0] != self.total or shape[1] < 1:
            raise WireError(f"volume {header.tick}: {list(shape)} are not {self.total} rows")
        self.row_bytes = shape[1] * DTYPE_SIZES[header.payload.dtype]
        if self.row_bytes > MAX_PAYLOAD:
            raise MessageTooLarge(f"a row of {self.row_bytes} bytes is over {MAX_PAYLOAD}")
        self.given = 0
        self.sent = 0
        self._buffers: deque[memoryview] = deque()

    @property
    def available(self) -> int:
        """Rows that could be sent now."""
        return self.given - self.sent

    @property
    def nbytes(self) -> int:
        """Bytes of the rows that could be sent now."""
        return self.available * self.row_bytes

    def add(self, rows: Buffer) -> int:
        """Take the next rows and say how many they are.

        Raises:
            WireError: they are not a number of whole rows, or more than are to come.
        """
        view = memoryview(rows).cast("B")
        count, rest = divmod(view.nbytes, self.row_bytes)
        left = self.total - self.given
        if rest or not 1 <= count <= left:
            raise WireError(
                f"volume {self.header.tick}: {view.nbytes} bytes are not 1 to {left} rows"
            )
        self._buffers.append(view)
        self.given += count
        return count

    def cut(self, rows: int, maximum: int) -> tuple[Volume | VolumePart, memoryview, int]:
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
        header, first = self.header, self.sent
        payload = Payload(header.payload.dtype, (rows, header.payload.shape[1]))
        self.sent += rows
        if first == 0:
            return msgspec.structs.replace(header, payload=payload), data, rows
        return VolumePart(header.tick, first, payload), data, rows

    def valid(self) -> bool:
        """Whether sizes agree."""
        return (
            0 <= self.sent <= self.given <= self.total
            and sum(view.nbytes for view in self._buffers) == self.nbytes
            and self.sent < self.total
        )
