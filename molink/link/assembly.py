"""Volumes that arrive in parts."""

from dataclasses import dataclass

import msgspec

from molink.errors import WireError
from molink.wire.base import DTYPE_SIZES, DType, Payload
from molink.wire.data import Volume, VolumePart


@dataclass(slots=True)
class _Partial:
    header: Volume
    rows: bytearray
    total: int
    done: int


class Assembly:
    """Puts the parts of each volume together; nothing is allocated before it has been checked."""

    def __init__(self, hidden: int, dtype: DType, max_bytes: int) -> None:
        """``max_bytes`` bounds all volumes under assembly together."""
        self._hidden = hidden
        self._dtype = dtype
        self._row_bytes = hidden * DTYPE_SIZES[dtype]
        self._max_bytes = max_bytes
        self._partial: dict[int, _Partial] = {}
        #: Bytes of all volumes under assembly.
        self.nbytes = 0

    def begin(self, header: Volume, payload: memoryview) -> tuple[Volume, bytearray] | None:
        """The first rows of a volume; the volume and all its rows if these were all.

        Raises:
            WireError: not what this stage expects.
        """
        total = sum(group.count for group in header.rows)
        rows = self._rows(header.payload, payload)
        if rows > total:
            raise WireError(f"volume {header.tick} has {rows} rows where its header says {total}")
        if header.tick in self._partial:
            raise WireError(f"volume {header.tick} begins twice")
        if rows == total:
            return header, bytearray(payload)
        size = total * self._row_bytes
        if self.nbytes + size > self._max_bytes:
            raise WireError(f"volume {header.tick} of {size} bytes is more than may be assembled")
        partial = _Partial(header, bytearray(size), total, rows)
        partial.rows[: payload.nbytes] = payload
        self._partial[header.tick] = partial
        self.nbytes += size
        return None

    def add(self, part: VolumePart, payload: memoryview) -> tuple[Volume, bytearray] | None:
        """More rows; the volume and all its rows if these were the last.

        Raises:
            WireError: they are not the next rows of a volume under assembly.
        """
        rows = self._rows(part.payload, payload)
        partial = self._partial.get(part.tick)
        if partial is None:
            raise WireError(f"rows of volume {part.tick}, which never began")
        if part.first != partial.done or partial.done + rows > partial.total:
            raise WireError(f"volume {part.tick} has rows from {part.first}, not {partial.done}")
        start = partial.done * self._row_bytes
        partial.rows[start : start + payload.nbytes] = payload
        partial.done += rows
        if partial.done < partial.total:
            return None
        del self._partial[part.tick]
        self.nbytes -= len(partial.rows)
        whole = Payload(self._dtype, (partial.total, self._hidden))
        return msgspec.structs.replace(partial.header, payload=whole), partial.rows

    def _rows(self, payload: Payload, data: memoryview) -> int:
        rows = payload.shape[0]
        if payload.dtype != self._dtype or payload.shape != (rows, self._hidden) or rows < 1:
            wanted = f"{self._dtype} [n, {self._hidden}]"
            raise WireError(f"rows are {payload.dtype} {list(payload.shape)}, not {wanted}")
        if data.nbytes != rows * self._row_bytes:
            raise WireError(f"{rows} rows in {data.nbytes} bytes")
        return rows

    def valid(self) -> bool:
        """Whether the sizes agree."""
        return self.nbytes == sum(len(each.rows) for each in self._partial.values()) and all(
            0 < each.done < each.total for each in self._partial.values()
        )
