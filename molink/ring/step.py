"""What a scoreboard hands out, and what comes of it: controls to forward, segments to run."""

from collections.abc import Sequence
from typing import Any

import msgspec

from molink.wire.messages.data_plane import (
    Admit,
    BlockTable,
    Grammar,
    History,
    Release,
    SamplerOutput,
    SwapIn,
    SwapOut,
    Tombstone,
    TopLogprobs,
    Volume,
)

ControlMessage = Admit | Grammar | History | BlockTable | SwapOut | SwapIn | Release | Tombstone


class CompletedControl(msgspec.Struct, frozen=True):
    """A control message that this stage has completed; ``data`` is what it arrived with."""

    body: ControlMessage
    data: object


class BlockCopy(msgspec.Struct, frozen=True):
    """Blocks of a request to be copied ``is_swap_out`` to host memory, or in from there.

    The contents of ``blocks`` and of ``host_blocks`` belong to each other, one by one.
    """

    request: int
    is_swap_out: bool
    blocks: Sequence[int]
    host_blocks: Sequence[int]


class StepInput(msgspec.Struct, frozen=True):
    """The part of a step that belongs to one volume: all of it, or consecutive rows of it.

    ``volume`` has the row groups of this segment, ``data`` the rows that it came with (token ids at
    stage 0, the raw bytes of rows ``[n, hidden]`` at the others), ``row_indices`` the indices of
    those that belong to the groups, ``None`` if all do. (``volume.payload`` still describes the
    volume as it arrived.) ``remaining_volume`` has all groups that are left of the volume, ``None``
    if those are the segment's own; the segment begins with row ``first_row`` of these and
    ``is_last`` is whether it ends with their last one.
    """

    volume: Volume
    data: Any
    row_indices: Sequence[int] | None = None
    remaining_volume: Volume | None = None
    first_row: int = 0
    is_last: bool = True

    @property
    def full_volume(self) -> Volume:
        """All groups that are left of the volume: what its rows travel under."""
        return self.volume if self.remaining_volume is None else self.remaining_volume


class Step(msgspec.Struct, frozen=True):
    """What may run now, as one fused pass: of each kind at most a segment of one volume."""

    decode: StepInput | None
    prefill: StepInput | None

    @property
    def inputs(self) -> tuple[StepInput, ...]:
        """The segments, decode first."""
        return tuple(each for each in (self.decode, self.prefill) if each is not None)

    @property
    def seqs(self) -> tuple[int, ...]:
        """Their seqs, for :meth:`Scoreboard.complete`."""
        return tuple(each.volume.seq for each in self.inputs)


class StepOutput(msgspec.Struct, frozen=True):
    """A segment after the step: rows for the next stage, or (at the tail) what was sampled."""

    volume: Volume
    rows: bytearray | memoryview | None
    sampled: SamplerOutput | None
    tops: tuple[TopLogprobs, ...] = ()


class StepResult(msgspec.Struct, frozen=True):
    """A step that has ended; ``seconds`` is its wall-clock time, ``error`` why it failed, if so.

    ``out_of_memory`` says that this was for want of memory. A failed step without ``outputs`` could
    not even report its requests as failed.
    """

    outputs: Sequence[StepOutput]
    seconds: float
    error: str | None
    out_of_memory: bool = False


def parse_block_copy(swap: SwapOut | SwapIn, data: object) -> BlockCopy | None:
    """What an order says; ``None`` if ``data`` is not what it promises."""
    payload = swap.payload
    if payload.dtype != "i32" or len(payload.shape) != 2 or payload.shape[0] != 2:
        return None
    if not isinstance(data, bytes | bytearray | memoryview) or len(data) != payload.nbytes:
        return None
    ids, count = memoryview(data).cast("B").cast("i").tolist(), payload.shape[1]
    return BlockCopy(swap.request, isinstance(swap, SwapOut), ids[:count], ids[count:])


def parse_block_ids(block_table: BlockTable, data: object) -> Sequence[int]:
    """The blocks that came with ``table``; none if ``data`` is not what it promises."""
    payload = block_table.payload
    if payload.dtype != "i32" or len(payload.shape) != 1:
        return ()
    if not isinstance(data, bytes | bytearray | memoryview) or len(data) != payload.nbytes:
        return ()
    return memoryview(data).cast("B").cast("i")
