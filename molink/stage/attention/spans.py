"""What a gathering backend reads: arithmetic over positions, windows and blocks, without torch.

A row at position ``p`` attends to ``p`` and what lies before it: all of it, or in a layer with a
window of ``w`` only to ``p - w + 1 … p``.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from molink.stage.batch import SequenceRows

#: Padding of a decode bucket (positions over all rows) that is cheaper than another SDPA call.
FREE_PADDING = 1024


@dataclass(frozen=True, slots=True)
class Span:
    """What the rows of one sequence read in layers of one window.

    ``blocks`` are the ids of the blocks that hold positions ``begin … end - 1`` of them, counted
    from the first position of the first block. ``row`` is the first of the rows in the batch.
    """

    row: int
    count: int
    blocks: Sequence[int]
    begin: int
    end: int

    @classmethod
    def from_sequence(
        cls, row: int, sequence: SequenceRows, window: int, block_size: int
    ) -> "Span":
        """For rows that begin at ``row`` of the batch; a ``window`` of 0 is none."""
        start, end = sequence.start, sequence.start + sequence.count
        first = max(0, start - window + 1) if window else 0
        block = first // block_size
        blocks = sequence.blocks[block : -(-end // block_size)]
        base = block * block_size
        return cls(row, sequence.count, blocks, first - base, end - base)


def effective_windows(windows: Sequence[int], longest: int) -> tuple[int, ...]:
    """``windows`` of layers, with 0 for those that leave nothing out at ``longest`` positions."""
    return tuple(0 if window >= longest else window for window in windows)


def bucket_spans(decode: Sequence[Span], block_size: int, max_positions: int) -> list[list[Span]]:
    """Decode rows that run together, in the order of the batch; each is padded to its longest.

    Rows are cut apart, longest first, where the shorter ones would mostly be padding, and where
    more than ``max_positions`` positions would be gathered at once (a single row may have more).
    """
    rest = sorted(decode, key=lambda span: -len(span.blocks))
    found: list[list[Span]] = []
    begin = 0
    for index in range(1, len(rest) + 1):
        longest = len(rest[begin].blocks) * block_size
        if index < len(rest):
            here = len(rest[index].blocks) * block_size
            padding = (longest - here) * (len(rest) - index)
            sparse = here < longest // 2 and padding > FREE_PADDING
            if not sparse and longest * (index - begin + 1) <= max_positions:
                continue
        found.append(sorted(rest[begin:index], key=lambda span: span.row))
        begin = index
    return found


def block_ids(bucket: Sequence[Span]) -> list[int]:
    """The blocks of all spans, as many for each as the longest has.

    Padding repeats a block of the same request: nothing of another one is ever read.
    """
    width = max(len(span.blocks) for span in bucket)
    ids: list[int] = []
    for span in bucket:
        ids.extend(span.blocks)
        ids.extend([span.blocks[0]] * (width - len(span.blocks)))
    return ids


def as_slice(numbers: Sequence[int]) -> slice | None:
    """``numbers`` as a slice if each is one more than that before it."""
    first, count = numbers[0], len(numbers)
    if numbers[-1] - first != count - 1:
        return None
    if all(number == first + index for index, number in enumerate(numbers)):
        return slice(first, first + count)
    return None
