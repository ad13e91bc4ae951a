"""Which shapes decode steps are padded to, and when such a shape gets a CUDA graph of its own.

A graph replays fixed work on fixed memory. So a step is padded to one of few row counts, and its
block tables to one of few widths; rows beyond the real ones compute with a spare block.

Graphs are made while a stage has nothing to do, one at a time; until then steps run without.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from molink.stage.batch import SequenceRows

#: How a step is run. ``capture`` means: make the graph now, though requests wait, then replay it.
GraphAction = Literal["eager", "capture", "replay"]

#: Most rows of a step with a graph; beyond them kernels take longer than their launches.
MAX_GRAPH_ROWS = 64
#: Positions that the narrowest block table covers.
_MIN_POSITIONS = 256
#: A bucket is run this often before it is worth a graph.
MIN_RUNS_BEFORE_CAPTURE = 1
#: One that was run this often without a graph gets it at once: a stage that never rests had none
#: otherwise, and by now launching its kernels has cost more than the pause.
MAX_RUNS_BEFORE_CAPTURE = 256
#: Rows and positions of steps to come, before any was seen: a request that grows, and a few.
_EXPECTED_SHAPES = ((1, 512), (2, 256), (4, 256), (1, 1024), (8, 256))
#: What a graph is taken to need at least: so the budget also bounds how many there are.
_MIN_GRAPH_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class GraphBucket:
    """Decode steps of up to ``rows`` rows whose block tables have up to ``blocks`` blocks."""

    rows: int
    blocks: int


class GraphPlan:
    """Decides how each step is run, and which graph is made next while ``budget`` bytes last."""

    def __init__(self, block_size: int, budget: int) -> None:
        self._block_size, self.budget = block_size, budget
        self._runs: Counter[GraphBucket] = Counter()
        #: Buckets that were captured, and whether that made them faster.
        self._is_faster: dict[GraphBucket, bool] = {}
        self._is_disabled = False
        #: Bytes that graphs take so far.
        self.nbytes = 0

    def find_bucket(self, sequences: Sequence[SequenceRows]) -> GraphBucket | None:
        """That of a step; ``None`` if it has other rows than decode rows, or too many."""
        if self._is_disabled or len(sequences) > MAX_GRAPH_ROWS:
            return None
        if any(sequence.count != 1 for sequence in sequences):
            return None
        return self.make_bucket(len(sequences), max(sequence.end for sequence in sequences))

    def make_bucket(self, rows: int, positions: int) -> GraphBucket:
        """That of decode steps of ``rows`` rows, the longest of which has so many positions."""
        blocks = -(-max(positions, _MIN_POSITIONS) // self._block_size)
        return GraphBucket(row_bucket(rows), block_bucket(blocks))

    def choose_action(self, bucket: GraphBucket) -> GraphAction:
        """How to run a step of this bucket."""
        if bucket in self._is_faster:
            return "replay" if self._is_faster[bucket] else "eager"
        self._runs[bucket] += 1
        return (
            "capture"
            if self._runs[bucket] > MAX_RUNS_BEFORE_CAPTURE and self._has_room
            else "eager"
        )

    def next_bucket(self) -> GraphBucket | None:
        """Which graph to make next: of steps that came most often, else of those to be expected."""
        if self._is_disabled or not self._has_room:
            return None
        seen = (
            bucket for bucket, runs in self._runs.most_common() if runs > MIN_RUNS_BEFORE_CAPTURE
        )
        expected = (self.make_bucket(*each) for each in _EXPECTED_SHAPES)
        return next((one for one in (*seen, *expected) if one not in self._is_faster), None)

    @property
    def remaining_bytes(self) -> int:
        """Bytes of the budget that no graph has."""
        return self.budget - self.nbytes

    @property
    def _has_room(self) -> bool:
        return self.remaining_bytes >= _MIN_GRAPH_BYTES

    def record_capture(self, bucket: GraphBucket, nbytes: int, faster: bool) -> None:
        """A graph was made and took so much memory; it is kept if it is ``faster``.

        If not, its memory still stays with that of the others, for graphs to come.
        """
        self._is_faster[bucket] = faster
        self.nbytes += max(_MIN_GRAPH_BYTES if faster else 0, nbytes)

    def disable_graphs(self) -> None:
        """Run everything eagerly from now on."""
        self._is_disabled = True
        self.nbytes = 0


def row_bucket(rows: int) -> int:
    """1, 2, 4, 8 and then multiples of 8."""
    return 1 << (rows - 1).bit_length() if rows <= 8 else -(-rows // 8) * 8


def block_bucket(blocks: int) -> int:
    """Powers of two and what lies half way between them."""
    above = 1 << (blocks - 1).bit_length()
    between = above // 4 * 3
    return between if above >= 4 and blocks <= between else above
