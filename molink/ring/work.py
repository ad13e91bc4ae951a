"""What a scoreboard hands out, and what comes of it: controls to forward, segments to run."""

from collections.abc import Sequence
from typing import Any

import msgspec

from molink.wire.messages.data import (
    Admit,
    Grammar,
    History,
    Release,
    Sampled,
    SwapIn,
    SwapOut,
    Table,
    Tombstone,
    TopLogprobs,
    Volume,
)

ControlBody = Admit | Grammar | History | Table | SwapOut | SwapIn | Release | Tombstone


class Control(msgspec.Struct, frozen=True):
    """A control message that this stage has completed; ``data`` is what it arrived with."""

    body: ControlBody
    data: object


class BlockCopy(msgspec.Struct, frozen=True):
    """Blocks of a request to be copied ``out`` to host memory, or in from there.

    The contents of ``blocks`` and of ``hosts`` belong to each other, one by one.
    """

    request: int
    out: bool
    blocks: Sequence[int]
    hosts: Sequence[int]


class Segment(msgspec.Struct, frozen=True):
    """The part of a step that belongs to one volume: all of it, or consecutive rows of it.

    ``volume`` has the row groups of this segment, ``data`` the rows that it came with (token ids at
    stage 0, the raw bytes of rows ``[n, hidden]`` at the others), ``kept`` the indices of those
    that belong to the groups, ``None`` if all do. (``volume.payload`` still describes the volume as
    it arrived.) ``whole`` has all groups that are left of the volume, ``None`` if those are the
    segment's own; the segment begins with row ``first`` of these and ``last`` is whether it ends
    with their last one.
    """

    volume: Volume
    data: Any
    kept: Sequence[int] | None = None
    whole: Volume | None = None
    first: int = 0
    last: bool = True

    @property
    def header(self) -> Volume:
        """All groups that are left of the volume: what its rows travel under."""
        return self.volume if self.whole is None else self.whole


class Work(msgspec.Struct, frozen=True):
    """What may run now, as one fused pass: of each kind at most a segment of one volume."""

    decode: Segment | None
    prefill: Segment | None

    @property
    def segments(self) -> tuple[Segment, ...]:
        """The segments, decode first."""
        return tuple(each for each in (self.decode, self.prefill) if each is not None)

    @property
    def ticks(self) -> tuple[int, ...]:
        """Their ticks, for :meth:`Scoreboard.complete`."""
        return tuple(each.volume.tick for each in self.segments)


class SegmentResult(msgspec.Struct, frozen=True):
    """A segment after the step: rows for the next stage, or (at the tail) what was sampled."""

    volume: Volume
    rows: bytearray | memoryview | None
    sampled: Sampled | None
    tops: tuple[TopLogprobs, ...] = ()


class StepDone(msgspec.Struct, frozen=True):
    """A step that has ended; ``seconds`` is its wall-clock time, ``error`` why it failed, if so.

    ``out_of_memory`` says that this was for want of memory. A failed step without ``results`` could
    not even report its requests as failed.
    """

    results: Sequence[SegmentResult]
    seconds: float
    error: str | None
    out_of_memory: bool = False


def block_copy(order: SwapOut | SwapIn, data: object) -> BlockCopy | None:
    """What an order says; ``None`` if ``data`` is not what it promises."""
    payload = order.payload
    if payload.dtype != "i32" or len(payload.shape) != 2 or payload.shape[0] != 2:
        return None
    if not isinstance(data, bytes | bytearray | memoryview) or len(data) != payload.nbytes:
        return None
    ids, count = memoryview(data).cast("B").cast("i").tolist(), payload.shape[1]
    return BlockCopy(order.request, isinstance(order, SwapOut), ids[:count], ids[count:])


def block_ids(table: Table, data: object) -> Sequence[int]:
    """The blocks that came with ``table``; none if ``data`` is not what it promises."""
    payload = table.payload
    if payload.dtype != "i32" or len(payload.shape) != 1:
        return ()
    if not isinstance(data, bytes | bytearray | memoryview) or len(data) != payload.nbytes:
        return ()
    return memoryview(data).cast("B").cast("i")
