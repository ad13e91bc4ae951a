"""Model properties that the decoder depends on, for all families."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from molink.checkpoint.experts import ExpertsConfig
from molink.checkpoint.recurrent import RecurrentShape
from molink.checkpoint.rope import QueryScaling, RopeConfig

#: Slope of ``clamped_swiglu``'s sigmoid.
SWIGLU_ALPHA = 1.702
#: Gated MLPs: ``act(gate) * up``. ``clamped_swiglu`` is ``gate * sigmoid(alpha * gate) * (up + 1)``
#: with clamped inputs (gate only from above); gate and up rows are interleaved.
#: ``relu2``, the square of a positive number, has no gate: ``act(up)``.
Activation = Literal["silu", "gelu_tanh", "clamped_swiglu", "relu2"]
#: Over which elements query and key norms take the mean square, and whether after rotation or less
#: the mean; centered heads have weights of their own. Unweighted ones follow rotation and are only
#: where there is one.
HeadNorm = Literal[
    "none",
    "each head",
    "all heads",
    "each rotated head",
    "each centered head",
    "each unweighted head",
]
#: Norms of rows: by the mean square, or LayerNorm without and with a bias.
NormKind = Literal["rms", "layer", "biased layer"]


@dataclass(frozen=True, slots=True)
class LayerNorms:
    """Names of a layer's norms by position; ``None`` if absent."""

    before_attention: str | None = "input_layernorm"
    after_attention: str | None = None
    before_mlp: str | None = "post_attention_layernorm"
    after_mlp: str | None = None

    @property
    def present_names(self) -> tuple[str, ...]:
        """Names that are present."""
        every = (self.before_attention, self.after_attention, self.before_mlp, self.after_mlp)
        return tuple(name for name in every if name is not None)


@dataclass(frozen=True, slots=True)
class HeadShape:
    """Heads of keys and values, and the dimensions of each head."""

    kv_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True)
class MlpNames:
    """Names of a plain MLP and of its projections."""

    module: str = "mlp"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    #: Gate and up as one tensor.
    gate_up: str = "gate_up_proj"


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputFactors:
    """Constant factors of projections' outputs (Falcon-H1).

    Those of queries, keys and values; of gates and ups; of gates, values, keys, queries and steps
    of Mamba-2, and of what it returns.
    """

    heads: tuple[float, float, float]
    gate_up: tuple[float, float]
    recurrent: tuple[float, ...]
    recurrent_output: float


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexShape:
    """Choice of ``top_k`` positions that a row attends to (DeepSeek-V3.2, arXiv 2512.02556, §2.1).

    There are ``heads`` index queries of ``dim`` dimensions, from the latents of queries, and one
    index key; the first ``rope_dim`` dimensions are rotated, neighbours with each other if
    ``interleaved``.
    """

    heads: int
    dim: int
    top_k: int
    interleaved: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentShape:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, §2.1).

    Keys and values of all heads come from ``rank`` numbers of a row, queries from ``query_rank``
    (0: from the row itself). Each head has ``plain_dim`` dimensions of query and key, besides
    ``rope_dim`` that are rotated, of one key for all heads; and ``value_dim`` of values. If it
    ``is_split``, projections to keys (transposed) and to values are two tensors. With an ``index``
    rows attend to chosen positions only.
    """

    rank: int
    query_rank: int
    rope_dim: int
    plain_dim: int
    value_dim: int
    is_split: bool = False
    index: IndexShape | None = None

    @property
    def head_dim(self) -> int:
        """Numbers that the KV cache keeps of a row: rotated ones, an index key, and latents."""
        return self.rope_dim + (0 if self.index is None else self.index.dim) + self.rank


@dataclass(frozen=True, slots=True, kw_only=True)
class MtpShape:
    """A module for multi-token prediction (MTP; DeepSeek-V3, arXiv 2412.19437, §2.2).

    It is a layer whose tensors begin with ``prefix``, with norms of a token's embedding and of the
    row before that token, a projection of both to a row (of ``[row, embedding]`` if ``row_first``),
    and a norm before the model's output head.
    """

    prefix: str
    token_norm: str = "enorm"
    row_norm: str = "hnorm"
    projection: str = "eh_proj"
    output_norm: str = "shared_head.norm"
    row_first: bool = False

    def module_prefix(self, index: int) -> str:
        """The prefix of another module, counted from this one."""
        names, number = self.prefix.removesuffix(".").rsplit(".", 1)
        return f"{names}.{int(number) + index}."

    def is_stored(self, names: Iterable[str], index: int = 0) -> bool:
        """Whether tensors ``names`` include a module's projection."""
        projection = f"{self.module_prefix(index)}{self.projection}."
        return any(name.startswith(projection) for name in names)

    @property
    def norm_names(self) -> tuple[str, str, str]:
        """Whole names of its norms: of embeddings, of rows, and before the output head."""
        names = self.token_norm, self.row_norm, self.output_norm
        first, second, third = (self.prefix + name for name in names)
        return first, second, third

    @property
    def projection_name(self) -> str:
        """Whole name of its projection."""
        return self.prefix + self.projection


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilyTraits:
    """Traits in which families differ.

    Attention: ``attention_bias`` is for q, k and v, ``output_bias`` for o, ``head_bias`` for
    logits; ``attention_scale`` multiplies q·k. ``windows`` is per layer, 0 = full attention;
    with ``chunked_windows`` a row attends to its own chunk of so many positions instead.
    ``sliding_rope`` applies to sliding-window layers if set; ``unrotated_layers`` have no RoPE.
    With ``interleaved_rope``, pairs of neighbours are rotated, else dimensions half the rotated
    size apart. ``query_scaling`` makes queries grow with their position. With ``sinks``
    each query head has a learned score that takes part in the softmax only. ``attention_softcap``
    and ``final_softcap`` bound scores and logits to ``cap * tanh(x / cap)``; 0 = unbounded.

    Layers without a window may have other ``full_heads`` than ``kv_heads`` and ``head_dim`` say,
    and keys as their values with ``full_keys_are_values``. With ``normed_values`` values have a
    norm without weights.

    With ``latent`` a stage attends in latent space: each query head is projected to it, and there
    is one key of :attr:`LatentShape.head_dim` numbers, which serves as the value, too. With
    ``gated_heads`` the query projection has a gate behind each head's query, whose sigmoid weighs
    what the head attended to.

    ``recurrent_layers`` keep a state of each request, shaped as ``recurrent`` says, instead of
    attention, and may have other ``recurrent_norms``. If ``mlp_layers`` are given, these are
    nothing but an MLP, and others have none. With ``parallel_states`` all layers are recurrent and
    have attention, too; both read the same rows, and their results are added.

    Layers: with ``parallel_mlp`` attention and MLP have one norm before them, and their results are
    added. ``activation_limit`` belongs to ``clamped_swiglu``. ``norm_offset`` is added to all norm
    weights. ``residual_scale`` multiplies outputs of attention and MLP; with ``scaled_layers`` a
    learned number multiplies what a layer returns. ``merged_qkv`` and
    ``merged_gate_up`` mean single tensors in the checkpoint. ``output_name`` is that of
    attention's projection to rows. ``experts`` replace the MLP in some or all layers.

    ``mtp`` is the first of ``draft_layers`` MTP modules; others are not used.

    ``embedding_scale`` multiplies embeddings, ``logit_scale`` logits. With ``tied_embeddings`` the
    embedding is the output head, too.
    """

    heads: int
    kv_heads: int
    head_dim: int
    attention_scale: float
    windows: tuple[int, ...]
    rope: RopeConfig
    chunked_windows: bool = False
    full_heads: HeadShape | None = None
    full_keys_are_values: bool = False
    normed_values: bool = False
    sliding_rope: RopeConfig | None = None
    unrotated_layers: frozenset[int] = frozenset()
    interleaved_rope: bool = False
    query_scaling: QueryScaling | None = None
    sinks: bool = False
    attention_softcap: float = 0.0
    final_softcap: float = 0.0
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    scaled_layers: bool = False
    logit_scale: float = 1.0
    activation: Activation = "silu"
    activation_limit: float = 0.0
    attention_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    head_bias: bool = False
    latent: LatentShape | None = None
    gated_heads: bool = False
    recurrent: RecurrentShape | None = None
    recurrent_layers: frozenset[int] = frozenset()
    mlp_layers: frozenset[int] | None = None
    parallel_states: bool = False
    output_factors: OutputFactors | None = None
    qk_norm: HeadNorm = "none"
    qk_norm_names: tuple[str, str] = ("q_norm", "k_norm")
    norms: LayerNorms = LayerNorms()
    recurrent_norms: LayerNorms | None = None
    norm_kind: NormKind = "rms"
    norm_offset: float = 0.0
    parallel_mlp: bool = False
    merged_qkv: bool = False
    merged_gate_up: bool = False
    output_name: str = "o_proj"
    mlp_names: MlpNames = MlpNames()
    tied_embeddings: bool = False
    experts: ExpertsConfig | None = None
    draft_layers: int = 0
    mtp: MtpShape | None = None

    def head_shape(self, layer: int) -> HeadShape:
        """A layer's heads of keys and values."""
        if self.full_heads is None or self.layer_window(layer):
            return HeadShape(self.kv_heads, self.head_dim)
        return self.full_heads

    def keys_are_values(self, layer: int) -> bool:
        """Whether a layer's values are its keys before their norm and rotation."""
        return self.full_keys_are_values and not self.layer_window(layer)

    @property
    def groups(self) -> int:
        """Query heads per key-value head."""
        return self.heads // self.kv_heads

    @property
    def kv_kinds(self) -> int:
        """Vectors of a row in a KV cache: 2, key and value, or 1 if keys serve as values."""
        return 1 if self.latent is not None else 2

    @property
    def rope_configs(self) -> tuple[RopeConfig, ...]:
        """Distinct ropes of the layers; see :meth:`rope_index`."""
        return (self.rope,) if self.sliding_rope is None else (self.rope, self.sliding_rope)

    @property
    def rope_head_dims(self) -> tuple[int, ...]:
        """Dimensions of the heads that each of ``rope_configs`` rotates."""
        full = self.head_dim if self.full_heads is None else self.full_heads.head_dim
        return (full,) if self.sliding_rope is None else (full, self.head_dim)

    def rope_index(self, layer: int) -> int | None:
        """Index of a layer's rope in ``rope_configs``; ``None`` without RoPE."""
        if layer in self.unrotated_layers:
            return None
        return int(self.sliding_rope is not None and self.layer_window(layer) > 0)

    def layer_window(self, layer: int) -> int:
        """A layer's window; that of ``mtp``, which follows the last layer, attends to all."""
        return self.windows[layer] if layer < len(self.windows) else 0

    def layer_prefix(self, layer: int) -> str:
        """What the names of a layer's tensors begin with."""
        if self.mtp is not None and layer == len(self.windows):
            return self.mtp.prefix
        return f"model.layers.{layer}."

    def scales_queries(self, layer: int) -> bool:
        """Whether a layer's queries grow with their position."""
        scaling = self.query_scaling
        if scaling is None:
            return False
        return layer in self.unrotated_layers or not scaling.unrotated_only

    @property
    def keys_depend_on_length(self) -> bool:
        """Whether keys depend on the request's length, not only on tokens and positions.

        True for ``dynamic`` scaling, which rotates for the current length.
        """
        return any(rope.kind == "dynamic" for rope in self.rope_configs)

    @property
    def short_context(self) -> int:
        """Length up to which a request's keys are rotated differently than in longer ones.

        Set for LongRoPE, which has two lists of divisors; else 0.
        """
        return min(
            (
                rope.original_context
                for rope in self.rope_configs
                if rope.kind == "longrope" and rope.short_factor != rope.long_factor
            ),
            default=0,
        )

    @property
    def keeps_states(self) -> bool:
        """Whether layers keep a state of each request besides keys and values.

        It has no history: neither can it be shared by requests with the same beginning, nor can
        rows be taken back.
        """
        return bool(self.recurrent_layers)

    @property
    def state_elements(self) -> int:
        """Elements of a request's state in a recurrent layer."""
        return 0 if self.recurrent is None else self.recurrent.state_elements

    def count_attention(self, layers: tuple[int, int]) -> int:
        """Layers of ``first:last`` that have attention, and so keys and values."""
        return sum(map(self.has_attention, range(*layers)))

    def count_recurrent(self, layers: tuple[int, int]) -> int:
        """Layers of ``first:last`` that keep a state."""
        return sum(layer in self.recurrent_layers for layer in range(*layers))

    def layer_norms(self, layer: int) -> LayerNorms:
        """Names of a layer's norms."""
        other = self.recurrent_norms if layer in self.recurrent_layers else None
        return other or self.norms

    def has_attention(self, layer: int) -> bool:
        """Whether a layer has attention."""
        if layer in (self.mlp_layers or ()):
            return False
        return self.parallel_states or layer not in self.recurrent_layers

    def has_mlp(self, layer: int) -> bool:
        """Whether a layer has an MLP, or experts."""
        return self.mlp_layers is None or layer in self.mlp_layers

    @property
    def is_gated(self) -> bool:
        """Whether MLPs have gates."""
        return self.activation != "relu2"

    def layer_experts(self, layer: int) -> ExpertsConfig | None:
        """A layer's experts; ``None`` if it has a plain MLP."""
        return None if self.experts is None or layer in self.experts.dense_layers else self.experts
