"""A volume at a stage, from its first row's arrival until its last row has run."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import cast

import msgspec

from molink.ring.step import StepInput
from molink.wire.messages.data_plane import RequestSlice, Volume


@dataclass(slots=True)
class WaitingVolume:
    """Which rows of a volume are here, which row groups remain of it, and how far these have run.

    Rows *arrive* counted from the volume's first one. What is *taken* counts only rows of groups
    that remain: once the first of them has been taken, no group is dropped any more.
    """

    #: As it arrived.
    volume: Volume
    #: Of all of its rows, the first ``arrived`` of which can be used: bytes of rows, or a sequence
    #: (``nbytes`` is then 0).
    data: object
    nbytes: int
    num_arrived: int
    #: Indices of its groups that remain.
    slice_indices: list[int]
    #: The groups that remain.
    slices: tuple[RequestSlice, ...]
    #: Rows that it came with, or will have, and those of the groups that remain.
    num_rows: int
    num_remaining: int
    #: Whether all is known to be complete that its remaining rows come after.
    is_ready: bool = False
    #: Remaining rows that have been handed out; those before the running piece have run.
    num_taken: int = 0
    #: Whether a piece of it runs.
    is_running: bool = False
    #: Rows a second that have arrived after the first ones; 0 if that can't be told yet.
    row_rate: float = 0.0
    _first: tuple[int, float] = (0, 0.0)

    @classmethod
    def of_volume(
        cls, volume: Volume, data: object, arrived: int | None, now: float
    ) -> "WaitingVolume":
        """One that has come at ``now`` with its first ``num_arrived`` rows; ``None``: with all."""
        total = volume.count
        rows = total if arrived is None else arrived
        kept = list(range(len(volume.slices)))
        nbytes = len(data) if isinstance(data, bytes | bytearray | memoryview) else 0
        return cls(
            volume, data, nbytes, rows, kept, volume.slices, total, total, _first=(rows, now)
        )

    @property
    def is_started(self) -> bool:
        """Whether any row of it was taken."""
        return self.num_taken > 0

    @property
    def is_taken(self) -> bool:
        """Whether all rows were taken."""
        return self.num_taken >= self.num_remaining

    @property
    def num_available(self) -> int:
        """Remaining rows that have arrived and were not taken."""
        if self.num_arrived == self.num_rows:
            return self.num_remaining - self.num_taken
        arrived = sum(
            min(request_slice.count, max(0, self.num_arrived - first))
            for first, request_slice in self._slices_with_offset()
        )
        return arrived - self.num_taken

    def extend_rows(self, arrived: int, now: float) -> None:
        """More rows have arrived: so many have, in all."""
        self.num_arrived = arrived
        count, began = self._first
        self.row_rate = (arrived - count) / (now - began) if now > began else 0.0

    def keep_slices(self, slices: list[int]) -> None:
        """Drop all groups but these (indices); none of it was taken yet."""
        self.slice_indices = slices
        self.slices = tuple(self.volume.slices[index] for index in slices)
        self.num_remaining = sum(request_slice.count for request_slice in self.slices)

    def take_rows(self, count: int) -> StepInput:
        """Hand out the next ``count`` remaining rows, which must be here."""
        begin, end = self.num_taken, self.num_taken + count
        self.num_taken, self.is_running = end, True
        if count == self.num_rows:
            return StepInput(self.volume, self.data)
        slices, ranges, position = list[RequestSlice](), list[range](), 0
        for first, request_slice in self._slices_with_offset():
            low, high = max(begin, position), min(end, position + request_slice.count)
            if low < high:
                slices.append(clip_slice(request_slice, low - position, high - low))
                offset = first - position
                ranges.append(range(low + offset, high + offset))
            position += request_slice.count
        whole = self._remaining_volume()
        sub_chunk = (
            msgspec.structs.replace(whole, slices=tuple(slices)) if count < position else whole
        )
        low, high = ranges[0].start, ranges[-1].stop
        kept = None
        if high - low > count:
            kept = tuple(row - low for rows in ranges for row in rows)
        return StepInput(
            sub_chunk, self._slice_data(low, high), kept, whole, begin, end == position
        )

    def _slices_with_offset(self) -> Iterator[tuple[int, RequestSlice]]:
        """The groups that remain, each with the index of its first row among those that arrive."""
        first, left = 0, iter([*self.slice_indices, -1])
        wanted = next(left)
        for index, request_slice in enumerate(self.volume.slices):
            if index == wanted:
                yield first, request_slice
                wanted = next(left)
            first += request_slice.count

    def _remaining_volume(self) -> Volume:
        if len(self.slice_indices) == len(self.volume.slices):
            return self.volume
        return msgspec.structs.replace(self.volume, slices=self.slices)

    def _slice_data(self, low: int, high: int) -> object:
        """Rows ``low`` to ``high`` of the data, without a copy if it is bytes."""
        if high - low == self.num_rows:
            return self.data
        if isinstance(self.data, bytes | bytearray | memoryview):
            each = len(self.data) // self.num_rows
            return memoryview(self.data)[low * each : high * each]
        return cast(Sequence[object], self.data)[low:high]


def clip_slice(request_slice: RequestSlice, first: int, count: int) -> RequestSlice:
    """``count`` of a group's rows from its ``first`` on.

    What is done once for a group, extending the block table and copying a block, is done with its
    first row; sampling with its last.
    """
    if count == request_slice.count:
        return request_slice
    return msgspec.structs.replace(
        request_slice,
        start=request_slice.start + first,
        count=count,
        blocks=() if first else request_slice.blocks,
        sample=request_slice.sample and first + count == request_slice.count,
        copy_from_block=-1 if first else request_slice.copy_from_block,
        drafts=(),
    )
