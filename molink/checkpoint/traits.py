"""What a decoder has to know of a model beyond its size: facts that hold for all families."""

from dataclasses import dataclass
from typing import Literal

from molink.checkpoint.experts import Experts
from molink.checkpoint.rope import RopeConfig

#: Gated MLPs: ``act(gate) * up``.
Activation = Literal["silu", "gelu_tanh"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """The facts that families differ in.

    Attention: ``attention_bias`` is about the q, k and v projections, ``output_bias`` about o;
    ``attention_scale`` is the factor of q·k. ``windows`` has an entry for each layer: how many
    positions a row attends to, its own included, 0 = all before it. ``local_rope`` is the rope of
    layers with a window, where they have one of their own. ``attention_softcap`` and
    ``final_softcap`` bound scores and logits to ``cap * tanh(x / cap)``; 0 = unbounded.

    Layers: ``sandwich_norms`` are two more, of what attention and MLP give. ``norm_offset`` is
    added to the weights of all norms. ``merged``: the checkpoint has q, k and v in one tensor, gate
    and up in another. ``experts`` stand for the MLP in some or all layers.

    Embeddings are multiplied by ``embedding_scale``; ``tied``: they are the output head too.
    """

    heads: int
    kv_heads: int
    head_dim: int
    attention_scale: float
    windows: tuple[int, ...]
    rope: RopeConfig
    local_rope: RopeConfig | None = None
    attention_softcap: float = 0.0
    final_softcap: float = 0.0
    embedding_scale: float = 1.0
    activation: Activation = "silu"
    attention_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sandwich_norms: bool = False
    norm_offset: float = 0.0
    merged: bool = False
    tied: bool = False
    experts: Experts | None = None

    @property
    def groups(self) -> int:
        """Query heads per key-value head."""
        return self.heads // self.kv_heads

    @property
    def ropes(self) -> tuple[RopeConfig, ...]:
        """The ropes that its layers use; see :meth:`rope_of`."""
        return (self.rope,) if self.local_rope is None else (self.rope, self.local_rope)

    def rope_of(self, layer: int) -> int:
        """Which of ``ropes`` a layer uses."""
        return int(self.local_rope is not None and self.windows[layer] > 0)

    @property
    def keys_depend_on_length(self) -> bool:
        """Whether keys of equal tokens at equal positions may differ from request to request.

        So with ``dynamic`` scaling, which rotates them for the length that the request had reached.
        """
        return any(rope.kind == "dynamic" for rope in self.ropes)

    @property
    def short_context(self) -> int:
        """Up to how many tokens a request's keys are rotated in another way than in longer ones.

        So with LongRoPE, whose two lists of divisors differ; 0 where there is no such bound.
        """
        return min(
            (
                rope.original_context
                for rope in self.ropes
                if rope.kind == "longrope" and rope.short_factor != rope.long_factor
            ),
            default=0,
        )

    def experts_of(self, layer: int) -> Experts | None:
        """The experts of a layer; ``None`` where it has a plain MLP."""
        return None if self.experts is None or layer in self.experts.dense else self.experts
