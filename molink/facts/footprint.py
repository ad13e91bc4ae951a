"""Estimates the memory of a model's parts on a device: weights, activations, KV, CUDA graphs.

All figures are bytes computed from :class:`~molink.facts.model.ModelFacts`. The coordinator places
stages and each daemon plans its worker by the same figures, so every placement fits.
"""

from bisect import bisect_right
from dataclasses import dataclass
from typing import Literal

from molink.facts.device import ExpertHost
from molink.facts.dtypes import DTYPE_SIZES, NarrowDType, weight_dtype
from molink.facts.model import (
    BLOCK_SIZE,
    BlockWeights,
    KVCacheDType,
    LayerRange,
    LayerWeights,
    ModelFacts,
    NarrowWeights,
    Quantize,
)
from molink.facts.profile import MAX_CHUNK_ROWS

#: A stage needs room for the KV blocks of this many tokens, or of the maximum length if less.
MIN_TOKENS = 2048
#: A stage holds one request's recurrent states per this many tokens of its KV pool, within bounds.
#: The upper bound is the usual 64 requests; more states would stay unused.
_TOKENS_PER_STATE = 2048
_MIN_STATES, _MAX_STATES = 4, 64
#: More blocks than any pipeline has.
_MAX_BLOCKS = (1 << 31) - 1
#: Bytes per layer of captured decode graphs, all row counts together.
GRAPH_BYTES = 2 << 20
#: Bytes of a stage's graph pool; torch allocates it in steps of 20 MiB, and 2 MiB don't suffice.
GRAPH_POOL_BYTES = 24 << 20
#: Maximum rows of a graph that also computes logits.
GRAPH_LOGIT_ROWS = 16
#: float32 logits, and a temporary copy.
LOGIT_BYTES = 4 + 4
#: A float32 score, and a temporary copy for capping.
_SCORE_BYTES = 4 + 4
#: An int8 product of a row and a weight: its int32 sum, scaled in steps.
_PRODUCT_BYTES = 16
#: A CPU repeats a 4-byte scale for every 64 or more int8 columns.
_REPEATED_SCALES = 16
#: An element of keys and values while it is quantized to 8 bits: float32, its quotient and its
#: code.
_KV_CODE_BYTES = 4 + 4 + 1
#: Decode rows are padded to the longest of their bucket, by at most this factor.
_PADDING_FACTOR = 2
#: Number of weights that a GPU dequantizes at once.
MAX_DEQUANTIZED = 1 << 25
#: Bytes of partial results and block tables if attention reads pages in place.
PAGED_BYTES = 40 << 20


def count_state_slots(tokens: int) -> int:
    """Count the requests whose states a stage holds next to a KV pool of ``tokens`` tokens."""
    return min(_MAX_STATES, max(_MIN_STATES, tokens // _TOKENS_PER_STATE)) if tokens else 0


def count_pool_blocks(nbytes: int, block_bytes: int, block_size: int, state_bytes: int) -> int:
    """Count the KV blocks of ``block_size`` tokens that fit ``nbytes`` together with states.

    ``state_bytes`` is one request's; a stage may have no KV at all.
    """
    most = nbytes // block_bytes if block_bytes else _MAX_BLOCKS
    if not state_bytes:
        return most

    def pool_bytes(blocks: int) -> int:
        return blocks * block_bytes + count_state_slots(blocks * block_size) * state_bytes

    return bisect_right(range(most + 1), nbytes, key=pool_bytes) - 1


@dataclass(frozen=True, slots=True)
class StepLimits:
    """Maximum rows of a step: ``max_chunk_rows`` of a prompt and ``max_decode_rows`` of streams."""

    max_chunk_rows: int = MAX_CHUNK_ROWS
    max_decode_rows: int = 64


@dataclass(frozen=True, slots=True)
class StageSetup:
    """How a stage runs on a device; ``dtype`` is the user's choice."""

    kind: Literal["cpu", "cuda"] = "cpu"
    bf16: bool = True
    dtype: str = "auto"
    quantize: Quantize = "none"
    kv_cache_dtype: KVCacheDType = "auto"
    step_limits: StepLimits = StepLimits()
    #: Whether the device can multiply by block-quantized weights.
    has_block_kernels: bool = False
    #: 16-bit weight types that it keeps while computing in f32.
    narrow_dtypes: tuple[NarrowDType, ...] = ()
    #: Whether attention reads KV pages in place.
    reads_pages: bool = False
    #: How the PC's CPU keeps experts in host memory; ``None`` if it keeps none.
    host: "StageSetup | None" = None

    def element_bytes(self, facts: ModelFacts) -> int:
        """Return bytes per element in computation; a CPU without bf16 widens 16-bit models."""
        if self.dtype in DTYPE_SIZES:
            return DTYPE_SIZES[self.dtype]
        if self.kind == "cpu" and not self.bf16:
            return max(facts.element_bytes, DTYPE_SIZES["f32"])
        return facts.element_bytes

    def weight_element_bytes(self, facts: ModelFacts) -> int:
        """Return bytes per element of the weights in ``facts.narrow``."""
        element = self.element_bytes(facts)
        if facts.narrow is None or self.kind != "cpu" or element != DTYPE_SIZES["f32"]:
            return element
        return DTYPE_SIZES[weight_dtype(facts.narrow.dtype, "f32", self.narrow_dtypes.__contains__)]

    def kept_blocks(self, facts: ModelFacts) -> BlockWeights | None:
        """Return the weights that stay block-quantized; ``None`` without kernels for them."""
        if not self.has_block_kernels:
            return None
        return facts.block_weights if self.kind == "cpu" else facts.plane_weights

    def quantize_mode(self, facts: ModelFacts) -> Quantize:
        """Return how projections are quantized; quantized files keep their own format."""
        return facts.quantized if facts.quantized != "none" else self.quantize

    @property
    def keeps_planes(self) -> bool:
        """Whether GPU kernels multiply by quantized weights in bit planes."""
        return self.kind != "cpu" and self.has_block_kernels

    def unpacked_bytes(self, facts: ModelFacts) -> int:
        """Return the bytes of the largest dequantized weight, or of a slice of it."""
        is_quantized = self.quantize_mode(facts) != "none"
        if self.keeps_planes and (is_quantized or self.kept_blocks(facts) is not None):
            # With many rows, slices of a weight are dequantized; with few rows, partial sums need
            # less.
            return min(facts.widest, MAX_DEQUANTIZED) * self.element_bytes(facts)
        if is_quantized and not self.has_block_kernels:
            return facts.widest * self.element_bytes(facts)
        return 0

    def layer_weight_bytes(self, facts: ModelFacts, weights: LayerWeights) -> int:
        """Return the bytes that a layer's ``weights`` take on this target."""
        element, mode = self.element_bytes(facts), self.quantize_mode(facts)
        if mode != "none":
            packed = weights.int8_bytes if mode == "int8" else weights.nf4_bytes
            if mode == "int8" and self.kind == "cpu" and self.has_block_kernels:
                packed += packed // _REPEATED_SCALES
            return (
                facts.scale_bytes(weights.layer_bytes - weights.projection_bytes, element) + packed
            )
        if self.kept_blocks(facts) is not None:
            kept, rest = weights.block_bytes if self.kind == "cpu" else weights.plane_bytes
            return kept + facts.scale_bytes(rest, element)
        # Bytes that 16-bit weights save, per stored byte.
        saved = (element - self.weight_element_bytes(facts)) // facts.element_bytes
        return facts.scale_bytes(weights.layer_bytes, element) - saved * weights.narrow_bytes


def host_setup(
    host: ExpertHost | None, kind: Literal["cpu", "cuda"], dtype: str, quantize: Quantize
) -> StageSetup | None:
    """Return how the CPU of a device's PC keeps experts; ``None`` if it keeps none.

    The device is of ``kind``, and its stage computes in ``dtype``.
    """
    if host is None:
        return None
    return StageSetup(
        bf16=host.bf16,
        # The same choice as in :meth:`molink.stage.stage.Stage.load_layers`.
        dtype=dtype if kind == "cpu" or dtype == "f32" else "auto",
        quantize=quantize,
        has_block_kernels=host.has_block_kernels,
        narrow_dtypes=host.narrow_dtypes,
    )


_ALL_WIDE = NarrowWeights(dtype="bf16", layer=0, last=0)


@dataclass(frozen=True, slots=True)
class MovableExperts:
    """Routed experts, some of which may lie in host memory, equally many of each layer.

    A row chooses ``top_k`` of ``num_experts``; ``dense_layers`` have none. ``device_bytes`` and
    ``host_bytes`` are the sizes of one expert of a layer. A layer without experts takes
    ``dense_saving`` bytes less than the largest layer.
    """

    num_experts: int
    top_k: int
    dense_layers: tuple[int, ...]
    device_bytes: int
    host_bytes: int
    dense_saving: int = 0

    @classmethod
    def of_stage(cls, facts: ModelFacts, target: StageSetup) -> "MovableExperts | None":
        """Compute the experts of a model on a target; ``None`` if it has none."""
        experts = facts.experts
        if experts is None:
            return None
        beside, count, saving = target.host or target, experts.num_experts, 0
        if experts.dense_layers:
            whole, dense = facts.layer_weights, experts.dense
            saving = target.layer_weight_bytes(facts, whole) - target.layer_weight_bytes(
                facts, dense
            )
        return cls(
            count,
            experts.top_k,
            experts.dense_layers,
            target.layer_weight_bytes(facts, experts.least) // count,
            -(-beside.layer_weight_bytes(facts, experts.most) // count),
            max(0, saving),
        )

    @property
    def layer_bytes(self) -> int:
        """Bytes of a layer's experts, all on the device."""
        return self.num_experts * self.device_bytes

    def count_layers(self, layers: LayerRange) -> int:
        """Count the layers with experts among ``first:last``."""
        first, last = layers
        return last - first - sum(first <= layer < last for layer in self.dense_layers)

    def count_moved(
        self, lacking: int, layers: int, host_memory: int, dense: int = 0
    ) -> int | None:
        """Count experts per layer that must move to host memory to free ``lacking`` bytes.

        They are experts of ``layers`` layers, of which up to ``dense`` have no experts. ``None`` if
        moving all is not enough, or takes more than ``host_memory`` bytes.
        """
        if lacking <= 0:
            return 0
        if not layers or not self.device_bytes:
            return None
        count = -(-lacking // (layers * self.device_bytes))
        if dense and count * self.device_bytes > self.dense_saving:
            if dense >= layers:
                return None
            left = lacking - dense * self.dense_saving
            count = -(-left // ((layers - dense) * self.device_bytes))
        fits = layers * count * self.host_bytes <= host_memory
        return count if fits and count <= self.num_experts else None

    def read_share(self, rows: int) -> float:
        """Return the share of experts that ``rows`` rows choose if they choose independently."""
        return 1.0 - (1.0 - min(1.0, self.top_k / self.num_experts)) ** rows


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes of a model's parts on one target."""

    #: Weights of one layer.
    layer_bytes: int
    #: Weights of the first and of the last stage besides their layers, and those that both share.
    #: The first stage's include a vision tower and its rows of an image, the last stage's MTP
    #: layers.
    first_bytes: int
    last_bytes: int
    shared_bytes: int
    #: Keys and values of one token in one layer with attention.
    token_bytes: int
    max_model_len: int
    #: Rows of the largest step, in any stage.
    step_bytes: int
    #: Logits of a step and of graphs, in the last stage.
    logits_bytes: int
    #: Attention's copies per token of the pool: one layer's keys and values, masks, capped scores.
    #: 0 if attention reads pages in place.
    attention_copy_bytes: int
    #: Mask and capped scores of a prefill chunk per token of its request. 0 if attention reads
    #: pages in place.
    mask_bytes: int
    #: CUDA graphs per layer, and their shared pool.
    layer_graph_bytes: int = 0
    graph_bytes: int = 0
    #: The model's number of layers, the first stage's minimum, the recurrent layers and the MLP
    #: layers. Recurrent layers keep a request's state instead of KV, or with ``parallel_states`` in
    #: addition to KV; MLP layers keep nothing.
    layers: int = 1
    first_layers: int = 1
    recurrent_layers: tuple[int, ...] = ()
    mlp_layers: tuple[int, ...] = ()
    parallel_states: bool = False
    #: A request's slot in a recurrent layer.
    state_bytes: int = 0
    #: MTP layers of the last stage, with KV.
    mtp_layers: int = 0
    #: Routed experts among the weights of a layer.
    experts: MovableExperts | None = None

    @classmethod
    def of_stage(cls, facts: ModelFacts, target: StageSetup) -> "Footprint":
        """Estimate the footprint of a model on a target."""
        element, mode = target.element_bytes(facts), target.quantize_mode(facts)
        load = target.step_limits

        def scaled(stored: int) -> int:
            return facts.scale_bytes(stored, element)

        # Bytes that 16-bit weights save, per stored byte.
        saved = (element - target.weight_element_bytes(facts)) // facts.element_bytes
        layer = target.layer_weight_bytes(facts, facts.layer_weights)
        first = scaled(facts.first_bytes)
        last = scaled(facts.last_bytes) - saved * (facts.narrow or _ALL_WIDE).last
        kept, rows = target.kept_blocks(facts), load.max_chunk_rows + load.max_decode_rows
        if kept is not None:
            first, last = (whole + scaled(rest) for whole, rest in (kept.first, kept.last))
        # Norms compute in float32, with both input and result in memory.
        vision = scaled(facts.vision_bytes) + facts.image_elements * element
        row = facts.row_elements * element + 2 * facts.hidden * DTYPE_SIZES["f32"]
        if mode == "int8" and facts.hidden and not target.keeps_planes:
            row += facts.widest // facts.hidden * _PRODUCT_BYTES
        cuda = target.kind == "cuda"
        reads_pages = target.reads_pages and not facts.large_heads
        scores = max(facts.score_heads, facts.large_heads * cuda) * _SCORE_BYTES
        logit_rows = load.max_decode_rows + 1 + GRAPH_LOGIT_ROWS * cuda
        # MTP drafts need logits besides those of the step.
        logit_rows += facts.mtp_layers * load.max_decode_rows
        copied = token = scaled(facts.kv_bytes)
        if target.kv_cache_dtype == "int8":
            row += facts.kv_bytes // facts.element_bytes * _KV_CODE_BYTES
            # Gathered 8-bit codes are converted to rows.
            token = facts.int8_kv_bytes
            copied += token
        return cls(
            layer_bytes=layer,
            first_bytes=first + vision,
            last_bytes=last + facts.mtp_layers * layer,
            # An MTP layer needs the embedding, too.
            shared_bytes=first if facts.tied or facts.mtp_layers else 0,
            token_bytes=token,
            max_model_len=facts.max_model_len,
            step_bytes=rows * row + target.unpacked_bytes(facts) + PAGED_BYTES * reads_pages,
            logits_bytes=logit_rows * facts.vocabulary * (element + LOGIT_BYTES),
            attention_copy_bytes=_PADDING_FACTOR * (copied + element + scores) * (not reads_pages),
            mask_bytes=load.max_chunk_rows * (element + 1 + scores) * (not reads_pages),
            layer_graph_bytes=GRAPH_BYTES * cuda,
            graph_bytes=(GRAPH_POOL_BYTES + load.max_decode_rows * row) * cuda,
            layers=facts.layers,
            first_layers=facts.first_layers,
            recurrent_layers=facts.recurrent_layers,
            mlp_layers=facts.mlp_layers,
            parallel_states=facts.parallel_states,
            state_bytes=facts.state_bytes,
            mtp_layers=facts.mtp_layers,
            experts=MovableExperts.of_stage(facts, target),
        )

    @property
    def min_tokens(self) -> int:
        """Minimum tokens for which a stage needs KV blocks."""
        return -(-min(self.max_model_len, MIN_TOKENS) // BLOCK_SIZE) * BLOCK_SIZE

    def weight_bytes(self, layers: int, *, opens: bool, closes: bool) -> int:
        """Return weight bytes of a stage with ``layers`` layers and its ends of the model."""
        ends = (
            self.first_bytes * opens
            + self.last_bytes * closes
            - self.shared_bytes * (opens and closes)
        )
        return layers * self.layer_bytes + ends

    def pool_bytes(self, layers: LayerRange, tokens: int) -> int:
        """Return bytes of ``tokens`` tokens' KV, and of states, in layers ``first:last``."""
        first, last = layers
        recurrent = sum(first <= layer < last for layer in self.recurrent_layers)
        idle = sum(first <= layer < last for layer in self.mlp_layers)
        states = count_state_slots(tokens) * recurrent * self.state_bytes
        attended = last - first - idle - recurrent * (not self.parallel_states)
        attended += self.mtp_layers * (last == self.layers)
        return attended * tokens * self.token_bytes + states

    def average_pool_bytes(self, tokens: int) -> tuple[int, int]:
        """Return a layer's average pool bytes, and the maximum excess of any stage over it."""
        kept = tokens * self.token_bytes
        if not self.recurrent_layers and not self.mlp_layers:
            return kept, kept * self.mtp_layers
        state, recurrent = count_state_slots(tokens) * self.state_bytes, {*self.recurrent_layers}
        idle = {*self.mlp_layers}
        every = [
            state + kept * self.parallel_states
            if layer in recurrent
            else kept * (layer not in idle)
            for layer in range(self.layers)
        ]
        average = -(-sum(every) // self.layers)
        most = above = 0
        for one in every:  # the maximum sum of consecutive differences (Kadane)
            above = max(0, above + one - average)
            most = max(most, above)
        return average, most + kept * self.mtp_layers

    def activation_bytes(self, tokens: int, *, closes: bool) -> int:
        """Return activation bytes of a step with up to ``tokens`` tokens in the pool."""
        attention = (
            tokens * self.attention_copy_bytes + min(tokens, self.max_model_len) * self.mask_bytes
        )
        return self.step_bytes + self.logits_bytes * closes + attention

    def cuda_graph_bytes(self, layers: int) -> int:
        """Return bytes of the CUDA graphs of ``layers`` layers; 0 on a CPU."""
        return self.graph_bytes + layers * self.layer_graph_bytes

    def min_bytes(self, layers: int, *, opens: bool, closes: bool) -> int:
        """Return the minimum bytes of a working stage of ``layers`` layers, without the margin."""
        pool, excess = self.average_pool_bytes(self.min_tokens)
        return (
            self.weight_bytes(layers, opens=opens, closes=closes)
            + self.activation_bytes(self.min_tokens, closes=closes)
            + self.cuda_graph_bytes(layers)
            + layers * pool
            + excess
        )

    def max_layers(self, room: int, *, opens: bool, closes: bool) -> int:
        """Return the maximum number of layers that fit ``room`` bytes.

        Negative if everything besides layers already needs more.
        """
        free = room - self.min_bytes(0, opens=opens, closes=closes)
        pool, _ = self.average_pool_bytes(self.min_tokens)
        layer = self.layer_bytes + self.layer_graph_bytes + pool
        return free // layer if layer else (1 << 30 if free >= 0 else -1)
