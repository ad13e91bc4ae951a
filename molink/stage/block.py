"""One decoder layer: attention and gated MLP, each on the normed sum of all before it."""

from dataclasses import dataclass

from torch import Tensor
from torch.nn.functional import rms_norm, silu

from molink.model.config import ModelConfig
from molink.stage.attention.base import LayerAttention
from molink.stage.linear import Projection
from molink.stage.pool import KVPool
from molink.stage.rope import rotate
from molink.stage.weights import WeightReader


@dataclass(frozen=True, slots=True)
class ForwardContext:
    """What all layers of one forward share, made once.

    ``slots`` (int64 ``[T]``) is where each row's keys and values go; ``angles`` are the rows'
    rotations, ``[T, 1, 2, head_dim]``.
    """

    pool: KVPool
    slots: Tensor
    angles: Tensor
    attention: LayerAttention


@dataclass(frozen=True, slots=True)
class DecoderBlock:
    """Weights of one layer and how to run it. q, k, v are one projection, gate and up another.

    ``head_norm`` (Qwen3's q and k norms, ``[heads + kv_heads, head_dim]``) is ``None`` elsewhere.
    """

    index: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    input_norm: Tensor
    qkv: Projection
    head_norm: Tensor | None
    output: Projection
    mlp_norm: Tensor
    gate_up: Projection
    down: Projection

    def __call__(self, rows: Tensor, context: ForwardContext) -> Tensor:
        """Run rows ``[T, hidden]`` through the layer; residual and result come out summed."""
        attended = self._attend(self._norm(rows, self.input_norm), context)
        rows = rows + self.output(attended)
        gate, up = self.gate_up(self._norm(rows, self.mlp_norm)).chunk(2, dim=-1)
        return self.down(silu(gate).mul_(up)).add_(rows)

    def _norm(self, rows: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(rows, weight.shape, weight, self.eps)

    def _attend(self, rows: Tensor, context: ForwardContext) -> Tensor:
        heads = self.qkv(rows).view(len(rows), self.heads + 2 * self.kv_heads, self.head_dim)
        turned = heads[:, : self.heads + self.kv_heads]
        if self.head_norm is not None:
            normed = rms_norm(turned, (self.head_dim,), None, self.eps)
            turned.copy_(normed.mul_(self.head_norm))
        rotate(turned, context.angles)
        both = heads[:, self.heads :].view(len(rows), 2, self.kv_heads, self.head_dim)
        context.pool.write(self.index, context.slots, both)
        return context.attention(self.index, heads, context.pool)

    @property
    def nbytes(self) -> int:
        """Bytes of memory."""
        norms = (self.input_norm, self.mlp_norm, self.head_norm)
        projections = (self.qkv, self.output, self.gate_up, self.down)
        return sum(norm.nbytes for norm in norms if norm is not None) + sum(
            projection.nbytes for projection in projections
        )


def load_block(reader: WeightReader, config: ModelConfig, layer: int, index: int) -> DecoderBlock:
    """Load the model's layer ``layer``, which is the stage's ``index``-th."""
    prefix = f"model.layers.{layer}."

    def projection(biased: bool, *names: str) -> Projection:
        return reader.projection([f"{prefix}{name}_proj" for name in names], biased)

    head_norm = None
    if config.qk_norm:
        norms = [f"{prefix}self_attn.{name}_norm.weight" for name in ("q", "k")]
        repeated = [norms[0]] * config.heads + [norms[1]] * config.kv_heads
        head_norm = reader.read(*repeated).view(-1, config.head_dim)
    return DecoderBlock(
        index=index,
        heads=config.heads,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        eps=config.norm_eps,
        input_norm=reader.read(f"{prefix}input_layernorm.weight"),
        qkv=projection(config.attention_bias, "self_attn.q", "self_attn.k", "self_attn.v"),
        head_norm=head_norm,
        output=projection(config.output_bias, "self_attn.o"),
        mlp_norm=reader.read(f"{prefix}post_attention_layernorm.weight"),
        gate_up=projection(config.mlp_bias, "mlp.gate", "mlp.up"),
        down=projection(config.mlp_bias, "mlp.down"),
    )
