"""Volumes that arrive in parts."""

from dataclasses import dataclass

import msgspec

from molink.errors import WireError
from molink.facts.dtypes import DTYPE_SIZES, DType
from molink.wire.messages.base import Payload
from molink.wire.messages.data_plane import Volume, VolumeFragment


class AssembledRows(msgspec.Struct, frozen=True):
    """What is there of a volume after more of it has come.

    ``header`` describes all its rows, ``[total, hidden]``, and ``data`` has room for them; the
    first ``rows`` have come. The assembly goes on to fill it.
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
    """Puts the parts of each volume together; nothing is allocated before it has been checked.

    A volume that never ends keeps its room for good: together they have no more than the bound.
    """

    def __init__(self, hidden: int, dtype: DType, max_bytes: int) -> None:
        """``max_bytes`` bounds all volumes under assembly together."""
        self._hidden = hidden
        self._dtype = dtype
        self._row_bytes = hidden * DTYPE_SIZES[dtype]
        self._max_bytes = max_bytes
        self._partial: dict[int, _Partial] = {}
        #: Bytes of all volumes under assembly.
        self.nbytes = 0

    def __len__(self) -> int:
        """How many volumes lack rows."""
        return len(self._partial)

    def start_volume(self, header: Volume, payload: memoryview) -> AssembledRows:
        """The first rows of a volume, or all.

        Raises:
            WireError: not what this stage expects.
        """
        total = header.count
        rows = self._check_rows(header.payload, payload)
        if rows > total:
            raise WireError(f"volume {header.seq} has {rows} rows where its header says {total}")
        if header.seq in self._partial:
            raise WireError(f"volume {header.seq} begins twice")
        if rows == total:
            return AssembledRows(header, bytearray(payload), rows, total)
        size = total * self._row_bytes
        if self.nbytes + size > self._max_bytes:
            raise WireError(f"volume {header.seq} of {size} bytes is more than may be assembled")
        whole = Payload(self._dtype, (total, self._hidden))
        header = msgspec.structs.replace(header, payload=whole)
        partial = _Partial(header, bytearray(size), total, 0)
        self._partial[header.seq] = partial
        self.nbytes += size
        return self._fill_rows(partial, rows, payload)

    def add_fragment(self, part: VolumeFragment, payload: memoryview) -> AssembledRows:
        """More rows of a volume.

        Raises:
            WireError: they are not the next rows of a volume under assembly.
        """
        rows = self._check_rows(part.payload, payload)
        partial = self._partial.get(part.seq)
        if partial is None:
            raise WireError(f"rows of volume {part.seq}, which never began")
        if part.first != partial.done or partial.done + rows > partial.total:
            raise WireError(f"volume {part.seq} has rows from {part.first}, not {partial.done}")
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
