"""A contiguous range of a model's layers on one device, with its KV pool."""

import logging
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack

import psutil
import torch
from torch import Tensor

from molink.checkpoint.config import ModelConfig
from molink.checkpoint.model_folder import ModelFolder
from molink.errors import InvariantError, UsageError
from molink.facts.drafts import MAX_DRAFTS
from molink.facts.dtypes import DTypeChoice, WeightDType
from molink.facts.footprint import (
    GRAPH_BYTES,
    GRAPH_LOGIT_ROWS,
    GRAPH_POOL_BYTES,
    LOGIT_BYTES,
    count_pool_blocks,
    count_state_slots,
)
from molink.facts.kernels import INTEGER_KERNELS
from molink.facts.model import KVCacheDType, LayerRange, Quantize
from molink.stage.attention.base import AttentionBackend, AttentionShape, BackendName
from molink.stage.attention.create import create_attention
from molink.stage.attention.gather import GatherAttention
from molink.stage.attention.mixed import MixedAttention
from molink.stage.attention.whole_images import WholeImageAttention
from molink.stage.batch import MtpInput, MtpOutput, StageInput, StageOutput
from molink.stage.decoder.block import HostExperts
from molink.stage.decoder.decoder import Decoder, HeldWeights, load_decoder
from molink.stage.decoder.weight_source import WeightSource
from molink.stage.graphs.buckets import GraphPlan
from molink.stage.graphs.capture import CudaGraphCapturer
from molink.stage.graphs.decode_graphs import DecodeGraphs
from molink.stage.host_kv_pool import HostKVPool
from molink.stage.kv_pool import KVPool, block_bytes
from molink.stage.layer_heads import LayerHeads
from molink.stage.layer_pass import LayerPass, LocatedRows, create_ropes
from molink.stage.mixed_kv_pool import AnyKVPool, MixedKVPool
from molink.stage.sampling.create import create_draws
from molink.stage.state_pool import StatePool, slot_bytes
from molink.stage.torch_dtypes import TORCH_DTYPES, choose_dtype, choose_wire_dtype

log = logging.getLogger(__name__)


class Stage:
    """Computes micro-batches on a range of layers. Not thread-safe.

    ``dtype`` is the compute type, ``wire_dtype`` the type of rows between stages,
    ``kv_cache_dtype`` the type of the KV cache. ``disabled_kernels`` are named as in
    :mod:`molink.facts.kernels`. Decode steps of up to ``max_decode_rows`` rows may become CUDA
    graphs.
    """

    def __init__(
        self,
        config: ModelConfig,
        layers: tuple[int, int],
        decoder: Decoder,
        device: torch.device,
        dtype: WeightDType,
        wire_dtype: WeightDType,
        backend: BackendName = "auto",
        disabled_kernels: Collection[str] = (),
        max_decode_rows: int = 64,
        kv_cache_dtype: KVCacheDType = "auto",
    ) -> None:
        self.config, self.layers, self.device = config, layers, device
        self.dtype, self.wire_dtype = dtype, wire_dtype
        self._decoder = decoder
        self._dtype = TORCH_DTYPES[dtype]
        self._wire_dtype = TORCH_DTYPES[wire_dtype]
        self._backend_name: BackendName = backend
        self.disabled_kernels = disabled_kernels
        self._max_decode_rows = max_decode_rows
        self.kv_cache_dtype: KVCacheDType = kv_cache_dtype
        #: Backends by block size, which they may restrict.
        self._attentions: dict[int, AttentionBackend] = {}
        with torch.inference_mode():
            self._ropes = create_ropes(config, self._dtype, device)
        self._heads = LayerHeads.from_config(config, layers)
        has_logits = decoder.norm is not None and config.has_output_head
        #: Draws tokens from the last stage's logits in one launch; ``None`` if torch must.
        self.draw_rows = create_draws(device, disabled_kernels) if has_logits else None
        self._pool: AnyKVPool | None = None
        self._layer_pass: LayerPass | None = None
        self._graphs: DecodeGraphs | None = None
        self._host_pool: HostKVPool | None = None

    @classmethod
    @torch.inference_mode()
    def load_layers(
        cls,
        folder: ModelFolder,
        layers: tuple[int, int],
        device: str = "cpu",
        dtype: DTypeChoice = "auto",
        quantize: Quantize = "none",
        held: HeldWeights | None = None,
        disabled_kernels: Collection[str] = (),
        on_layer: Callable[[int], None] = lambda _: None,
        max_decode_rows: int = 64,
        kv_cache_dtype: KVCacheDType = "auto",
        host_experts: int = 0,
        host_disabled_kernels: Collection[str] | None = None,
    ) -> "Stage":
        """Load layers ``first:last`` of a checked folder onto ``cpu`` or ``cuda:N``.

        Projections are quantized while they are read, unless the checkpoint is quantized. Weights
        in ``held`` are reused. ``on_layer`` is called with the number of loaded layers. With
        ``auto``, rows may be quantized to 8 bits for products with low-bit weights. In each layer
        with experts, ``host_experts`` routed experts stay in host memory and run on the CPU,
        without ``host_disabled_kernels`` (by default the device's).

        Raises:
            UsageError: no such device, ``quantize`` contradicts the checkpoint, or there are not as
                many experts.
            BrokenModel: a tensor can't be read, or has NaN or infinity.
            UnsupportedModel: a quantization is not implemented.
        """
        torch_device, config = find_device(device), folder.config
        computed = choose_dtype(dtype, config.dtype, torch_device)
        avoided = disabled_kernels if host_disabled_kernels is None else host_disabled_kernels
        if dtype != "auto":
            disabled_kernels = (*disabled_kernels, *INTEGER_KERNELS)
            avoided = (*avoided, *INTEGER_KERNELS)
        source = WeightSource(
            folder, torch_device, TORCH_DTYPES[computed], quantize, disabled_kernels
        )
        with ExitStack() as opened:
            weights, host = opened.enter_context(source.open_weights()), None
            if host_experts:
                kind = _choose_host_dtype(computed, config, torch_device)
                host = _open_host_experts(opened, source, host_experts, TORCH_DTYPES[kind], avoided)
            reader, operators = weights.reader, weights.operators
            decoder = load_decoder(
                reader, config, operators, layers, held or HeldWeights(), on_layer, host
            )
        wire = choose_wire_dtype(dtype, config.dtype)
        return cls(
            config,
            layers,
            decoder,
            torch_device,
            computed,
            wire,
            disabled_kernels=disabled_kernels,
            max_decode_rows=max_decode_rows,
            kv_cache_dtype=kv_cache_dtype,
        )

    @property
    def is_first(self) -> bool:
        """Whether the stage embeds tokens."""
        return self.layers[0] == 0

    @property
    def is_last(self) -> bool:
        """Whether the stage returns logits, or an embedding model's normed rows."""
        return self.layers[1] == self.config.layers

    @property
    def block_size(self) -> int:
        """Positions per block of the KV pool; 0 without a pool."""
        return 0 if self._pool is None else self._pool.block_size

    @property
    def has_mtp(self) -> bool:
        """Whether :meth:`predict_tokens` can be called."""
        return self._decoder.mtp is not None

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights on the device."""
        return self._decoder.nbytes

    @property
    def host_expert_bytes(self) -> int:
        """Bytes of experts in host memory."""
        return self._decoder.host_nbytes

    @property
    def host_experts(self) -> int:
        """Number of experts per layer in host memory."""
        return max((one.host.count for one in self._decoder.split_experts), default=0)

    @property
    def step_bytes(self) -> int:
        """Bytes of weights read per step."""
        return self._decoder.step_bytes

    @property
    def layer_bytes(self) -> int:
        """Bytes of the first layer."""
        return self._decoder.blocks[0].nbytes

    @property
    def has_graphs(self) -> bool:
        """Whether frequent decode steps become CUDA graphs."""
        return self._graphs is not None

    @property
    def graph_bytes(self) -> int:
        """Bytes of all captured CUDA graphs."""
        return 0 if self._graphs is None else self._graphs.nbytes

    def reads_pages(self, block_size: int) -> bool:
        """Whether attention over blocks of this size reads KV in place."""
        return self._attention_backend(block_size).reads_pages

    def block_bytes(self, block_size: int) -> int:
        """Return the bytes of one KV block over this stage's layers."""
        given = block_size, self._dtype, self.kv_cache_dtype
        return sum(
            block_bytes(shape, self._heads.count_layers(kind), *given)
            for kind, shape in enumerate(self._attention_shapes)
        )

    @property
    def state_bytes(self) -> int:
        """Bytes of a request's state over this stage's recurrent layers."""
        return slot_bytes(self.config.recurrent, self._num_recurrent)

    @property
    def num_states(self) -> int:
        """Number of states in the pool; 0 without recurrent layers."""
        states = None if self._layer_pass is None else self._layer_pass.states
        return 0 if states is None else states.slots

    def count_blocks(self, nbytes: int, block_size: int) -> int:
        """Count the KV blocks that fit ``nbytes`` together with the matching number of states."""
        return count_pool_blocks(nbytes, self.block_bytes(block_size), block_size, self.state_bytes)

    def pool_bytes(self, blocks: int, block_size: int) -> int:
        """Return the bytes of ``blocks`` KV blocks and their states."""
        slots = count_state_slots(blocks * block_size)
        return blocks * self.block_bytes(block_size) + slots * self.state_bytes

    def allocate_kv_pool(self, blocks: int, block_size: int, state_slots: int = 0) -> None:
        """Free the old KV pool and states, and allocate new ones with ``state_slots`` states.

        By default the number of states follows from the number of blocks.
        """
        self.free_kv_pool()
        self._set_device()
        self._pool = self._create_pool(blocks, block_size)
        states = self._create_states(state_slots or count_state_slots(blocks * block_size))
        # Both run trials, which would be too slow during serving.
        attention = self._attention_backend(block_size)
        self._layer_pass = LayerPass(
            self._decoder,
            self._pool,
            attention,
            self._ropes,
            self._dtype,
            self._wire_dtype,
            self.device,
            states,
        )
        self._graphs = self._create_graphs(self._layer_pass)

    @property
    def interleaves(self) -> bool:
        """Whether :meth:`compute_step` can run another batch between its layers.

        On a GPU all layers of a batch are launched at once.
        """
        return self.device.type == "cpu"

    def forward(self, batch: StageInput) -> Tensor:
        """Return only the rows of :meth:`compute_step`."""
        return self.compute_step(batch).rows

    @torch.inference_mode()
    def compute_step(
        self, batch: StageInput, between_layers: Callable[[], None] | None = None
    ) -> StageOutput:
        """Compute a micro-batch and store its KV.

        If the stage :attr:`interleaves`, ``between_layers`` is called after each layer but the
        last. It may call :meth:`compute_step` for rows that don't depend on this batch.

        Returns:
            Rows ``[T, hidden_size]`` in ``wire_dtype``, or float32 logits ``[len(logit_rows),
            vocab_size]`` on the last stage (normed rows for an embedding model). The next step may
            overwrite them. They are inference tensors: modify them only under
            ``torch.inference_mode()``.

        Raises:
            InvariantError: the batch doesn't fit its rows, blocks or the pool.
        """
        if self._layer_pass is None:
            raise InvariantError("a step was computed before a KV pool was allocated")
        self._set_device()
        if self._host_pool is not None:
            self._host_pool.wait_for_copies(sequence.blocks for sequence in batch.sequences)
        return self._run_batch(
            batch, self._layer_pass, between_layers if self.interleaves else None
        )

    @torch.inference_mode()
    def encode_image(self, pixels: Tensor) -> Tensor:
        """Encode an image, uint8 ``[height, width, 3]``, to rows ``[n, hidden_size]`` on the
        device.

        Raises:
            InvariantError: this stage has no vision tower, or it doesn't take that size.
        """
        tower = self._decoder.vision
        if tower is None:
            raise InvariantError(f"stage {self.layers} has no vision tower")
        self._set_device()
        return tower.encode_image(pixels)

    @torch.inference_mode()
    def predict_tokens(self, batch: MtpInput) -> MtpOutput:
        """Predict the tokens after the next with the MTP layer, and store its KV.

        Raises:
            InvariantError: as :meth:`compute_step`, or the stage has no such layer.
        """
        if self._layer_pass is None:
            raise InvariantError("tokens were predicted before a KV pool was allocated")
        self._set_device()
        positions, slots, fresh = self._layer_pass.pool.locate_rows(batch.sequences)
        if not len(positions) == len(batch.normed) == len(batch.tokens):
            raise InvariantError(f"{len(batch.normed)} rows, {len(batch.tokens)} tokens")
        if self._layer_pass.attention.reads_unwritten:
            # The other layers have already written their rows.
            pool, layer = self._layer_pass.pool.locate_layer(len(self._heads.places) - 1)
            pool.zero_layer(layer, fresh)
        return self._layer_pass.run_mtp(batch, positions, slots)

    @torch.inference_mode()
    def swap_next_experts(self) -> bool:
        """Swap an expert in host memory with a less used one on the device, if any.

        Returns whether it did. Call it while idle.
        """
        if not self._decoder.split_experts:
            return False
        self._set_device()
        return any(one.swap_next() for one in self._decoder.split_experts)

    @property
    def resident_share(self) -> float:
        """Share of recent choices that hit experts on the device; 0 if none are in host memory."""
        shares = [one.use.resident_share for one in self._decoder.split_experts]
        return sum(shares) / len(shares) if shares else 0.0

    @torch.inference_mode()
    def capture_next_graph(self) -> bool:
        """Capture one useful CUDA graph; return whether one was tried.

        Call it while idle: it takes some tens of milliseconds.
        """
        if self._graphs is None:
            return False
        self._set_device()
        return self._graphs.capture_next()

    @torch.inference_mode()
    def capture_graph(self, rows: int, positions: int) -> None:
        """Capture the CUDA graph of decode steps with ``rows`` rows and up to ``positions``
        positions.
        """
        if self._graphs is not None:
            self._set_device()
            self._graphs.capture_shape(rows, positions)

    @torch.inference_mode()
    def copy_block(self, source: int, table: Sequence[int], start: int) -> None:
        """Copy block ``source`` up to ``start`` into the block of ``table`` that has ``start``."""
        if self._pool is None:
            raise InvariantError("copy_block was called before a KV pool was allocated")
        size = self._pool.block_size
        if self._host_pool is not None:
            self._host_pool.wait_for_copies((table,))
        self._pool.copy_block(source, table[start // size], start % size)

    def has_state(self, slot: int, position: int) -> bool:
        """Whether a request in state ``slot`` can continue after ``position`` tokens."""
        states = None if self._layer_pass is None else self._layer_pass.states
        return states is None or states.has_state(slot, position)

    @torch.inference_mode()
    def copy_state(self, source: int, target: int) -> None:
        """Copy the state of recurrent layers in slot ``source`` to slot ``target``.

        Raises:
            InvariantError: the stage has no such slots.
        """
        if self._layer_pass is None or self._layer_pass.states is None:
            raise InvariantError("copy_state was called without states")
        self._layer_pass.states.copy_slot(source, target)

    @torch.inference_mode()
    def open_host_pool(self, nbytes: int, stages_per_host: int = 1) -> tuple[int, float]:
        """Allocate up to ``nbytes`` of host memory for KV blocks.

        All stages of this PC together take at most half of the free memory.

        Returns:
            The number of blocks and the seconds to copy one; ``(0, 0)`` on failure.
        """
        if self._pool is None:
            raise InvariantError("open_host_pool was called before a KV pool was allocated")
        if self.config.keeps_states:
            return 0, 0.0  # blocks are useless without the state
        free = psutil.virtual_memory().available // (2 * stages_per_host)
        blocks = min(nbytes, free) // self.block_bytes(self._pool.block_size)
        if blocks < 1:
            return 0, 0.0
        self._set_device()
        try:
            self._host_pool = HostKVPool(self._pool, blocks, self.device)
            return blocks, self._host_pool.measure_block_s()
        except RuntimeError as error:  # WSL, for example, limits pinned memory
            log.warning("no host memory for %d KV blocks (%s)", blocks, error)
            self._host_pool = None
            return 0, 0.0

    @torch.inference_mode()
    def swap_blocks(self, *, out: bool, blocks: Sequence[int], hosts: Sequence[int]) -> None:
        """Copy KV blocks ``out`` to host memory, or from there into the pool.

        Raises:
            InvariantError: no host memory, or invalid blocks.
        """
        if self._host_pool is None:
            raise InvariantError("swap_blocks was called without host memory")
        self._set_device()
        if out:
            self._host_pool.copy_out(blocks, hosts)
        else:
            self._host_pool.copy_in(blocks, hosts)

    def free_kv_pool(self) -> None:
        """Free the KV pool, its graphs and host memory."""
        self._pool = self._layer_pass = self._graphs = self._host_pool = None

    def release_weights(self, wanted: LayerRange) -> HeldWeights:
        """Return weights that a stage of layers ``wanted`` can reuse; free everything else.

        This stage is unusable afterwards.
        """
        self.free_kv_pool()
        held = HeldWeights.from_decoder(self._decoder, self.layers, wanted)
        self._decoder = Decoder(self.config, None, (), None, None)
        self._attentions.clear()
        return held

    @property
    def _num_recurrent(self) -> int:
        return self.config.count_recurrent(self.layers)

    @torch.inference_mode()
    def _create_states(self, slots: int) -> StatePool | None:
        shape, layers = self.config.recurrent, self._num_recurrent
        return None if shape is None else StatePool(shape, layers, slots, self.device)

    @property
    def _attention_shapes(self) -> list[AttentionShape]:
        """Attention shapes, one per kind of heads."""
        given = self.config, self.layers, self.kv_cache_dtype
        return [AttentionShape.from_config(*given, heads) for heads in self._heads.kinds]

    @torch.inference_mode()
    def _create_pool(self, blocks: int, block_size: int) -> AnyKVPool:
        heads = self._heads
        parts = [
            self._create_part(shape, heads.count_layers(kind), blocks, block_size)
            for kind, shape in enumerate(self._attention_shapes)
        ]
        return parts[0] if len(parts) == 1 else MixedKVPool(parts, heads.places)

    def _create_part(
        self, shape: AttentionShape, layers: int, blocks: int, block_size: int
    ) -> KVPool:
        padding = self._may_have_graphs
        return KVPool(
            shape,
            layers,
            blocks,
            block_size,
            self._dtype,
            self.device,
            padding,
            self.kv_cache_dtype,
        )

    @property
    def _may_have_graphs(self) -> bool:
        # An embedding model has no decode steps.
        useful = self._decoder.capturable and self.config.has_output_head
        allowed = useful and "graphs" not in self.disabled_kernels
        return self.device.type == "cuda" and allowed

    def _set_device(self) -> None:
        if self.device.type == "cuda":
            # Some calls, such as pinning memory and Triton's, use the thread's current device.
            torch.cuda.set_device(self.device)

    @torch.inference_mode()
    def _create_graphs(self, layers: LayerPass) -> DecodeGraphs | None:
        """Create graphs for decode steps if they are faster on this device."""
        pool = layers.pool
        if pool.padding_block is None:
            return None
        budget = GRAPH_POOL_BYTES + GRAPH_BYTES * len(self._decoder.blocks)
        if self.is_last:
            logit = self._dtype.itemsize + LOGIT_BYTES
            budget += GRAPH_LOGIT_ROWS * self.config.vocab_size * logit
        context = None
        if layers.attention.spans_context:
            limits = (rope.table_positions for rope in self._ropes)
            context = min(
                self.config.max_model_len,
                pool.blocks * pool.block_size,
                *(limit for limit in limits if limit is not None),
            )
        # Other backends would copy a request's KV for each of its drafts.
        drafts = MAX_DRAFTS if layers.attention.reads_pages else 0
        plan = GraphPlan(pool.block_size, budget, self._max_decode_rows, context, drafts)
        graphs = DecodeGraphs(layers, plan, CudaGraphCapturer(self.device))
        return graphs if graphs.check_speedup() else None

    def _attention_backend(self, block_size: int) -> AttentionBackend:
        """Return the backend for a block size."""
        if block_size not in self._attentions:
            parts: list[AttentionBackend] = [
                create_attention(
                    self._backend_name,
                    shape,
                    block_size,
                    self._dtype,
                    self.device,
                    self.disabled_kernels,
                )
                for shape in self._attention_shapes
            ]
            if self.config.sees_whole_images:
                masked = (GatherAttention(shape) for shape in self._attention_shapes)
                parts = [WholeImageAttention(*pair) for pair in zip(parts, masked, strict=True)]
            self._attentions[block_size] = (
                parts[0] if len(parts) == 1 else MixedAttention(parts, self._heads.places)
            )
        return self._attentions[block_size]

    def _run_batch(
        self, batch: StageInput, layers: LayerPass, between_layers: Callable[[], None] | None
    ) -> StageOutput:
        """Run a step, as a CUDA graph if that is faster."""
        given = self._check_input(batch)
        positions, slots, fresh = layers.pool.locate_rows(batch.sequences)
        if len(positions) != given:
            raise InvariantError(f"a batch has {given} rows, its sequences {len(positions)}")
        if layers.attention.reads_unwritten:
            layers.pool.zero_blocks(fresh)
        step = LocatedRows(batch, positions, slots)
        replayed = None
        if self._graphs is not None and batch.image_rows is None:
            replayed = self._graphs.replay_step(step)
        if replayed is not None:
            return replayed
        return layers.run_step(step, between_layers)

    def _check_input(self, batch: StageInput) -> int:
        """Check the input's fields, and return its number of rows."""
        if not self.is_first:
            if batch.hidden is None:
                raise InvariantError(f"stage {self.layers} got no hidden rows")
            return len(batch.hidden)
        if batch.tokens is None:
            raise InvariantError("the first stage got no tokens")
        # On CUDA an invalid id would break the process's context.
        minimum, greatest = batch.tokens.aminmax()
        if minimum < 0 or greatest >= self.config.vocab_size:
            raise InvariantError(f"a token id is not in 0:{self.config.vocab_size}")
        return len(batch.tokens)


def _check_host_experts(config: ModelConfig, count: int) -> None:
    """Refuse more experts in host memory than a layer has.

    Raises: UsageError: a layer has fewer.
    """
    most = 0 if config.experts is None else config.experts.num_experts
    if not 0 < count <= most:
        has = f"has {most} experts in a layer" if most else "has no experts"
        raise UsageError(f"{count} experts can't lie in host memory: the model {has}")


def _open_host_experts(
    opened: ExitStack,
    source: WeightSource,
    count: int,
    dtype: torch.dtype,
    disabled_kernels: Collection[str],
) -> HostExperts:
    """Open the source of ``count`` experts of each layer for the CPU, beside the device's.

    Raises:
        UsageError: a layer has fewer.
    """
    _check_host_experts(source.folder.config, count)
    host = WeightSource(
        source.folder, torch.device("cpu"), dtype, source.quantize, disabled_kernels
    )
    sources = None if source.device.type == "cpu" else (source, host)
    return HostExperts(count, opened.enter_context(host.open_weights()), sources)


def _choose_host_dtype(
    computed: WeightDType, config: ModelConfig, device: torch.device
) -> WeightDType:
    """Choose the dtype of experts on the CPU, given the device's compute dtype ``computed``."""
    cpu = torch.device("cpu")
    same = device.type == "cpu" or computed == "f32"
    return computed if same else choose_dtype("auto", config.dtype, cpu)


def find_device(name: str) -> torch.device:
    """Return the device called ``cpu`` or ``cuda:N``.

    Raises:
        UsageError: no such device.
    """
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UsageError(f"{name!r} is not a device; use cpu or cuda:N") from error
    if device.type not in ("cpu", "cuda"):
        raise UsageError(f"devices of type {device.type!r} are not supported; use cpu or cuda:N")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UsageError(f"no device {name}: torch does not see such a GPU")
    # Some torch calls require an explicit index.
    return device if device.type == "cpu" else torch.device("cuda", device.index or 0)
