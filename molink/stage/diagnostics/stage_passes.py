"""Runs a stage's forward passes for timing, on dummy rows."""

import random
from collections.abc import Sequence

import torch

from molink.stage.batch import MtpInput, SequenceRows, StageInput
from molink.stage.diagnostics.timing import (
    DECODE_ROWS,
    DEEP_CONTEXT,
    DEEP_ROWS,
    PREFILL_ROWS,
    SHORT_CONTEXT,
)
from molink.stage.out_of_memory import empty_device_cache, is_out_of_memory
from molink.stage.sampling.greedy import find_likeliest
from molink.stage.sampling.logits_processors import SampleRow
from molink.stage.sampling.sampler import sample_tokens
from molink.stage.stage import Stage
from molink.stage.torch_dtypes import TORCH_DTYPES
from molink.wire.messages.data_plane import SamplingParams

_MAX_ROWS = max(*PREFILL_ROWS, *DECODE_ROWS)
#: Stride that spreads token ids over the vocabulary, since equal tokens would use the same experts.
_TOKEN_STRIDE = 7919
#: Maximum size of the KV pool.
_MAX_POOL_BYTES = 1 << 30
_GREEDY = SamplingParams(temperature=0.0)


class StagePasses:
    """Runs passes on a loaded stage as a worker would; the last stage samples greedily.

    Within ``with`` the stage has a KV pool of at most ``kv_bytes``, or of ``positions`` positions
    at any size. Requests have scattered blocks, as after some time of serving; if the pool is
    small, they share blocks and states.
    """

    def __init__(self, stage: Stage, kv_bytes: int, block_size: int, positions: int = 0) -> None:
        self._stage = stage
        self._block_size = block_size
        each = -(-(SHORT_CONTEXT + 1) // block_size)
        wanted = max(DEEP_CONTEXT // block_size, max(DECODE_ROWS) * each)
        room = stage.count_blocks(min(kv_bytes, _MAX_POOL_BYTES), block_size)
        self._blocks = list(range(-(-positions // block_size) or max(1, min(wanted, room))))
        random.Random(0).shuffle(self._blocks)
        config = stage.config
        self._tokens = torch.arange(_MAX_ROWS) * _TOKEN_STRIDE % config.vocab_size
        generator = torch.Generator().manual_seed(0)
        rows = int(stage.has_mtp) if stage.is_first else _MAX_ROWS
        shape = (rows, config.hidden_size)
        hidden = torch.randn(shape, generator=generator)
        self._hidden = hidden.to(TORCH_DTYPES[stage.wire_dtype])

    def __enter__(self) -> "StagePasses":
        self._stage.allocate_kv_pool(len(self._blocks), self._block_size)
        return self

    def __exit__(self, *_: object) -> None:
        self._stage.free_kv_pool()

    @property
    def max_context(self) -> int:
        """Maximum context of the model."""
        return self._stage.config.max_model_len

    def run_decode(self, rows: int, context: int) -> None:
        """Run one decode row each of ``rows`` requests."""
        sequences = [
            SequenceRows(
                context,
                1,
                self._block_table(context + 1, row),
                state_slot=row % max(1, self._stage.num_states),
            )
            for row in range(rows)
        ]
        self._run_pass(sequences, range(rows))

    def run_prefill(self, rows: int, before: int) -> None:
        """Run a chunk of a prompt; only its last row is sampled."""
        self._run_pass(
            [SequenceRows(before, rows, self._block_table(before + rows, 0))], (rows - 1,)
        )

    def run_mtp(self) -> None:
        """Predict one more token of one request."""
        rows = SequenceRows(0, 1, self._block_table(1, 0))
        normed = self._hidden[:1].to(self._stage.device)
        self._run_mtp(normed, [rows], (0,))
        self._synchronize()

    def capture_graphs(self) -> None:
        """Capture the CUDA graphs of a profile's passes; a capture takes far longer than a pass."""
        context = min(SHORT_CONTEXT, self.max_context - 1)
        deep = min(DEEP_CONTEXT, self.max_context - DEEP_ROWS)
        shapes = [(rows, context) for rows in DECODE_ROWS]
        # It is compared with the first point, so both must use a graph.
        shapes.insert(1, (1, max(deep, context)))
        for rows, before in shapes:
            self._stage.capture_graph(rows, before + 1)

    def _block_table(self, tokens: int, request: int) -> Sequence[int]:
        """Return a request's block table."""
        count = -(-tokens // self._block_size)
        places = range(request * count, (request + 1) * count)
        return [self._blocks[place % len(self._blocks)] for place in places]

    def _synchronize(self) -> None:
        if self._stage.device.type == "cuda":
            torch.cuda.synchronize(self._stage.device)

    def _run_mtp(
        self, normed: torch.Tensor, sequences: Sequence[SequenceRows], wanted: Sequence[int]
    ) -> None:
        tokens = self._tokens[: len(normed)].tolist()
        made = self._stage.predict_tokens(MtpInput(normed, tokens, tuple(sequences), tuple(wanted)))
        find_likeliest(made.logits)

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
            output = stage.compute_step(batch)
            if stage.is_last:
                sampled = [SampleRow(_GREEDY, position) for position in wanted]
                sample_tokens(output.rows, sampled, output.greedy, stage.draw_rows)
            else:
                output.rows.cpu()  # as for sending
            if output.normed is not None:
                self._run_mtp(output.normed, sequences, wanted)
            self._synchronize()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            empty_device_cache()
            raise MemoryError(str(error)) from error
