"""A volume at a stage, from its first row's arrival until its last row has run."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import cast

import msgspec

from molink.ring.work import Segment
from molink.wire.messages.data import Rows, Volume


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
    arrived: int
    #: Indices of its groups that remain.
    kept: list[int]
    #: The groups that remain.
    groups: tuple[Rows, ...]
    #: Rows that it came with, or will have, and those of the groups that remain.
    total: int
    remaining: int
    #: Whether all is known to be complete that its remaining rows come after.
    ready: bool = False
    #: Remaining rows that have been handed out; those before the running piece have run.
    taken: int = 0
    #: Whether a piece of it runs.
    running: bool = False
    #: Rows a second that have arrived after the first ones; 0 if that can't be told yet.
    pace: float = 0.0
    _first: tuple[int, float] = (0, 0.0)

    @classmethod
    def of(cls, volume: Volume, data: object, arrived: int | None, now: float) -> "WaitingVolume":
        """One that has come at ``now`` with its first ``arrived`` rows; ``None``: with all."""
        total = volume.count
        rows = total if arrived is None else arrived
        kept = list(range(len(volume.rows)))
        nbytes = len(data) if isinstance(data, bytes | bytearray | memoryview) else 0
        return cls(volume, data, nbytes, rows, kept, volume.rows, total, total, _first=(rows, now))

    @property
    def is_begun(self) -> bool:
        """Whether any row of it was taken."""
        return self.taken > 0

    @property
    def is_over(self) -> bool:
        """Whether all rows were taken."""
        return self.taken >= self.remaining

    @property
    def here(self) -> int:
        """Remaining rows that have arrived and were not taken."""
        if self.arrived == self.total:
            return self.remaining - self.taken
        arrived = sum(
            min(group.count, max(0, self.arrived - first)) for first, group in self._placed()
        )
        return arrived - self.taken

    def extend(self, arrived: int, now: float) -> None:
        """More rows have arrived: so many have, in all."""
        self.arrived = arrived
        count, began = self._first
        self.pace = (arrived - count) / (now - began) if now > began else 0.0

    def keep(self, groups: list[int]) -> None:
        """Drop all groups but these (indices); none of it was taken yet."""
        self.kept = groups
        self.groups = tuple(self.volume.rows[index] for index in groups)
        self.remaining = sum(group.count for group in self.groups)

    def take(self, count: int) -> Segment:
        """Hand out the next ``count`` remaining rows, which must be here."""
        begin, end = self.taken, self.taken + count
        self.taken, self.running = end, True
        if count == self.total:
            return Segment(self.volume, self.data)
        groups, ranges, position = list[Rows](), list[range](), 0
        for first, group in self._placed():
            low, high = max(begin, position), min(end, position + group.count)
            if low < high:
                groups.append(clip(group, low - position, high - low))
                offset = first - position
                ranges.append(range(low + offset, high + offset))
            position += group.count
        whole = self._whole()
        piece = msgspec.structs.replace(whole, rows=tuple(groups)) if count < position else whole
        low, high = ranges[0].start, ranges[-1].stop
        kept = None
        if high - low > count:
            kept = tuple(row - low for rows in ranges for row in rows)
        return Segment(piece, self._rows(low, high), kept, whole, begin, end == position)

    def _placed(self) -> Iterator[tuple[int, Rows]]:
        """The groups that remain, each with the index of its first row among those that arrive."""
        first, left = 0, iter([*self.kept, -1])
        wanted = next(left)
        for index, group in enumerate(self.volume.rows):
            if index == wanted:
                yield first, group
                wanted = next(left)
            first += group.count

    def _whole(self) -> Volume:
        if len(self.kept) == len(self.volume.rows):
            return self.volume
        return msgspec.structs.replace(self.volume, rows=self.groups)

    def _rows(self, low: int, high: int) -> object:
        """Rows ``low`` to ``high`` of the data, without a copy if it is bytes."""
        if high - low == self.total:
            return self.data
        if isinstance(self.data, bytes | bytearray | memoryview):
            each = len(self.data) // self.total
            return memoryview(self.data)[low * each : high * each]
        return cast(Sequence[object], self.data)[low:high]


def clip(group: Rows, first: int, count: int) -> Rows:
    """``count`` of a group's rows from its ``first`` on.

    What is done once for a group, extending the block table and copying a block, is done with its
    first row; sampling with its last.
    """
    if count == group.count:
        return group
    return msgspec.structs.replace(
        group,
        start=group.start + first,
        count=count,
        blocks=() if first else group.blocks,
        sample=group.sample and first + count == group.count,
        source=-1 if first else group.source,
        drafts=(),
    )
