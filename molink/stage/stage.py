"""A stage: a contiguous range of a model's layers on one device, with its KV pool."""

import time
from array import array
from collections.abc import Sequence
from statistics import median

import torch
from torch import Tensor

from molink.errors import InvariantError, UsageError
from molink.model.config import ModelConfig, WeightDType
from molink.model.folder import ModelFolder
from molink.stage.attention.base import (
    AttentionShape,
    BackendName,
    create_attention,
)
from molink.stage.base import SequenceRows, StageInput
from molink.stage.block import ForwardContext
from molink.stage.decoder import Decoder, load_decoder
from molink.stage.dtypes import TORCH_DTYPES, DTypeChoice, choose_dtype, choose_travel
from molink.stage.pool import KVPool, block_bytes
from molink.stage.rope import Rope
from molink.stage.weights import WeightReader

#: One-token decode steps that are measured, the tokens before them, and the seconds spent at most.
_MEASURED_STEPS = 20
_MEASURED_CONTEXT = 128
_MEASURED_SECONDS = 3.0


class Stage:
    """Computes the rows of micro-batches. Not thread-safe: one caller at a time.

    ``dtype`` is what it computes in, ``travel_dtype`` what rows should travel in.
    """

    def __init__(
        self,
        config: ModelConfig,
        layers: tuple[int, int],
        decoder: Decoder,
        device: torch.device,
        dtype: WeightDType,
        travel_dtype: WeightDType,
        backend: BackendName = "auto",
    ) -> None:
        self.config, self.layers, self.device = config, layers, device
        self.dtype, self.travel_dtype = dtype, travel_dtype
        self._decoder = decoder
        self._dtype = TORCH_DTYPES[dtype]
        self._travel = TORCH_DTYPES[travel_dtype]
        self._attention = create_attention(backend, AttentionShape.of(config, layers))
        with torch.inference_mode():
            self._rope = Rope(config.rope, config.head_dim, self._dtype, device)
        self._pool: KVPool | None = None

    @classmethod
    @torch.inference_mode()
    def load(
        cls,
        folder: ModelFolder,
        layers: tuple[int, int],
        device: str = "cpu",
        dtype: DTypeChoice = "auto",
    ) -> "Stage":
        """Load layers ``first:last`` of a checked folder onto ``cpu`` or ``cuda:N``.

        Raises:
            UsageError: there is no such device.
            BrokenModel: a tensor can't be read.
        """
        place, config = _device(device), folder.config
        computed = choose_dtype(dtype, config.dtype, place)
        with WeightReader(folder, TORCH_DTYPES[computed], place) as reader:
            decoder = load_decoder(reader, config, layers)
        travel = choose_travel(dtype, config.dtype)
        return cls(config, layers, decoder, place, computed, travel)

    @property
    def is_first(self) -> bool:
        """Whether it takes tokens."""
        return self.layers[0] == 0

    @property
    def is_last(self) -> bool:
        """Whether it returns logits."""
        return self.layers[1] == self.config.layers

    @property
    def weight_bytes(self) -> int:
        """Bytes of all its weights."""
        return self._decoder.nbytes

    def block_bytes(self, block_size: int) -> int:
        """Bytes of one KV block over this stage's layers."""
        return block_bytes(self.config, len(self._decoder.blocks), block_size, self._dtype)

    def allocate(self, blocks: int, block_size: int) -> None:
        """Make a fresh pool; an earlier one is dropped first."""
        self._pool = None
        self._pool = self._make_pool(blocks, block_size)

    @torch.inference_mode()
    def forward(self, batch: StageInput) -> Tensor:
        """Compute a micro-batch; its keys and values stay in the pool.

        Returns:
            Rows ``[T, hidden_size]`` in ``travel_dtype``, or at the last stage float32 logits
            ``[len(logit_rows), vocab_size]``. It is an inference tensor: change it in place only
            under ``torch.inference_mode()``.

        Raises:
            InvariantError: the batch doesn't fit its rows, blocks or the pool.
        """
        if self._pool is None:
            raise InvariantError("a stage was asked to compute before it had a KV pool")
        return self._run(batch, self._pool)

    def measure_decode(self) -> float:
        """Seconds of a one-token decode step (median), on a small pool of its own."""
        block_size = 16
        blocks = range(_MEASURED_CONTEXT // block_size + 1)
        pool = self._make_pool(len(blocks), block_size)
        row = SequenceRows(_MEASURED_CONTEXT, 1, blocks)
        tokens = torch.zeros(1, dtype=torch.int64) if self.is_first else None
        hidden = None if self.is_first else torch.zeros(1, self.config.hidden_size)
        batch = StageInput(tokens, hidden, (row,), (0,) if self.is_last else ())
        taken: list[float] = []
        deadline = time.perf_counter() + _MEASURED_SECONDS
        while len(taken) <= _MEASURED_STEPS and (not taken or time.perf_counter() < deadline):
            begin = time.perf_counter()
            with torch.inference_mode():
                # Copied to the CPU as its sender would: that waits for the device.
                self._run(batch, pool).cpu()
            taken.append(time.perf_counter() - begin)
        return median(taken[1:] or taken)

    @torch.inference_mode()
    def _make_pool(self, blocks: int, block_size: int) -> KVPool:
        layers = len(self._decoder.blocks)
        return KVPool(self.config, layers, blocks, block_size, self._dtype, self.device)

    def _run(self, batch: StageInput, pool: KVPool) -> Tensor:
        rows = self._enter(batch)
        context = self._context(batch.sequences, pool, len(rows))
        rows = self._decoder.run(rows, context)
        if self.is_last:
            return self._decoder.logits(rows, batch.logit_rows)
        return rows.to(self._travel)

    def _enter(self, batch: StageInput) -> Tensor:
        if self.is_first:
            if batch.tokens is None:
                raise InvariantError("the first stage was given no tokens")
            # On CUDA an id beyond the table would end every later computation of the process.
            least, greatest = batch.tokens.aminmax()
            if least < 0 or greatest >= self.config.vocab_size:
                raise InvariantError(f"a token id is not in 0:{self.config.vocab_size}")
            return self._decoder.embed(batch.tokens.to(self.device))
        if batch.hidden is None:
            raise InvariantError(f"stage {self.layers} was given no hidden rows")
        return batch.hidden.to(self.device, self._dtype)

    def _context(
        self, sequences: Sequence[SequenceRows], pool: KVPool, rows: int
    ) -> ForwardContext:
        positions, slots, fresh = _locate(sequences, pool)
        if len(positions) != rows:
            raise InvariantError(f"a batch has {rows} rows, its sequences {len(positions)}")
        pool.clear(fresh)
        both = torch.frombuffer(positions + slots, dtype=torch.int64).to(self.device)
        lengths = [sequence.start + sequence.count for sequence in sequences]
        counts = [sequence.count for sequence in sequences]
        return ForwardContext(
            pool=pool,
            slots=both[rows:],
            angles=self._rope.angles(both[:rows], lengths, counts),
            attention=self._attention.prepare(sequences, pool.block_size, self._dtype, self.device),
        )


def _locate(
    sequences: Sequence[SequenceRows], pool: KVPool
) -> "tuple[array[int], array[int], list[int]]":
    """Position and slot of each row, and the blocks that are begun here but not filled."""
    size = pool.block_size
    positions, slots = array("q"), array("q")
    fresh: list[int] = []
    for sequence in sequences:
        start, end, blocks = sequence.start, sequence.start + sequence.count, sequence.blocks
        if start < 0 or end <= start or end > len(blocks) * size:
            raise InvariantError(f"rows {start}:{end} don't fit {len(blocks)} blocks of {size}")
        last = (end - 1) // size
        for index in range(start // size, last + 1):
            block = blocks[index]
            if not 0 <= block < pool.blocks:
                raise InvariantError(f"block {block} is not in a pool of {pool.blocks}")
            first, stop = max(start, index * size), min(end, (index + 1) * size)
            positions.extend(range(first, stop))
            slots.extend(range((block - index) * size + first, (block - index) * size + stop))
        if start <= last * size and end % size:
            fresh.append(blocks[last])
    return positions, slots, fresh


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UsageError(f"{name!r} is no device; use cpu or cuda:N") from error
    if device.type not in ("cpu", "cuda"):
        raise UsageError(f"devices of type {device.type!r} are not supported; use cpu or cuda:N")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UsageError(f"there is no device {name}: this torch sees no such GPU")
    return device
