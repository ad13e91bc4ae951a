"""Forward passes of a stage for the sake of their time: the rows mean nothing."""

from collections.abc import Sequence

import torch

from molink.stage.batch import SequenceRows, StageInput
from molink.stage.diagnostics.timing import (
    DECODE_ROWS,
    DEEP_CONTEXT,
    DEEP_ROWS,
    PREFILL_ROWS,
    SHORT_CONTEXT,
)
from molink.stage.graphs.buckets import MAX_GRAPH_ROWS
from molink.stage.out_of_memory import empty_device_cache, is_out_of_memory
from molink.stage.stage import Stage
from molink.stage.torch_dtypes import TORCH_DTYPES

_MAX_ROWS = max(*PREFILL_ROWS, *DECODE_ROWS)
#: Spreads token ids over the vocabulary: equal ones would all meet the same experts.
_TOKEN_STRIDE = 7919
#: Largest pool that is made for it.
_MAX_POOL_BYTES = 1 << 30


class StagePasses:
    """Runs passes on a loaded stage as a worker would; implements :class:`timing.TimedPasses`.

    Between ``with`` and its end the stage has a KV pool of at most ``kv_bytes``. Where these are
    few, requests share blocks: what they hold is of no interest.
    """

    def __init__(self, stage: Stage, kv_bytes: int, block_size: int) -> None:
        self._stage = stage
        self._block_size = block_size
        each = -(-(SHORT_CONTEXT + 1) // block_size)
        wanted = max(DEEP_CONTEXT // block_size, max(DECODE_ROWS) * each)
        room = min(kv_bytes, _MAX_POOL_BYTES) // stage.block_bytes(block_size)
        self._blocks = max(1, min(wanted, room))
        config = stage.config
        self._tokens = torch.arange(_MAX_ROWS) * _TOKEN_STRIDE % config.vocab_size
        generator = torch.Generator().manual_seed(0)
        shape = (0 if stage.is_first else _MAX_ROWS, config.hidden_size)
        hidden = torch.randn(shape, generator=generator)
        self._hidden = hidden.to(TORCH_DTYPES[stage.wire_dtype])

    def __enter__(self) -> "StagePasses":
        self._stage.allocate_kv_pool(self._blocks, self._block_size)
        if self._stage.has_graphs:
            self._capture_graphs()
        return self

    def __exit__(self, *_: object) -> None:
        self._stage.free_kv_pool()

    @property
    def max_context(self) -> int:
        """Positions that the model has."""
        return self._stage.config.max_model_len

    def run_decode(self, rows: int, context: int) -> None:
        """One decode row each of ``rows`` requests."""
        sequences = [
            SequenceRows(context, 1, self._block_table(context + 1, row)) for row in range(rows)
        ]
        self._run_pass(sequences, range(rows))

    def run_prefill(self, rows: int, before: int) -> None:
        """A chunk of one prompt; as of most chunks, none of its rows is sampled but the last."""
        self._run_pass(
            [SequenceRows(before, rows, self._block_table(before + rows, 0))], (rows - 1,)
        )

    def _capture_graphs(self) -> None:
        """Make the CUDA graphs now: that takes far longer than the passes that would be timed."""
        context = min(SHORT_CONTEXT, self.max_context - 1)
        deep = min(DEEP_CONTEXT, self.max_context - DEEP_ROWS)
        shapes = [(rows, context) for rows in DECODE_ROWS if rows <= MAX_GRAPH_ROWS]
        # Compared with the first one: so both are run in the same way.
        shapes.insert(1, (1, max(deep, context)))
        for rows, before in shapes:
            self._stage.capture_graph(rows, before + 1)

    def _block_table(self, tokens: int, request: int) -> Sequence[int]:
        """A request's block table."""
        count = -(-tokens // self._block_size)
        return [(request * count + index) % self._blocks for index in range(count)]

    def _run_pass(self, sequences: Sequence[SequenceRows], wanted: Sequence[int]) -> None:
        stage = self._stage
        rows = sum(sequence.count for sequence in sequences)
        batch = StageInput(
            tokens=self._tokens[:rows] if stage.is_first else None,
            hidden=None if stage.is_first else self._hidden[:rows],
            sequences=tuple(sequences),
            logit_rows=tuple(wanted) if stage.is_last else (),
        )
        try:
            # Copied to the CPU as its sender would.
            stage.forward(batch).cpu()
            if stage.device.type == "cuda":
                torch.cuda.synchronize(stage.device)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            empty_device_cache()
            raise MemoryError(str(error)) from error
