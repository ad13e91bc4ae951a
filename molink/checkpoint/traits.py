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
#: Norms of queries and keys: over each head or all heads together. ``rotated`` norms follow RoPE.
#: ``centered`` ones subtract the mean and have weights per head. ``unweighted`` ones have no
#: weights, follow RoPE, and exist only in layers with RoPE.
HeadNorm = Literal[
    "none",
    "each head",
    "all heads",
    "each rotated head",
    "each centered head",
    "each unweighted head",
]
#: Norms of rows: RMSNorm, or LayerNorm without or with a bias.
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

    They apply to queries, keys and values; to gate and up; to Mamba-2's gates, values, keys,
    queries and steps; and to Mamba-2's output.
    """

    heads: tuple[float, float, float]
    gate_up: tuple[float, float]
    recurrent: tuple[float, ...]
    recurrent_output: float


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexShape:
    """Sparse attention to ``top_k`` selected positions (DeepSeek-V3.2, arXiv 2512.02556, §2.1).

    A row has ``heads`` index queries of ``dim`` dimensions, projected from the latents of queries,
    and one index key. The first ``rope_dim`` dimensions are rotated, as pairs of neighbours if
    ``interleaved``.
    """

    heads: int
    dim: int
    top_k: int
    interleaved: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentShape:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, §2.1).

    Keys and values of all heads are projected from a latent of ``rank`` numbers per row, queries
    from one of ``query_rank`` (0: from the row itself). In each head, query and key have
    ``plain_dim`` dimensions without rotation and ``rope_dim`` rotated ones, for which all heads
    share one key; values have ``value_dim``. With ``is_split``, the projections to keys
    (transposed) and to values are two tensors. With an ``index``, rows attend to selected positions
    only.
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
        """Numbers per row in the KV cache: rotated key, index key, and latent."""
        return self.rope_dim + (0 if self.index is None else self.index.dim) + self.rank


@dataclass(frozen=True, slots=True, kw_only=True)
class MtpShape:
    """A module for multi-token prediction (MTP; DeepSeek-V3, arXiv 2412.19437, §2.2).

    A projection maps the norms of a token's embedding and of the row before that token to a row; it
    reads ``[row, embedding]`` if ``row_first``. A decoder layer, a norm and the model's output head
    follow. Names of its tensors begin with ``prefix``, those of its layer with ``prefix`` and
    ``layer``; modules with a ``layer`` share the rest. The config's ``count_field`` is their
    number.
    """

    prefix: str
    layer: str = ""
    count_field: str = "num_nextn_predict_layers"
    token_norm: str = "enorm"
    row_norm: str = "hnorm"
    projection: str = "eh_proj"
    output_norm: str = "shared_head.norm"
    row_first: bool = False

    @property
    def layer_prefix(self) -> str:
        """Prefix of its layer's tensors."""
        return self.prefix + self.layer

    def module_prefix(self, index: int) -> str:
        """Return the prefix of the module ``index`` places after this one, or of its layer."""
        names, number = self.layer_prefix.removesuffix(".").rsplit(".", 1)
        return f"{names}.{int(number) + index}."

    def is_stored(self, names: Iterable[str], index: int = 0) -> bool:
        """Whether tensors ``names`` include a module's projection, or the layer of a later module
        that shares it.
        """
        begin = f"{self.module_prefix(index)}{self.projection}."
        if self.layer:
            begin = self.module_prefix(index) if index else f"{self.projection_name}."
        return any(name.startswith(begin) for name in names)

    @property
    def norm_names(self) -> tuple[str, str, str]:
        """Full names of its norms: of embeddings, of rows, and before the output head."""
        names = self.token_norm, self.row_norm, self.output_norm
        first, second, third = (self.prefix + name for name in names)
        return first, second, third

    @property
    def projection_name(self) -> str:
        """Full name of its projection."""
        return self.prefix + self.projection


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilyTraits:
    """Traits in which families differ.

    Attention: ``attention_bias`` is for q, k and v, ``output_bias`` for o, ``head_bias`` for
    logits; ``attention_scale`` multiplies q·k. ``windows`` is per layer, 0 = full attention; with
    ``chunked_windows`` a row attends to earlier rows of its own chunk of that length instead.
    ``sliding_rope`` applies to sliding-window layers if set; ``unrotated_layers`` have no RoPE.
    With ``interleaved_rope``, neighbouring dimensions form pairs, otherwise dimensions half the
    rotated size apart. ``query_scaling`` scales queries by position. With ``sinks`` each query head
    has a learned score that takes part in the softmax only. ``attention_softcap`` and
    ``final_softcap`` bound scores and logits to ``cap * tanh(x / cap)``; 0 = unbounded.

    ``full_heads`` replaces ``kv_heads`` and ``head_dim`` in layers without a window; with
    ``full_keys_are_values`` their keys also serve as values. With ``normed_values`` values have a
    norm without weights.

    With ``latent`` a stage attends in latent space: each query head is projected to it, and the
    only key, of :attr:`LatentShape.head_dim` numbers, also serves as the value. With
    ``gated_heads`` the query projection outputs a gate after each head's query; its sigmoid
    multiplies the head's attention output.

    ``recurrent_layers`` have a recurrent state per request, of the shape ``recurrent``, instead of
    attention; ``recurrent_norms`` replaces their norms. If ``mlp_layers`` is set, these layers
    consist of an MLP only, and the other layers have none. With ``parallel_states`` every layer has
    both attention and a recurrence; they read the same rows, and their outputs are added.

    Layers: with ``parallel_mlp`` attention and MLP read the output of the same norm, and their
    outputs are added. ``activation_limit`` belongs to ``clamped_swiglu``. ``norm_offset`` is added
    to all norm weights. ``residual_scale`` multiplies outputs of attention and MLP; with
    ``scaled_layers`` a learned number multiplies a layer's output. ``merged_qkv`` and
    ``merged_gate_up`` mean single tensors in the checkpoint. ``output_name`` is the name of
    attention's output projection. ``experts`` replace the MLP in some or all layers.

    ``mtp`` is the first of ``draft_layers`` MTP modules; others are not used.

    ``embedding_scale`` multiplies embeddings, ``logit_scale`` logits. With ``tied_embeddings`` the
    embedding is also the output head.
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
        """Return the shape of a layer's key and value heads."""
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
        """Vectors per row in a KV cache: 2 (key and value), or 1 if keys serve as values."""
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
        """Return the index of a layer's rope in ``rope_configs``; ``None`` without RoPE."""
        if layer in self.unrotated_layers:
            return None
        return int(self.sliding_rope is not None and self.layer_window(layer) > 0)

    def layer_window(self, layer: int) -> int:
        """Return a layer's window; the layer of ``mtp``, which follows the last one, has none."""
        return self.windows[layer] if layer < len(self.windows) else 0

    def layer_prefix(self, layer: int) -> str:
        """Return the prefix of a layer's tensor names."""
        if self.mtp is not None and layer == len(self.windows):
            return self.mtp.layer_prefix
        return f"model.layers.{layer}."

    def scales_queries(self, layer: int) -> bool:
        """Whether a layer scales queries by position."""
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
        """Longest request, in tokens, whose keys are rotated by the short list of divisors.

        Nonzero for LongRoPE only, which rotates longer requests by another list.
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
        """Whether layers keep a recurrent state per request besides keys and values.

        A state has no history: requests with a common prefix cannot share it.
        """
        return bool(self.recurrent_layers)

    @property
    def state_elements(self) -> int:
        """Elements of a request's state in a recurrent layer."""
        return 0 if self.recurrent is None else self.recurrent.state_elements

    @property
    def slot_elements(self) -> int:
        """Elements of a request's slot in a recurrent layer."""
        return 0 if self.recurrent is None else self.recurrent.slot_elements

    def count_attention(self, layers: tuple[int, int]) -> int:
        """Count the layers of ``first:last`` that have attention, and so keys and values."""
        return sum(map(self.has_attention, range(*layers)))

    def count_recurrent(self, layers: tuple[int, int]) -> int:
        """Count the layers of ``first:last`` that keep a state."""
        return sum(layer in self.recurrent_layers for layer in range(*layers))

    def layer_norms(self, layer: int) -> LayerNorms:
        """Return the names of a layer's norms."""
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
        """Return a layer's experts; ``None`` if it has a plain MLP."""
        return None if self.experts is None or layer in self.experts.dense_layers else self.experts
