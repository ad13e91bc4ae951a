"""What a scoreboard hands out: pieces to run and controls to forward."""

from collections.abc import Sequence
from dataclasses import dataclass

from molink.wire.messages.data import Admit, History, Release, Table, Tombstone, Volume

ControlBody = Admit | History | Table | Release | Tombstone


@dataclass(frozen=True, slots=True)
class Control:
    """A control message that this stage has completed; ``data`` is what it arrived with."""

    body: ControlBody
    data: object


@dataclass(frozen=True, slots=True)
class Ready:
    """A piece of a volume to be run: a whole volume, or consecutive rows of one.

    ``volume`` has the row groups of this piece, ``data`` the rows that it came with, ``kept`` the
    indices of those that belong to the groups, ``None`` if all do. (``volume.payload`` still
    describes the volume as it arrived.) ``whole`` has all groups that are left of the volume; the
    piece begins with row ``first`` of these and ``last`` is whether it ends with their last one.
    """

    volume: Volume
    data: object
    kept: tuple[int, ...] | None
    whole: Volume
    first: int
    last: bool


@dataclass(frozen=True, slots=True)
class Work:
    """What may run now, as one fused pass: of each kind at most a piece of one volume."""

    decode: Ready | None
    prefill: Ready | None

    @property
    def parts(self) -> tuple[Ready, ...]:
        """The pieces, decode first."""
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
