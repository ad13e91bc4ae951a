"""What the parts of a model take on a device, in bytes: weights, activations, KV, CUDA graphs.

Pure numbers from :class:`~molink.facts.model.ModelFacts`. The coordinator places by them and each
daemon plans its worker by them, so that what is placed fits where it was placed.
"""

from dataclasses import dataclass
from typing import Literal

from molink.facts.dtypes import DTYPE_SIZES, NarrowDType, weight_dtype
from molink.facts.model import BLOCK_SIZE, ModelFacts, NarrowWeights, Quantize
from molink.facts.profile import MAX_CHUNK_ROWS

#: A stage must have room for the KV blocks of this many tokens (or the whole context, if less).
MIN_TOKENS = 2048
#: Captured decode graphs, all row counts together: bytes for each layer.
GRAPH_BYTES = 2 << 20
#: What a stage has for graphs beside: torch takes memory for them by 20 MiB, where 2 aren't enough.
GRAPH_POOL_BYTES = 24 << 20
#: float32 logits, and one copy while they are made.
_LOGIT_BYTES = 4 + 4
#: A score in float32, and one copy while it is capped.
_SCORE_BYTES = 4 + 4
#: An int8 product of a row and a weight: its int32 sum, scaled in steps.
_PRODUCT_BYTES = 16
#: Decode rows are padded to the longest of a bucket: at most this many times what they hold.
_PADDING_FACTOR = 2


@dataclass(frozen=True, slots=True)
class StepLimits:
    """Rows that one step has at most: ``max_chunk_rows`` of a prompt, and ``max_decode_rows``
    streams' next ones."""

    max_chunk_rows: int = MAX_CHUNK_ROWS
    max_decode_rows: int = 64


@dataclass(frozen=True, slots=True)
class StageSetup:
    """What a stage is to run on, and how: ``dtype`` as the user names it."""

    kind: Literal["cpu", "cuda"] = "cpu"
    bf16: bool = True
    dtype: str = "auto"
    quantize: Quantize = "none"
    step_limits: StepLimits = StepLimits()
    #: Whether it multiplies by weights of few bits.
    has_block_kernels: bool = False
    #: Weights that stay what they are where it computes in f32.
    narrow_dtypes: tuple[NarrowDType, ...] = ()

    def element_bytes(self, facts: ModelFacts) -> int:
        """Size of an element that it computes with; a CPU without bf16 widens 16-bit models."""
        if self.dtype in DTYPE_SIZES:
            return DTYPE_SIZES[self.dtype]
        if self.kind == "cpu" and not self.bf16:
            return max(facts.element_bytes, DTYPE_SIZES["f32"])
        return facts.element_bytes

    def weight_element_bytes(self, facts: ModelFacts) -> int:
        """Size of an element of the weights that are ``facts.narrow``."""
        element = self.element_bytes(facts)
        if facts.narrow is None or self.kind != "cpu" or element != DTYPE_SIZES["f32"]:
            return element
        return DTYPE_SIZES[weight_dtype(facts.narrow.dtype, "f32", self.narrow_dtypes.__contains__)]

    def quantize_mode(self, facts: ModelFacts) -> Quantize:
        """How projections are kept: as the files have them, if these are quantized."""
        return facts.quantized if facts.quantized != "none" else self.quantize


_ALL_WIDE = NarrowWeights(dtype="bf16", layer=0, last=0)


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes that the parts of a model take on one target."""

    #: Weights of one layer.
    layer_bytes: int
    #: Weights that the first and the last stage hold beside, and what they share.
    first_bytes: int
    last_bytes: int
    shared_bytes: int
    #: Keys and values of one token in one layer.
    token_bytes: int
    max_model_len: int
    #: What the rows of a step take at most, in any stage.
    step_bytes: int
    #: What the logits of a step take, in the last stage.
    logits_bytes: int
    #: What attention copies for each token of the pool (one layer's keys and values, and masks;
    #: capped scores).
    attention_copy_bytes: int
    #: What the mask of a prefill chunk (and its capped scores) takes for each token of its request.
    mask_bytes: int
    #: CUDA graphs of one layer, and what of them no layer has for itself.
    layer_graph_bytes: int = 0
    graph_bytes: int = 0

    @classmethod
    def of_stage(cls, facts: ModelFacts, target: StageSetup) -> "Footprint":
        """That of a model on a target."""
        element, mode, load = (
            target.element_bytes(facts),
            target.quantize_mode(facts),
            target.step_limits,
        )

        def scaled(stored: int) -> int:
            return -(-stored * element // facts.element_bytes)

        unpacked, stays = 0, facts.narrow or _ALL_WIDE
        # What staying in 16 bits saves, of each byte that is stored.
        saved = (element - target.weight_element_bytes(facts)) // facts.element_bytes
        layer = scaled(facts.layer_bytes) - saved * stays.layer
        first, last = scaled(facts.first_bytes), scaled(facts.last_bytes) - saved * stays.last
        kept = facts.block_weights if target.has_block_kernels and target.kind == "cpu" else None
        if kept is not None:
            layer, first, last = (
                whole + scaled(rest) for whole, rest in (kept.layer, kept.first, kept.last)
            )
        if mode != "none":
            packed = facts.int8_bytes if mode == "int8" else facts.nf4_bytes
            layer = scaled(facts.layer_bytes - facts.projection_bytes) + packed
            unpacked = facts.widest * element
        # Norms are computed in f32, with a result beside the input.
        row = facts.row_elements * element + 2 * facts.hidden * DTYPE_SIZES["f32"]
        if mode == "int8" and facts.hidden:
            row += facts.widest // facts.hidden * _PRODUCT_BYTES
        scores = facts.score_heads * _SCORE_BYTES
        cuda, token = target.kind == "cuda", scaled(facts.kv_bytes)
        return cls(
            layer_bytes=layer,
            first_bytes=first,
            last_bytes=last,
            shared_bytes=first if facts.tied else 0,
            token_bytes=token,
            max_model_len=facts.max_model_len,
            step_bytes=(load.max_chunk_rows + load.max_decode_rows) * row + unpacked,
            logits_bytes=(load.max_decode_rows + 1) * facts.vocabulary * (element + _LOGIT_BYTES),
            attention_copy_bytes=_PADDING_FACTOR * (token + element + scores),
            mask_bytes=load.max_chunk_rows * (element + 1 + scores),
            layer_graph_bytes=GRAPH_BYTES * cuda,
            graph_bytes=(GRAPH_POOL_BYTES + load.max_decode_rows * row) * cuda,
        )

    @property
    def min_tokens(self) -> int:
        """Tokens for which a stage must have KV blocks."""
        return -(-min(self.max_model_len, MIN_TOKENS) // BLOCK_SIZE) * BLOCK_SIZE

    def weight_bytes(self, layers: int, *, opens: bool, closes: bool) -> int:
        """Of a stage that holds ``layers`` layers and the ends that it touches."""
        ends = (
            self.first_bytes * opens
            + self.last_bytes * closes
            - self.shared_bytes * (opens and closes)
        )
        return layers * self.layer_bytes + ends

    def activation_bytes(self, tokens: int, *, closes: bool) -> int:
        """What a step takes beside, while up to ``tokens`` tokens are in the pool."""
        attention = (
            tokens * self.attention_copy_bytes + min(tokens, self.max_model_len) * self.mask_bytes
        )
        return self.step_bytes + self.logits_bytes * closes + attention

    def cuda_graph_bytes(self, layers: int) -> int:
        """Of ``layers`` layers; nothing on a CPU."""
        return self.graph_bytes + layers * self.layer_graph_bytes

    def min_bytes(self, layers: int, *, opens: bool, closes: bool) -> int:
        """Least bytes with which a stage of ``layers`` layers works, without the margin."""
        return (
            self.weight_bytes(layers, opens=opens, closes=closes)
            + self.activation_bytes(self.min_tokens, closes=closes)
            + self.cuda_graph_bytes(layers)
            + layers * self.min_tokens * self.token_bytes
        )

    def max_layers(self, room: int, *, opens: bool, closes: bool) -> int:
        """Most layers that fit ``room`` bytes; negative if not even the rest does."""
        free = room - self.min_bytes(0, opens=opens, closes=closes)
        layer = self.layer_bytes + self.layer_graph_bytes + self.min_tokens * self.token_bytes
        return free // layer if layer else (1 << 30 if free >= 0 else -1)
