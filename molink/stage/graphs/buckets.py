"""Shapes to which decode steps are padded, and the policy for capturing them.

A graph replays fixed work on fixed memory, so row counts and block table widths are padded to
buckets; padding rows use the padding block. Graphs are captured while a stage is idle, one at a
time; until then steps run eagerly.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from molink.stage.batch import SequenceRows

#: How to run a step; ``capture`` captures its graph first, although requests wait.
GraphAction = Literal["eager", "capture", "replay"]

#: Positions of the narrowest block table.
_MIN_POSITIONS = 256
#: Runs of a bucket before a graph is worth capturing.
MIN_RUNS_BEFORE_CAPTURE = 1
#: Runs after which a busy stage captures a graph immediately, since launches have by then cost more
#: than the pause.
MAX_RUNS_BEFORE_CAPTURE = 256
#: Rows and positions to capture before any step has run.
_EXPECTED_SHAPES = ((1, 512), (2, 256), (4, 256), (1, 1024), (8, 256))
#: Minimum charge per graph, so that the budget also bounds their number.
_MIN_GRAPH_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class GraphBucket:
    """Decode steps of up to ``rows`` rows with block tables of up to ``blocks`` blocks."""

    rows: int
    blocks: int


class GraphPlan:
    """Decides how each step runs, and which graph to capture within ``budget`` bytes.

    Graphs have up to ``max_rows`` rows. With ``context`` every graph accepts requests of up to that
    many positions, since attention reads only a step's own pages; longer requests run eagerly.
    Without it, a graph's block tables are as wide as its steps need. A request may have up to
    ``max_drafts`` drafts in a step, each in its own row.
    """

    def __init__(
        self,
        block_size: int,
        budget: int,
        max_rows: int = 64,
        context: int | None = None,
        max_drafts: int = 0,
    ) -> None:
        self._block_size, self.budget = block_size, budget
        self.max_rows, self._context, self._max_drafts = max_rows, context, max_drafts
        self._runs: Counter[GraphBucket] = Counter()
        #: Captured buckets, and whether their graph is faster.
        self._is_faster: dict[GraphBucket, bool] = {}
        self._is_disabled = False
        #: Bytes of all captured graphs.
        self.nbytes = 0

    def find_bucket(self, sequences: Sequence[SequenceRows]) -> GraphBucket | None:
        """Find a step's bucket; ``None`` if it must run eagerly.

        That holds for steps with adapters or too many rows, in total or per request.
        """
        rows = sum(sequence.count for sequence in sequences)
        if self._is_disabled or rows > self.max_rows:
            return None
        if any(one.adapter or one.count > 1 + self._max_drafts for one in sequences):
            return None
        longest = max(sequence.end for sequence in sequences)
        if self._context is not None and longest > self._context:
            return None
        return self.make_bucket(rows, longest)

    def make_bucket(self, rows: int, positions: int) -> GraphBucket:
        """Return the bucket of decode steps of ``rows`` rows and up to ``positions`` positions."""
        if self._context is not None:
            return GraphBucket(row_bucket(rows), -(-self._context // self._block_size))
        blocks = -(-max(positions, _MIN_POSITIONS) // self._block_size)
        return GraphBucket(row_bucket(rows), block_bucket(blocks))

    def typical_blocks(self, bucket: GraphBucket) -> int:
        """Return the number of blocks of a typical request in this bucket."""
        usual = -(-_MIN_POSITIONS // self._block_size)
        return bucket.blocks if self._context is None else min(usual, bucket.blocks)

    def choose_action(self, bucket: GraphBucket) -> GraphAction:
        """Decide how to run a step of this bucket."""
        if bucket in self._is_faster:
            return "replay" if self._is_faster[bucket] else "eager"
        self._runs[bucket] += 1
        return (
            "capture"
            if self._runs[bucket] > MAX_RUNS_BEFORE_CAPTURE and self._has_room
            else "eager"
        )

    def next_bucket(self) -> GraphBucket | None:
        """Choose the bucket to capture next: the most frequent, or an expected one."""
        if self._is_disabled or not self._has_room:
            return None
        seen = (
            bucket for bucket, runs in self._runs.most_common() if runs > MIN_RUNS_BEFORE_CAPTURE
        )
        expected = (self.make_bucket(*each) for each in _EXPECTED_SHAPES)
        return next((one for one in (*seen, *expected) if one not in self._is_faster), None)

    @property
    def remaining_bytes(self) -> int:
        """Unused bytes of the budget."""
        return self.budget - self.nbytes

    @property
    def _has_room(self) -> bool:
        return self.remaining_bytes >= _MIN_GRAPH_BYTES

    def record_capture(self, bucket: GraphBucket, nbytes: int, faster: bool) -> None:
        """Record a captured graph and its memory; it is used if ``faster``.

        Memory of unused graphs stays in the pool that all graphs share.
        """
        self._is_faster[bucket] = faster
        self.nbytes += max(_MIN_GRAPH_BYTES if faster else 0, nbytes)

    def disable_graphs(self) -> None:
        """Run everything eagerly from now on."""
        self._is_disabled = True
        self.nbytes = 0


def split_rows(sequences: Sequence[SequenceRows]) -> list[SequenceRows]:
    """Split a step into single rows; drafts share their request's blocks."""
    return [
        one
        if one.count == 1
        else SequenceRows(one.start + row, 1, one.blocks, max(one.end, one.max_positions))
        for one in sequences
        for row in range(one.count)
    ]


def row_bucket(rows: int) -> int:
    """Round up to 1, 2, 4, 8, a multiple of 8, or (beyond 64) a multiple of 32."""
    if rows <= 8:
        return 1 << (rows - 1).bit_length()
    multiple = 8 if rows <= 64 else 32
    return -(-rows // multiple) * multiple


def block_bucket(blocks: int) -> int:
    """Round up to a power of two, or to the middle between two of them."""
    above = 1 << (blocks - 1).bit_length()
    between = above // 4 * 3
    return between if above >= 4 and blocks <= between else above
