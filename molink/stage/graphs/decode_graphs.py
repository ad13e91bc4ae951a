"""Decode steps as CUDA graphs: the layers of a stage launched at once instead of one by one.

At few rows a GPU computes a layer faster than Python launches its kernels. Only the layers are in a
graph: embedding, output head and sampling are few kernels, of shapes that vary.
"""

import logging
from array import array
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from molink.stage.attention.base import StaticAttention
from molink.stage.batch import SequenceRows
from molink.stage.decoder.block import ForwardContext
from molink.stage.decoder.rotary import AngleTable
from molink.stage.device_copy import upload_into
from molink.stage.graphs.buckets import MAX_GRAPH_ROWS, GraphBucket, GraphPlan
from molink.stage.graphs.capture import GraphCapturer, GraphWork
from molink.stage.layer_pass import LayerPass, LocatedRows
from molink.stage.torch_dtypes import residual_dtype

log = logging.getLogger(__name__)

#: By how much a graph's rows may differ, as a part of what the layers add to them: they are padded,
#: so products may add up in another order, and in 16 bits.
TOLERANCE = 0.05
_MIN_CHANGE = 1e-6


@dataclass(frozen=True, slots=True)
class _CapturedGraph:
    """A bucket's graph, and the memory that it reads and writes.

    ``numbers`` (int64 ``[1 + ropes, rows]``) are slots, and places in each of ``angles``.
    """

    rows: Tensor
    numbers: Tensor
    angles: tuple[AngleTable, ...]
    output: Tensor
    attention: StaticAttention
    replay: GraphWork


class DecodeGraphs:
    """Runs decode steps on one KV pool, which has a spare block for padding rows.

    A bucket gets a graph only if that is faster than running such a step eagerly, which is
    measured when it is made, and gives the same rows then.
    """

    def __init__(
        self, layers: LayerPass, device: torch.device, plan: GraphPlan, captures: GraphCapturer
    ) -> None:
        assert layers.pool.padding_block is not None, "graphs need a pool with a spare block"
        self._layers, self._pool, self._device = layers, layers.pool, device
        self._spare = layers.pool.padding_block
        self._plan, self._capturer = plan, captures
        self._graphs: dict[GraphBucket, _CapturedGraph] = {}
        #: Graphs that are no faster. They live as long as the others: when torch (2.13, say)
        #: destroys one, it frees the cuBLAS workspaces of all others of its stream, too.
        self._unused_replays: list[GraphWork] = []
        #: Inputs and outputs of all graphs, for the most rows that a bucket has.
        self._rows = torch.zeros(
            MAX_GRAPH_ROWS,
            layers.decoder.config.hidden_size,
            dtype=residual_dtype(layers.dtype),
            device=device,
        )
        self._output = torch.zeros_like(self._rows)
        #: How many rows of the last step are there; what follows is zeros.
        self._num_filled_rows = 0

    @property
    def nbytes(self) -> int:
        """Bytes that the graphs take."""
        return self._plan.nbytes

    def replay_step(self, step: LocatedRows) -> Tensor | None:
        """Rows ``[T, hidden]`` after all layers, or ``None`` if this step is to be run eagerly."""
        bucket = self._plan.find_bucket(step.sequences)
        if bucket is None:
            return None
        action = self._plan.choose_action(bucket)
        if action == "eager" or (action == "capture" and not self._capture_bucket(bucket, step)):
            return None
        return self._replay_graph(self._graphs[bucket], step)

    def capture_next(self) -> bool:
        """Make one graph that steps to come would use; whether one was tried."""
        bucket = self._plan.next_bucket()
        if bucket is None:
            return False
        self._capture_bucket(bucket, self._make_dummy_step(bucket))
        return True

    def capture_shape(self, rows: int, positions: int) -> bool:
        """Make the graph of such steps; whether it is faster than running them eagerly."""
        bucket = self._plan.make_bucket(rows, positions)
        return bucket in self._graphs or self._capture_bucket(bucket, self._make_dummy_step(bucket))

    def check_speedup(self) -> bool:
        """Whether a graph of one row is faster than running it eagerly; if not, none is made."""
        if self.capture_shape(1, 1):
            return True
        self._disable_graphs()
        return False

    def _make_dummy_step(self, bucket: GraphBucket) -> LocatedRows:
        """A full step of a bucket that touches the spare block only: no request's keys or values.

        Rows that write to the same place are equal, so that it doesn't matter which is the last.
        """
        size = self._pool.block_size
        places = [size - 1 - row % size for row in range(bucket.rows)]
        before, table = (bucket.blocks - 1) * size, (self._spare,) * bucket.blocks
        sequences = [SequenceRows(before + place, 1, table) for place in places]
        hidden = self._rows.shape[1]
        noise = torch.randn(size, hidden, generator=torch.Generator().manual_seed(0))
        return LocatedRows(
            noise[places].to(self._device, self._rows.dtype),
            array("q", (before + place for place in places)),
            array("q", (self._spare * size + place for place in places)),
            sequences,
        )

    def _replay_graph(self, graph: _CapturedGraph, step: LocatedRows) -> Tensor:
        self._load_step(graph, step)
        graph.replay()
        return graph.output[: len(step.rows)].clone()

    def _capture_bucket(self, bucket: GraphBucket, step: LocatedRows) -> bool:
        """Make the graph of a bucket, tried with such a step; whether it is to be used."""
        try:
            graph = self._prepare_graph(bucket)
            if graph is None:
                self._plan.record_capture(bucket, 0, False)
                return False
            self._load_step(graph, step)
            replay = self._capturer.capture_work(graph.replay, self._plan.remaining_bytes)
            if replay is None:
                log.info("%d rows, %d blocks: too large a graph", bucket.rows, bucket.blocks)
                self._plan.record_capture(bucket, 0, False)
                return False
            graph = replace(graph, replay=replay)
            plain: list[Tensor] = []
            given: list[Tensor] = []
            eager = self._capturer.time_work(lambda: plain.append(self._layers.run_step(step)))
            replayed = self._capturer.time_work(
                lambda: given.append(self._replay_graph(graph, step))
            )
            error = _relative_error(given[-1].float(), plain[-1].float(), step.rows)
        except Exception:
            log.exception("no CUDA graphs: one could not be made")
            self._disable_graphs()
            return False
        # Written so that NaN is no.
        if not error <= TOLERANCE:
            log.warning(
                "CUDA graphs are off by %g here: kernels are launched one by one instead", error
            )
            self._disable_graphs()
            return False
        faster = replayed < eager
        log.info(
            "decode steps of %d rows, %d blocks: %.3f ms, as a graph %.3f ms",
            bucket.rows, bucket.blocks, 1e3 * eager, 1e3 * replayed,
        )  # fmt: skip
        self._plan.record_capture(bucket, self._capturer.nbytes, faster)
        if faster:
            self._graphs[bucket] = graph
        else:
            self._unused_replays.append(replay)
        return faster

    def _disable_graphs(self) -> None:
        self._plan.disable_graphs()
        self._graphs.clear()
        self._unused_replays.clear()

    def _prepare_graph(self, bucket: GraphBucket) -> _CapturedGraph | None:
        """A graph whose ``replay`` is still the work itself; ``None`` if angles aren't in tables.

        What follows from the numbers of a step is computed in the graph, where a kernel costs no
        launch.
        """
        layers, rows = self._layers, bucket.rows
        found = [rope.grow_table(bucket.blocks * self._pool.block_size) for rope in layers.ropes]
        tables = tuple(table for table in found if table is not None)
        if len(tables) < len(found):
            return None
        numbers = torch.zeros(1 + len(tables), rows, dtype=torch.int64, device=self._device)
        given, output = self._rows[:rows], self._output[:rows]
        fixed = layers.attention.prepare_static(
            rows, bucket.blocks, self._pool.block_size, layers.dtype, self._device
        )

        def work() -> None:
            angles = tuple(
                table.angles.index_select(0, places)
                for table, places in zip(tables, numbers[1:], strict=True)
            )
            fixed.derive_masks()
            context = ForwardContext(self._pool, numbers[0], angles, fixed)
            output.copy_(layers.decoder.run_layers(given, context))

        return _CapturedGraph(given, numbers, tables, output, fixed, work)

    def _load_step(self, graph: _CapturedGraph, step: LocatedRows) -> None:
        """Copy a step into the graph's memory; rows that it lacks are zeros on the spare block."""
        count, size = len(step.rows), len(graph.rows)
        self._rows[:count].copy_(step.rows)
        if count < self._num_filled_rows:
            self._rows[count : self._num_filled_rows].zero_()
        self._num_filled_rows = count
        missing = size - count
        numbers = step.slots + array("q", (self._spare * self._pool.block_size,)) * missing
        for table in graph.angles:
            numbers.extend(table.row_indices(step.positions, step.sequences))
            numbers.extend((0,) * missing)
        upload_into(graph.numbers, torch.frombuffer(numbers, dtype=torch.int64).view(-1, size))
        padding = [SequenceRows(0, 1, (self._spare,))] * missing
        graph.attention.load_tables([*step.sequences, *padding])


def _relative_error(found: Tensor, plain: Tensor, before: Tensor) -> float:
    """Greatest difference of rows to those without a graph, by the largest change of the latter.

    NaN if only the former have any; rows that are NaN without a graph too tell nothing.
    """
    usable = plain.isfinite().all(dim=-1)
    if not bool(usable.any()):
        return 0.0
    change = (plain - before.float())[usable].abs().max()
    return float((found - plain)[usable].abs().max() / change.clamp_min(_MIN_CHANGE))
