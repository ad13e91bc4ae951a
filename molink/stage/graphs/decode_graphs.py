"""Decode steps as CUDA graphs: the layers of a stage launched at once instead of one by one.

At few rows a GPU computes a layer faster than Python launches its kernels. Only the layers are in a
graph: embedding, output head and sampling are few kernels, of shapes that vary.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from molink.stage.attention.base import Attention, FixedAttention
from molink.stage.batch import SequenceRows
from molink.stage.decoder.block import ForwardContext
from molink.stage.decoder.decoder import Decoder
from molink.stage.graphs.buckets import MAX_ROWS, Bucket, GraphPlan
from molink.stage.graphs.capture import Captures, Work
from molink.stage.pool import KVPool

log = logging.getLogger(__name__)

#: By how much a graph's rows may differ, as a part of what the layers add to them: they are padded,
#: so products may add up in another order, and in 16 bits.
TOLERANCE = 0.05
_LEAST = 1e-6


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """Rows ``[T, hidden]`` of a decode step, one of each sequence, with their slots and angles."""

    rows: Tensor
    slots: Tensor
    angles: tuple[Tensor, ...]
    sequences: Sequence[SequenceRows]

    def first(self, count: int) -> "DecodeRows":
        """The memory of the first ``count`` rows, for sequences yet to come."""
        angles = tuple(each[:count] for each in self.angles)
        return DecodeRows(self.rows[:count], self.slots[:count], angles, ())


@dataclass(frozen=True, slots=True)
class _Graph:
    """A bucket's graph, and the memory that it reads and writes."""

    given: DecodeRows
    output: Tensor
    attention: FixedAttention
    replay: Work


class DecodeGraphs:
    """Runs decode steps on one KV pool, which has a spare block for padding rows.

    A bucket gets a graph only if that is faster than running its step eagerly, which is measured
    with the first step that it is made for, and gives the same rows then.
    """

    def __init__(
        self,
        decoder: Decoder,
        pool: KVPool,
        attention: Attention,
        dtype: torch.dtype,
        plan: GraphPlan,
        captures: Captures,
    ) -> None:
        self._decoder, self._pool, self._attention = decoder, pool, attention
        self._dtype, self._plan, self._captures = dtype, plan, captures
        self._graphs: dict[Bucket, _Graph] = {}
        #: Graphs that are no faster. They live as long as the others: when torch (2.13, say)
        #: destroys one, it frees the cuBLAS workspaces of all others of its stream, too.
        self._slower: list[Work] = []
        #: Inputs and outputs of all graphs, for the most rows that a bucket has.
        self._given: DecodeRows | None = None
        self._output: Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Bytes that the graphs take."""
        return self._plan.nbytes

    def run(self, step: DecodeRows) -> Tensor | None:
        """Rows ``[T, hidden]`` after all layers, or ``None`` if this step is to be run eagerly."""
        bucket = self._plan.bucket(step.sequences)
        if bucket is None:
            return None
        action = self._plan.use(bucket)
        if action == "eager" or (action == "capture" and not self._capture(bucket, step)):
            return None
        return self._replay(self._graphs[bucket], step)

    def try_one(self, step: DecodeRows) -> bool:
        """Whether a graph of such a step is faster than running it eagerly; if not, none is made.

        For a time at which nobody waits: it takes a second or so.
        """
        bucket = self._plan.bucket(step.sequences)
        if bucket is not None and self._capture(bucket, step):
            return True
        self._stop()
        return False

    def _replay(self, graph: _Graph, step: DecodeRows) -> Tensor:
        self._load(graph, step)
        graph.replay()
        return graph.output[: len(step.rows)].clone()

    def _capture(self, bucket: Bucket, step: DecodeRows) -> bool:
        """Make the graph of a bucket with its first step; whether it is to be used."""
        try:
            graph = self._prepare(bucket, step)
            self._load(graph, step)
            replay = self._captures.capture(graph.replay, self._plan.budget)
            if replay is None:
                log.info("%d rows, %d blocks: too large a graph", bucket.rows, bucket.blocks)
                self._plan.captured(bucket, 0, False)
                return False
            graph = replace(graph, replay=replay)
            plain: list[Tensor] = []
            given: list[Tensor] = []
            eager = self._captures.seconds(lambda: plain.append(self._run_eagerly(step)))
            replayed = self._captures.seconds(lambda: given.append(self._replay(graph, step)))
            error = _error(given[-1].float(), plain[-1].float(), step.rows)
        except Exception:
            log.exception("no CUDA graphs: one could not be made")
            self._stop()
            return False
        # Written so that NaN is no.
        if not error <= TOLERANCE:
            log.warning(
                "CUDA graphs are off by %g here: kernels are launched one by one instead", error
            )
            self._stop()
            return False
        faster = replayed < eager
        log.info(
            "decode steps of %d rows, %d blocks: %.3f ms, as a graph %.3f ms",
            bucket.rows, bucket.blocks, 1e3 * eager, 1e3 * replayed,
        )  # fmt: skip
        self._plan.captured(bucket, self._captures.nbytes, faster)
        if faster:
            self._graphs[bucket] = graph
        else:
            self._slower.append(replay)
        return faster

    def _stop(self) -> None:
        self._plan.stop()
        self._graphs.clear()
        self._slower.clear()
        self._given = self._output = None

    def _run_eagerly(self, step: DecodeRows) -> Tensor:
        pool = self._pool
        device = step.rows.device
        attention = self._attention.prepare(step.sequences, pool.block_size, self._dtype, device)
        context = ForwardContext(pool, step.slots, step.angles, attention)
        return self._decoder.run(step.rows, context)

    def _prepare(self, bucket: Bucket, step: DecodeRows) -> _Graph:
        """A graph whose ``replay`` is still the work itself."""
        if self._given is None or self._output is None:
            self._given = _room(step)
            self._output = torch.zeros_like(self._given.rows)
        given, output = self._given.first(bucket.rows), self._output[: bucket.rows]
        fixed = self._attention.fix(
            bucket.rows, bucket.blocks, self._pool.block_size, self._dtype, step.rows.device
        )
        context = ForwardContext(self._pool, given.slots, given.angles, fixed)

        def work() -> None:
            output.copy_(self._decoder.run(given.rows, context))

        return _Graph(given, output, fixed, work)

    def _load(self, graph: _Graph, step: DecodeRows) -> None:
        """Copy a step into the graph's memory; rows that it lacks are zeros on the spare block."""
        spare = self._pool.spare
        assert spare is not None, "graphs need a pool with a spare block"
        count, given = len(step.rows), graph.given
        given.rows[:count].copy_(step.rows)
        given.rows[count:].zero_()
        given.slots[:count].copy_(step.slots)
        given.slots[count:].fill_(spare * self._pool.block_size)
        for room, angles in zip(given.angles, step.angles, strict=True):
            room[:count].copy_(angles)
        padding = [SequenceRows(0, 1, (spare,))] * (len(given.rows) - count)
        graph.attention.load([*step.sequences, *padding])


def _error(found: Tensor, plain: Tensor, before: Tensor) -> float:
    """Greatest difference of rows to those without a graph, by the largest change of the latter.

    NaN if only the former have any; rows that are NaN without a graph too tell nothing.
    """
    usable = plain.isfinite().all(dim=-1)
    if not bool(usable.any()):
        return 0.0
    change = (plain - before.float())[usable].abs().max()
    return float((found - plain)[usable].abs().max() / change.clamp_min(_LEAST))


def _room(step: DecodeRows) -> DecodeRows:
    """Memory for the most rows of such steps."""

    def like(tensor: Tensor) -> Tensor:
        return tensor.new_zeros(MAX_ROWS, *tensor.shape[1:])

    angles = tuple(like(each) for each in step.angles)
    return DecodeRows(like(step.rows), like(step.slots), angles, ())
