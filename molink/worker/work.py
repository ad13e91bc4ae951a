"""What a scoreboard hands out: volumes to run and controls to forward."""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from molink.wire.data import Admit, History, Release, Table, Tombstone, Volume

ControlBody = Admit | History | Table | Release | Tombstone


@dataclass(frozen=True, slots=True)
class Control:
    """A control message that this stage has completed; ``data`` is what it arrived with."""

    body: ControlBody
    data: object


@dataclass(frozen=True, slots=True)
class Ready:
    """A volume to be run, with the row groups that remain of it.

    ``data`` is what it arrived with; ``kept`` are the indices of its rows that remain, ``None`` if
    all do. (``volume.payload`` still describes ``data`` as it arrived.)
    """

    volume: Volume
    data: object
    kept: tuple[int, ...] | None

    @classmethod
    def of(cls, volume: Volume, data: object, groups: Sequence[int]) -> "Ready":
        """What remains of ``volume`` if only the row groups of these indices do (rising)."""
        if len(groups) == len(volume.rows):
            return cls(volume, data, None)
        indices, first, left = list[int](), 0, set(groups)
        for index, rows in enumerate(volume.rows):
            if index in left:
                indices.extend(range(first, first + rows.count))
            first += rows.count
        remaining = tuple(volume.rows[index] for index in groups)
        return cls(msgspec.structs.replace(volume, rows=remaining), data, tuple(indices))


@dataclass(frozen=True, slots=True)
class Work:
    """What may run now, as one fused pass: at most one volume of each kind."""

    decode: Ready | None
    prefill: Ready | None

    @property
    def parts(self) -> tuple[Ready, ...]:
        """The volumes, decode first."""
        return tuple(part for part in (self.decode, self.prefill) if part is not None)

    @property
    def ticks(self) -> tuple[int, ...]:
        """Their ticks, for :meth:`Scoreboard.complete`."""
        return tuple(part.volume.tick for part in self.parts)


def block_ids(table: Table, data: object) -> Sequence[int]:
    """The blocks that came with ``table``; none if ``data`` is not what it promises."""
    payload = table.payload
    if payload.dtype != "i32" or len(payload.shape) != 1:
        return ()
    if not isinstance(data, bytes | bytearray | memoryview) or len(data) != payload.nbytes:
        return ()
    return memoryview(data).cast("B").cast("i")
