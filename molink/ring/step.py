"""Steps of a stage: their inputs, results and the control messages between them."""

from collections.abc import Sequence
from typing import Any

import msgspec

from molink.wire.messages.data_plane import (
    Admit,
    BlockTable,
    Grammar,
    History,
    PooledRow,
    PromptImages,
    Release,
    SamplerOutput,
    SwapIn,
    SwapOut,
    Tombstone,
    TopLogprobs,
    Volume,
)

ControlMessage = (
    Admit | Grammar | History | PromptImages | BlockTable | SwapOut | SwapIn | Release | Tombstone
)


class CompletedControl(msgspec.Struct, frozen=True):
    """A control message that is complete at this stage, with its payload."""

    body: ControlMessage
    data: object


class BlockCopy(msgspec.Struct, frozen=True):
    """Blocks of a request to copy to host memory (``is_swap_out``) or back.

    ``blocks`` and ``host_blocks`` correspond one to one.
    """

    request: int
    is_swap_out: bool
    blocks: Sequence[int]
    host_blocks: Sequence[int]


class StepInput(msgspec.Struct, frozen=True):
    """The part of a step that belongs to one volume: all its rows, or consecutive ones.

    ``volume`` has the slices of this input; its ``payload`` still describes the volume as it
    arrived. ``data`` has token ids at stage 0, otherwise raw rows ``[n, hidden]``; ``row_indices``
    selects the slices' rows (``None``: all). ``remaining_volume`` has all remaining slices of the
    volume (``None``: the input's own). The input starts at row ``first_row`` of these; ``is_last``
    says whether it ends with their last row.
    """

    volume: Volume
    data: Any
    row_indices: Sequence[int] | None = None
    remaining_volume: Volume | None = None
    first_row: int = 0
    is_last: bool = True

    @property
    def full_volume(self) -> Volume:
        """All remaining slices of the volume: the header under which its rows are sent."""
        return self.volume if self.remaining_volume is None else self.remaining_volume


class Step(msgspec.Struct, frozen=True):
    """One pass: at most one input of each kind, fused."""

    decode: StepInput | None
    prefill: StepInput | None

    @property
    def inputs(self) -> tuple[StepInput, ...]:
        """The step's inputs, decode first."""
        return tuple(each for each in (self.decode, self.prefill) if each is not None)

    @property
    def volumes(self) -> tuple[Volume, ...]:
        """The volumes of the inputs, decode first."""
        return tuple(each.volume for each in self.inputs)

    @property
    def seqs(self) -> tuple[int, ...]:
        """The volumes' numbers, for :meth:`Scoreboard.complete_volumes`."""
        return tuple(volume.seq for volume in self.volumes)

    def find_input(self, seq: int) -> StepInput:
        """Return the input of volume ``seq``."""
        return next(each for each in self.inputs if each.volume.seq == seq)


class StepOutput(msgspec.Struct, frozen=True):
    """The result of an input: rows for the next stage, or (at the last stage) sampled tokens.

    ``pooled`` has the rows of an embedding model with their payloads, one per token.
    """

    volume: Volume
    rows: bytearray | memoryview | None
    sampled: SamplerOutput | None
    tops: tuple[TopLogprobs, ...] = ()
    pooled: tuple[tuple[PooledRow, bytes], ...] = ()


class StepResult(msgspec.Struct, frozen=True):
    """A finished step; ``seconds`` is its wall-clock time, ``error`` says why it failed.

    A failed step without ``outputs`` could not even report its requests as failed.
    """

    outputs: Sequence[StepOutput]
    seconds: float
    error: str | None
    out_of_memory: bool = False


def parse_block_copy(swap: SwapOut | SwapIn, data: object) -> BlockCopy | None:
    """Parse a swap message; ``None`` if ``data`` doesn't match its header."""
    payload = swap.payload
    if payload.dtype != "i32" or len(payload.shape) != 2 or payload.shape[0] != 2:
        return None
    if not isinstance(data, bytes | bytearray | memoryview) or len(data) != payload.nbytes:
        return None
    ids, count = memoryview(data).cast("B").cast("i").tolist(), payload.shape[1]
    return BlockCopy(swap.request, isinstance(swap, SwapOut), ids[:count], ids[count:])


def parse_block_ids(block_table: BlockTable, data: object) -> Sequence[int]:
    """Parse the ids of a block table; empty if ``data`` doesn't match its header."""
    payload = block_table.payload
    if payload.dtype != "i32" or len(payload.shape) != 1:
        return ()
    if not isinstance(data, bytes | bytearray | memoryview) or len(data) != payload.nbytes:
        return ()
    return memoryview(data).cast("B").cast("i")
