"""Runs decode steps as CUDA graphs.

With few rows a GPU computes a layer faster than Python launches its kernels. A graph receives a
step's numbers and rows in one copy. At the first stage it embeds tokens. At the last stage it
returns logits and the likeliest tokens, unless it has many rows: their logits would take much
memory, and a GPU that computes many rows does not wait for the host.
"""

import logging
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from molink.facts.footprint import GRAPH_LOGIT_ROWS
from molink.stage.attention.base import StaticAttention
from molink.stage.batch import SequenceRows, StageInput, StageOutput
from molink.stage.decoder.mixer import ForwardContext
from molink.stage.decoder.rotary import AngleTable
from molink.stage.device_copy import StagingBuffer, upload_integers
from molink.stage.graphs.buckets import GraphBucket, GraphPlan, row_bucket, split_rows
from molink.stage.graphs.capture import GraphCapturer, GraphWork
from molink.stage.layer_pass import LayerPass, LocatedRows
from molink.stage.sampling.greedy import find_greedy
from molink.stage.torch_dtypes import residual_dtype

log = logging.getLogger(__name__)

#: Tolerance of a graph's rows, relative to the change by the layers: padding reorders 16-bit sums.
TOLERANCE = 0.05
_MIN_CHANGE = 1e-6
#: Alignment of the input's parts in bytes, for Triton's kernels.
_ALIGNMENT = 16


@dataclass(frozen=True, slots=True)
class _CapturedGraph:
    """A captured bucket of ``rows`` rows with its static buffers.

    ``numbers`` (uint8) has three parts, each aligned to 16 bytes: the rows of the previous stage,
    if any; slots, tokens (at the first stage) and indices into each of ``angles``, all int64
    ``[rows]``; and the tables of ``attention``. ``output`` has logits if ``greedy`` is set,
    otherwise rows.
    """

    rows: int
    numbers: Tensor
    angles: tuple[AngleTable, ...]
    output: Tensor
    greedy: Tensor | None
    attention: StaticAttention
    replay: GraphWork


class DecodeGraphs:
    """Runs decode steps on a KV pool with a padding block.

    A graph is used only if a test at its capture shows that it is faster than eager execution and
    gives the same rows.
    """

    def __init__(self, layers: LayerPass, plan: GraphPlan, captures: GraphCapturer) -> None:
        assert layers.pool.padding_block is not None, "graphs need a pool with a padding block"
        self._layers, self._pool, self._device = layers, layers.pool, layers.device
        self._padding_block = layers.pool.padding_block
        self._plan, self._capturer = plan, captures
        self._graphs: dict[GraphBucket, _CapturedGraph] = {}
        #: Graphs that are not faster. They stay alive, since destroying one (torch 2.13) frees
        #: cuBLAS workspaces that other graphs of its stream use.
        self._unused_replays: list[GraphWork] = []
        config, rows, device = layers.decoder.config, row_bucket(plan.max_rows), self._device
        #: Output buffers shared by all graphs; residual rows at the last stage.
        self._output = torch.zeros(
            rows,
            config.hidden_size,
            dtype=residual_dtype(layers.dtype) if layers.is_last else layers.wire_dtype,
            device=device,
        )
        # With an MTP layer, rows must be kept for the prediction.
        has_logits = layers.is_last and not layers.has_mtp
        rows = min(rows, GRAPH_LOGIT_ROWS) if has_logits else 0
        self._logits = torch.zeros(rows, config.vocab_size, device=device)
        self._greedy = torch.zeros(rows, 2, dtype=torch.int64, device=device)
        #: Input buffer, shared by graphs whose input fits.
        self._numbers = torch.zeros(0, dtype=torch.uint8, device=device)
        self._staging = StagingBuffer(device)

    @property
    def nbytes(self) -> int:
        """Bytes of all graphs."""
        return self._plan.nbytes

    def replay_step(self, step: LocatedRows) -> StageOutput | None:
        """Run a step as a graph; ``None`` if it must run eagerly."""
        bucket = self._plan.find_bucket(step.batch.sequences)
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
        """Make a step of a bucket that touches only the padding block.

        Rows that write to the same slot are equal, so their order doesn't matter.
        """
        size = self._pool.block_size
        offsets = [size - 1 - row % size for row in range(bucket.rows)]
        blocks = self._plan.typical_blocks(bucket)
        before, table = (blocks - 1) * size, (self._padding_block,) * blocks
        sequences = tuple(SequenceRows(before + offset, 1, table) for offset in offsets)
        layers, config = self._layers, self._layers.decoder.config
        noise = torch.randn(size, config.hidden_size, generator=torch.Generator().manual_seed(0))
        ids = torch.arange(size) % config.vocab_size
        batch = StageInput(
            ids[offsets] if layers.is_first else None,
            None if layers.is_first else noise[offsets].to(layers.wire_dtype),
            sequences,
        )
        return LocatedRows(
            batch,
            array("q", (before + offset for offset in offsets)),
            array("q", (self._padding_block * size + offset for offset in offsets)),
        )

    def _replay_graph(self, graph: _CapturedGraph, step: LocatedRows) -> StageOutput:
        self._load_step(graph, step)
        graph.replay()
        rows, wanted = graph.output[: len(step)], step.batch.logit_rows
        if graph.greedy is None:
            return self._layers.finish_rows(rows, wanted)
        greedy = graph.greedy[: len(step)]
        if wanted == tuple(range(len(step))):
            return StageOutput(rows, greedy)
        chosen = upload_integers(wanted, self._device)
        return StageOutput(rows.index_select(0, chosen), greedy.index_select(0, chosen))

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
            if self._layers.is_last:  # all rows are compared
                step = replace(step, batch=replace(step.batch, logit_rows=tuple(range(len(step)))))
            plain: list[Tensor] = []
            given: list[Tensor] = []
            eager = self._capturer.time_work(lambda: plain.append(self._layers.run_step(step).rows))
            replayed = self._capturer.time_work(
                lambda: given.append(self._replay_graph(graph, step).rows)
            )
            error = self._measure_error(given[-1], plain[-1], step)
        except Exception:
            log.exception("CUDA graphs disabled: a capture failed")
            self._disable_graphs()
            return False
        # NaN also fails.
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

    def _measure_error(self, found: Tensor, plain: Tensor, step: LocatedRows) -> float:
        """Measure the error of rows relative to the layers' change, or of logits to themselves."""
        is_last = self._layers.is_last
        before = torch.zeros_like(plain) if is_last else self._layers.embed_batch(step.batch)
        return _relative_error(found.float(), plain.float(), before)

    def _disable_graphs(self) -> None:
        self._plan.disable_graphs()
        self._graphs.clear()
        self._unused_replays.clear()

    def _prepare_graph(self, bucket: GraphBucket) -> _CapturedGraph | None:
        """Prepare static buffers; ``replay`` is still the eager work.

        ``None`` if angles don't come from tables alone. Masks are derived inside the graph, where a
        kernel costs no launch.
        """
        layers, rows, hidden = self._layers, bucket.rows, self._output.shape[1]
        found = [rope.grow_table(bucket.blocks * self._pool.block_size) for rope in layers.ropes]
        tables = tuple(table for table in found if table is not None)
        if len(tables) < len(found):
            return None
        rows_end = 0 if layers.is_first else rows * hidden * layers.wire_dtype.itemsize
        first = _align(rows_end)
        end = first + 8 * rows * (1 + layers.is_first + len(tables))
        begin = _align(end)

        def allocate(count: int) -> Tensor:
            table_end = begin + 4 * count
            return self._reserve_numbers(table_end)[begin:table_end].view(torch.int32)

        fixed = layers.attention.prepare_static(
            rows, bucket.blocks, self._pool.block_size, layers.dtype, allocate
        )
        numbers = self._reserve_numbers(begin)
        given = numbers[:rows_end].view(layers.wire_dtype).view(-1, hidden)
        slots, *others = torch.split(numbers[first:end].view(torch.int64), rows)
        tokens = others.pop(0) if layers.is_first else None
        output, greedy = self._output[:rows], None
        if layers.is_last and rows <= len(self._logits):
            output, greedy = self._logits[:rows], self._greedy[:rows]

        def work() -> None:
            angles = tuple(
                table.angles.index_select(0, offsets)
                for table, offsets in zip(tables, others, strict=True)
            )
            fixed.derive_masks()
            context = ForwardContext(self._pool, slots, angles, fixed)
            begun = layers.widen_rows(given) if tokens is None else layers.embed_tokens(tokens)
            result = layers.decoder.run_layers(begun, context)
            if greedy is not None:
                result = layers.finish_rows(result, range(rows)).rows
                greedy.copy_(find_greedy(result, result))
            output.copy_(result)

        return _CapturedGraph(rows, numbers, tables, output, greedy, fixed, work)

    def _reserve_numbers(self, nbytes: int) -> Tensor:
        """Return the buffer of numbers, replaced by a larger one if too small.

        Graphs can share it, since only one runs at a time.
        """
        if len(self._numbers) < nbytes:
            # Sizes double, so that all buffers together are at most twice the largest.
            size = 1 << (nbytes - 1).bit_length()
            self._numbers = torch.zeros(size, dtype=torch.uint8, device=self._device)
        return self._numbers

    def _load_step(self, graph: _CapturedGraph, step: LocatedRows) -> None:
        """Copy a step into the buffers; padding rows are zeros on the padding block."""
        batch, missing = step.batch, graph.rows - len(step)
        sequences = split_rows(batch.sequences)
        parts: list[array[int] | memoryview] = []
        zeros = (0,) * missing
        numbers = step.slots + array("q", (self._padding_block * self._pool.block_size,)) * missing
        if batch.tokens is not None and self._layers.is_first:
            numbers.extend(batch.tokens.tolist())
            numbers.extend(zeros)
        elif batch.hidden is not None:
            parts += _pad_hidden(batch.hidden, self._layers.wire_dtype, missing)
        for table in graph.angles:
            numbers.extend(table.row_indices(step.positions, sequences))
            numbers.extend(zeros)
        numbers.extend((0,) * (len(numbers) % (_ALIGNMENT // 8)))
        padding = [SequenceRows(0, 1, (self._padding_block,))] * missing
        tables = graph.attention.pack_tables([*sequences, *padding])
        self._staging.upload(graph.numbers, (*parts, numbers, tables))


def _align(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def _pad_hidden(hidden: Tensor, dtype: torch.dtype, missing: int) -> Iterator[memoryview]:
    """Return the bytes of rows ``[T, hidden]`` in ``dtype``, then of ``missing`` rows of zeros."""
    rows = hidden.to("cpu", dtype).contiguous().view(torch.uint8)
    yield rows.numpy().data
    nbytes = missing * rows.shape[1]
    yield memoryview(bytes(nbytes + _align(rows.nbytes + nbytes) - rows.nbytes - nbytes))


def _relative_error(found: Tensor, plain: Tensor, before: Tensor) -> float:
    """Return the largest difference from eager rows, relative to the layers' largest change.

    NaN if only the graph's rows have NaN; rows that are NaN in both are ignored.
    """
    usable = plain.isfinite().all(dim=-1)
    if not bool(usable.any()):
        return 0.0
    change = (plain - before.float())[usable].abs().max()
    return float((found - plain)[usable].abs().max() / change.clamp_min(_MIN_CHANGE))
