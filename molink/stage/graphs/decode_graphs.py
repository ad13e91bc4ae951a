"""Runs decode steps as CUDA graphs.

With few rows a GPU computes a layer faster than Python launches its kernels. Only layers are
captured: embedding, output head and sampling are few kernels of varying shapes.
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
from molink.stage.device_copy import StagingBuffer
from molink.stage.graphs.buckets import GraphBucket, GraphPlan, row_bucket, split_rows
from molink.stage.graphs.capture import GraphCapturer, GraphWork
from molink.stage.layer_pass import LayerPass, LocatedRows
from molink.stage.torch_dtypes import residual_dtype

log = logging.getLogger(__name__)

#: Tolerance of a graph's rows, relative to what the layers add: padding reorders 16-bit sums.
TOLERANCE = 0.05
_MIN_CHANGE = 1e-6
#: Bytes to which tables are aligned, for Triton's kernels.
_TABLE_ALIGNMENT = 16


@dataclass(frozen=True, slots=True)
class _CapturedGraph:
    """A captured bucket with its static buffers.

    ``numbers`` (uint8) holds slots and indices into each of ``angles`` (int64 ``[rows]`` each), and
    from a multiple of 16 bytes on the tables of ``attention``.
    """

    rows: Tensor
    numbers: Tensor
    angles: tuple[AngleTable, ...]
    output: Tensor
    attention: StaticAttention
    replay: GraphWork


class DecodeGraphs:
    """Runs decode steps on a KV pool with a padding block.

    A graph is used only if a test at its capture shows that it is faster than eager execution and
    gives the same rows.
    """

    def __init__(
        self, layers: LayerPass, device: torch.device, plan: GraphPlan, captures: GraphCapturer
    ) -> None:
        assert layers.pool.padding_block is not None, "graphs need a pool with a padding block"
        self._layers, self._pool, self._device = layers, layers.pool, device
        self._spare = layers.pool.padding_block
        self._plan, self._capturer = plan, captures
        self._graphs: dict[GraphBucket, _CapturedGraph] = {}
        #: Graphs that are not faster. They stay alive, since destroying one (torch 2.13) frees
        #: cuBLAS workspaces that other graphs of its stream use.
        self._unused_replays: list[GraphWork] = []
        #: Input and output buffers that all graphs share.
        self._rows = torch.zeros(
            row_bucket(plan.max_rows),
            layers.decoder.config.hidden_size,
            dtype=residual_dtype(layers.dtype),
            device=device,
        )
        self._output = torch.zeros_like(self._rows)
        #: Slots, angles and tables, which graphs share where they fit.
        self._numbers = torch.zeros(0, dtype=torch.uint8, device=device)
        self._staging = StagingBuffer(device)
        #: Rows of the last step in the buffer; the rest is zeros.
        self._num_filled_rows = 0

    @property
    def nbytes(self) -> int:
        """Bytes of all graphs."""
        return self._plan.nbytes

    def replay_step(self, step: LocatedRows) -> Tensor | None:
        """Run a step as a graph; ``None`` if it must run eagerly."""
        bucket = self._plan.find_bucket(step.sequences)
        if bucket is None:
            return None
        action = self._plan.choose_action(bucket)
        if action == "eager" or (action == "capture" and not self._capture_bucket(bucket, step)):
            return None
        return self._replay_graph(self._graphs[bucket], step)

    def capture_next(self) -> bool:
        """Capture one useful graph; return whether one was tried."""
        bucket = self._plan.next_bucket()
        if bucket is None:
            return False
        self._capture_bucket(bucket, self._make_dummy_step(bucket))
        return True

    def capture_shape(self, rows: int, positions: int) -> bool:
        """Capture the graph of a shape; return whether it is faster than eager execution."""
        if rows > self._plan.max_rows:
            return False
        bucket = self._plan.make_bucket(rows, positions)
        return bucket in self._graphs or self._capture_bucket(bucket, self._make_dummy_step(bucket))

    def check_speedup(self) -> bool:
        """Capture a graph of one row; disable graphs if it is not faster."""
        if self.capture_shape(1, 1):
            return True
        self._disable_graphs()
        return False

    def _make_dummy_step(self, bucket: GraphBucket) -> LocatedRows:
        """A step of a bucket that touches the padding block only.

        Rows that write to the same slot are equal, so their order doesn't matter.
        """
        size = self._pool.block_size
        offsets = [size - 1 - row % size for row in range(bucket.rows)]
        blocks = self._plan.typical_blocks(bucket)
        before, table = (blocks - 1) * size, (self._spare,) * blocks
        sequences = [SequenceRows(before + offset, 1, table) for offset in offsets]
        hidden = self._rows.shape[1]
        noise = torch.randn(size, hidden, generator=torch.Generator().manual_seed(0))
        return LocatedRows(
            noise[offsets].to(self._device, self._rows.dtype),
            array("q", (before + offset for offset in offsets)),
            array("q", (self._spare * size + offset for offset in offsets)),
            sequences,
        )

    def _replay_graph(self, graph: _CapturedGraph, step: LocatedRows) -> Tensor:
        self._load_step(graph, step)
        graph.replay()
        return graph.output[: len(step.rows)].clone()

    def _capture_bucket(self, bucket: GraphBucket, step: LocatedRows) -> bool:
        """Capture and test the graph of a bucket; return whether it is used."""
        try:
            graph = self._prepare_graph(bucket)
            if graph is None:
                self._plan.record_capture(bucket, 0, False)
                return False
            self._load_step(graph, step)
            replay = self._capturer.capture_work(graph.replay, self._plan.remaining_bytes)
            if replay is None:
                log.info("%d rows, %d blocks: the graph is too large", bucket.rows, bucket.blocks)
                self._plan.record_capture(bucket, 0, False)
                return False
            graph = replace(graph, replay=replay)
            plain: list[Tensor] = []
            given: list[Tensor] = []
            eager = self._capturer.time_work(lambda: plain.append(self._layers.run_layers(step)))
            replayed = self._capturer.time_work(
                lambda: given.append(self._replay_graph(graph, step))
            )
            error = _relative_error(given[-1].float(), plain[-1].float(), step.rows)
        except Exception:
            log.exception("CUDA graphs disabled: a capture failed")
            self._disable_graphs()
            return False
        # NaN fails, too.
        if not error <= TOLERANCE:
            log.warning("CUDA graphs are off by %g on this device and are disabled", error)
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
        """Prepare static buffers; ``replay`` is still the eager work. ``None`` if angles need more
        than tables.

        Masks are derived inside the graph, where a kernel costs no launch.
        """
        layers, rows = self._layers, bucket.rows
        found = [rope.grow_table(bucket.blocks * self._pool.block_size) for rope in layers.ropes]
        tables = tuple(table for table in found if table is not None)
        if len(tables) < len(found):
            return None
        given, output = self._rows[:rows], self._output[:rows]
        begin = _TABLE_ALIGNMENT * -(-8 * rows * (1 + len(tables)) // _TABLE_ALIGNMENT)

        def allocate(count: int) -> Tensor:
            end = begin + 4 * count
            return self._reserve_numbers(end)[begin:end].view(torch.int32)

        fixed = layers.attention.prepare_static(
            rows, bucket.blocks, self._pool.block_size, layers.dtype, allocate
        )
        numbers = self._reserve_numbers(begin)
        header = numbers[: 8 * rows * (1 + len(tables))].view(torch.int64)
        slots, *indices = torch.split(header, rows)

        def work() -> None:
            angles = tuple(
                table.angles.index_select(0, offsets)
                for table, offsets in zip(tables, indices, strict=True)
            )
            fixed.derive_masks()
            context = ForwardContext(self._pool, slots, angles, fixed)
            output.copy_(layers.decoder.run_layers(given, context))

        return _CapturedGraph(given, numbers, tables, output, fixed, work)

    def _reserve_numbers(self, nbytes: int) -> Tensor:
        """The buffer of numbers; a larger one if it is too small. Only one graph runs at a time."""
        if len(self._numbers) < nbytes:
            # Doubled, so that all buffers together are at most twice the largest.
            size = 1 << (nbytes - 1).bit_length()
            self._numbers = torch.zeros(size, dtype=torch.uint8, device=self._device)
        return self._numbers

    def _load_step(self, graph: _CapturedGraph, step: LocatedRows) -> None:
        """Copy a step into the buffers; padding rows are zeros on the padding block."""
        count, size, sequences = len(step.rows), len(graph.rows), split_rows(step.sequences)
        self._rows[:count].copy_(step.rows)
        if count < self._num_filled_rows:
            self._rows[count : self._num_filled_rows].zero_()
        self._num_filled_rows = count
        missing = size - count
        numbers = step.slots + array("q", (self._spare * self._pool.block_size,)) * missing
        for table in graph.angles:
            numbers.extend(table.row_indices(step.positions, sequences))
            numbers.extend((0,) * missing)
        numbers.extend((0,) * (len(numbers) % (_TABLE_ALIGNMENT // 8)))
        padding = [SequenceRows(0, 1, (self._spare,))] * missing
        tables = graph.attention.pack_tables([*sequences, *padding])
        self._staging.upload(graph.numbers, (numbers, tables))


def _relative_error(found: Tensor, plain: Tensor, before: Tensor) -> float:
    """Greatest difference to eager rows, relative to the layers' largest change.

    NaN if only the graph's rows have NaN; rows that are NaN in both are ignored.
    """
    usable = plain.isfinite().all(dim=-1)
    if not bool(usable.any()):
        return 0.0
    change = (plain - before.float())[usable].abs().max()
    return float((found - plain)[usable].abs().max() / change.clamp_min(_MIN_CHANGE))
