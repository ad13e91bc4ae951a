"""What a decoder has to know of a model beyond its size: facts that hold for all families."""

from dataclasses import dataclass
from typing import Literal

from molink.checkpoint.experts import ExpertsConfig
from molink.checkpoint.rope import RopeConfig

#: How steep the sigmoid of ``clamped_swiglu`` is.
SWIGLU_ALPHA = 1.702
#: Gated MLPs: ``act(gate) * up``. ``clamped_swiglu`` is ``gate * sigmoid(alpha * gate) * (up + 1)``
#: of what is bounded, gate above only; rows of gate and up take turns there.
Activation = Literal["silu", "gelu_tanh", "clamped_swiglu"]
#: What a norm of queries and of keys takes the mean square of.
HeadNorm = Literal["none", "each head", "all heads"]


@dataclass(frozen=True, slots=True)
class LayerNorms:
    """Names of a layer's norms, by what they are applied to; ``None`` where there is none."""

    before_attention: str | None = "input_layernorm"
    after_attention: str | None = None
    before_mlp: str | None = "post_attention_layernorm"
    after_mlp: str | None = None

    @property
    def present_names(self) -> tuple[str, ...]:
        """Those that there are."""
        every = (self.before_attention, self.after_attention, self.before_mlp, self.after_mlp)
        return tuple(name for name in every if name is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilyTraits:
    """The facts that families differ in.

    Attention: ``attention_bias`` is about the q, k and v projections, ``output_bias`` about o;
    ``attention_scale`` is the factor of q·k. ``windows`` has an entry for each layer: how many
    positions a row attends to, its own included, 0 = all before it. ``sliding_rope`` is the rope of
    layers with a window, where they have one of their own; those in ``unrotated_layers`` have none.
    With ``interleaved_rope`` the two dimensions that are turned together are neighbours, else half
    of what is rotated lies between them. With ``sinks`` each query head has a score that takes its
    share of the weights, and gives nothing. ``attention_softcap`` and ``final_softcap`` bound
    scores and logits to ``cap * tanh(x / cap)``; 0 = unbounded.

    Layers: ``activation_limit`` belongs to ``clamped_swiglu``. ``norm_offset`` is added to the
    weights of all norms. What attention and MLP give is multiplied by ``residual_scale``.
    ``merged_qkv`` and ``merged_gate_up``: the checkpoint has them in one tensor. ``experts`` stand
    for the MLP in some or all layers.

    Embeddings are multiplied by ``embedding_scale``, logits by ``logit_scale``;
    ``tied_embeddings``: the embedding is the output head too.
    """

    heads: int
    kv_heads: int
    head_dim: int
    attention_scale: float
    windows: tuple[int, ...]
    rope: RopeConfig
    sliding_rope: RopeConfig | None = None
    unrotated_layers: frozenset[int] = frozenset()
    interleaved_rope: bool = False
    sinks: bool = False
    attention_softcap: float = 0.0
    final_softcap: float = 0.0
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    activation: Activation = "silu"
    activation_limit: float = 0.0
    attention_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: HeadNorm = "none"
    norms: LayerNorms = LayerNorms()
    norm_offset: float = 0.0
    merged_qkv: bool = False
    merged_gate_up: bool = False
    tied_embeddings: bool = False
    experts: ExpertsConfig | None = None

    @property
    def groups(self) -> int:
        """Query heads per key-value head."""
        return self.heads // self.kv_heads

    @property
    def rope_configs(self) -> tuple[RopeConfig, ...]:
        """The ropes that its layers use; see :meth:`rope_index`."""
        return (self.rope,) if self.sliding_rope is None else (self.rope, self.sliding_rope)

    def rope_index(self, layer: int) -> int | None:
        """Which of ``rope_configs`` a layer uses; ``None`` where positions turn nothing."""
        if layer in self.unrotated_layers:
            return None
        return int(self.sliding_rope is not None and self.windows[layer] > 0)

    @property
    def keys_depend_on_length(self) -> bool:
        """Whether keys of equal tokens at equal positions may differ from request to request.

        So with ``dynamic`` scaling, which rotates them for the length that the request had reached.
        """
        return any(rope.kind == "dynamic" for rope in self.rope_configs)

    @property
    def short_context(self) -> int:
        """Up to how many tokens a request's keys are rotated in another way than in longer ones.

        So with LongRoPE, whose two lists of divisors differ; 0 where there is no such bound.
        """
        return min(
            (
                rope.original_context
                for rope in self.rope_configs
                if rope.kind == "longrope" and rope.short_factor != rope.long_factor
            ),
            default=0,
        )

    def layer_experts(self, layer: int) -> ExpertsConfig | None:
        """The experts of a layer; ``None`` where it has a plain MLP."""
        return None if self.experts is None or layer in self.experts.dense_layers else self.experts
