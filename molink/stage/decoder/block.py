"""One decoder layer."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from molink.checkpoint.config import ModelConfig
from molink.checkpoint.experts import ExpertsConfig
from molink.checkpoint.tensor_layout import SINKS_NAME, attention_projections, mlp_projections
from molink.stage.attention.base import LayerAttention
from molink.stage.decoder.grouped_experts import GroupedExpertMlp
from molink.stage.decoder.latent import load_latent_attention
from molink.stage.decoder.mlp import BoundedGate, ExpertMlp, GatedMlp, Mlp, SharedExpertMlp
from molink.stage.decoder.norm import AddResidual, IdentityNorm, Norm, QueryKeyNorm
from molink.stage.decoder.operators import AppendHeads, RowOperators
from molink.stage.decoder.router import ExpertRouter
from molink.stage.kv_pool import KVPool
from molink.stage.linear import ExpertLinear, PlainLinear, Projection
from molink.stage.torch_dtypes import residual_dtype
from molink.stage.weights.weight_reader import WeightReader


@dataclass(frozen=True, slots=True)
class ForwardContext:
    """Inputs that all layers of a forward share.

    ``slots`` (int64 ``[T]``) are the rows' KV slots; ``angles`` are their rotations ``[T, 1, 2,
    rotary_dim]`` for each of the model's ropes.
    """

    pool: KVPool
    slots: Tensor
    angles: tuple[Tensor, ...]
    attention: LayerAttention


@dataclass(frozen=True, slots=True)
class DecoderBlock:
    """Weights of one layer; q, k, v are one projection.

    ``rope`` is its index in ``angles``, if it rotates. ``qk_norm`` and ``sinks`` (float32
    ``[heads]``) are optional. ``scale`` multiplies outputs of attention and MLP.
    """

    index: int
    heads: int
    kv_heads: int
    head_dim: int
    rope: int | None
    scale: float
    input_norm: Norm
    qkv: Projection
    qk_norm: QueryKeyNorm | None
    sinks: Tensor | None
    output: Projection
    post_attention_norm: Norm
    mlp_norm: Norm
    mlp: Mlp
    post_mlp_norm: Norm
    add_residual: AddResidual
    append_heads: AppendHeads

    def attend(self, normed: Tensor, context: ForwardContext) -> Tensor:
        """Return what attention adds to the rows; ``normed`` (``[T, hidden]``) are these after
        ``input_norm``."""
        shape = len(normed), self.heads + 2 * self.kv_heads, self.head_dim
        angles = None if self.rope is None else context.angles[self.rope]
        heads = self.append_heads(
            self.qkv(normed).view(shape),
            self.qk_norm,
            angles,
            context.pool,
            self.index,
            context.slots,
        )
        return self.output(context.attention(self.index, heads, context.pool, self.sinks))

    @property
    def nbytes(self) -> int:
        norms = (self.input_norm, self.post_attention_norm, self.mlp_norm, self.post_mlp_norm)
        parts = (*norms, self.qk_norm, self.sinks, self.qkv, self.output, self.mlp)
        return sum(part.nbytes for part in parts if part is not None)


def run_blocks(
    blocks: Sequence[DecoderBlock],
    rows: Tensor,
    context: ForwardContext,
    between_layers: Callable[[], None] | None = None,
) -> Tensor:
    """Run rows ``[T, hidden]`` through layers; call ``between_layers`` after each but the last.

    A sum and the norm that follows, the next layer's too, are one operator. Each tensor takes its
    predecessor's name, so that none outlives its use.
    """
    normed = blocks[0].input_norm(rows)
    next_norms = (*(block.input_norm for block in blocks[1:]), IdentityNorm(rows.dtype))
    for block, next_norm in zip(blocks, next_norms, strict=True):
        normed = block.attend(normed, context)
        rows, normed = block.add_residual(
            rows, normed, block.scale, block.post_attention_norm, block.mlp_norm
        )
        normed = block.mlp(normed)
        rows, normed = block.add_residual(rows, normed, block.scale, block.post_mlp_norm, next_norm)
        if between_layers is not None and block is not blocks[-1]:
            between_layers()
    return rows


def load_block(
    reader: WeightReader, config: ModelConfig, operators: RowOperators, layer: int, index: int
) -> DecoderBlock:
    """Load the model's layer ``layer``, the stage's ``index``-th."""
    prefix = f"model.layers.{layer}."

    def norm(name: str | None, otherwise: torch.dtype = reader.dtype) -> Norm:
        if name is None:
            return IdentityNorm(otherwise)
        return operators.norm(reader.read_tensors(f"{prefix}{name}.weight"))

    qkv, output = _load_attention(reader, config, prefix)
    return DecoderBlock(
        index=index,
        heads=config.heads,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        rope=config.rope_index(layer),
        scale=config.residual_scale,
        input_norm=norm(config.norms.before_attention),
        qkv=qkv,
        qk_norm=_load_qk_norm(reader, config, prefix),
        sinks=reader.read_tensors(prefix + SINKS_NAME).float() if config.sinks else None,
        output=output,
        post_attention_norm=norm(config.norms.after_attention),
        mlp_norm=norm(config.norms.before_mlp),
        mlp=_load_mlp(reader, config, operators, layer, prefix),
        post_mlp_norm=norm(config.norms.after_mlp, residual_dtype(reader.dtype)),
        add_residual=operators.add_residual,
        append_heads=operators.append_heads,
    )


def _load_attention(
    reader: WeightReader, config: ModelConfig, prefix: str
) -> tuple[Projection, Projection]:
    """Load the projections of rows to heads, and of attended heads to rows."""
    if config.latent is not None:
        return load_latent_attention(reader, config, config.latent, prefix)
    names = [prefix + name for name in attention_projections(config)]
    return (
        reader.load_projection(names, config.attention_bias),
        reader.load_projection([f"{prefix}self_attn.o_proj"], config.output_bias),
    )


def _load_qk_norm(reader: WeightReader, config: ModelConfig, prefix: str) -> QueryKeyNorm | None:
    if config.qk_norm == "none":
        return None
    queries, keys = (
        reader.read_tensors(f"{prefix}self_attn.{name}.weight")
        .view(-1, config.head_dim)
        .expand(count, -1)
        for name, count in zip(config.qk_norm_names, (config.heads, config.kv_heads), strict=True)
    )
    return QueryKeyNorm(
        weight=torch.cat((queries, keys)).float().add_(config.norm_offset),
        heads=config.heads,
        across_heads=config.qk_norm == "all heads",
        eps=config.norm_eps,
        after_rotation=config.qk_norm == "each rotated head",
    )


def _load_mlp(
    reader: WeightReader, config: ModelConfig, operators: RowOperators, layer: int, prefix: str
) -> Mlp:
    def gated(names: tuple[str, ...], down: str, biased: bool) -> GatedMlp:
        return GatedMlp(
            gate_up=reader.load_projection([prefix + name for name in names], biased),
            down=reader.load_projection([prefix + down], biased),
            gate=operators.gate,
            bounded_gate=bounded_gate(biased),
        )

    def bounded_gate(biased: bool) -> BoundedGate | None:
        return operators.bounded_gate if scales and not biased else None

    scales = reader.dtype == torch.float16 and config.dtype != "f16"
    experts = config.layer_experts(layer)
    if experts is None:
        return gated(mlp_projections(config), "mlp.down_proj", config.mlp_bias)
    router = _load_router(reader, experts, prefix)
    stacked = _load_stacked(reader, experts, prefix)
    chosen: Mlp
    if stacked is None:
        names = map(experts.expert_projections, range(experts.num_experts))
        every = tuple(gated(both, down, experts.has_bias) for both, down in names)
        chosen = ExpertMlp(router, every)
    else:
        bounded = bounded_gate(experts.has_bias)
        chosen = GroupedExpertMlp(router, *stacked, operators.gate, bounded)
    if not experts.shared_intermediate_size:
        return chosen
    name = experts.shared_gate_name
    weigh = None if name is None else PlainLinear(reader.read_tensors(f"{prefix}{name}.weight"))
    return SharedExpertMlp(chosen, gated(*experts.shared_projections, False), weigh)


def _load_router(reader: WeightReader, experts: ExpertsConfig, prefix: str) -> ExpertRouter:
    """Load a router, never quantized: small errors would change the chosen experts."""
    name, correction = f"{prefix}{experts.router_name}", None
    dtype = torch.float32 if experts.has_wide_router else reader.dtype
    if experts.is_corrected:
        stored = reader.read_tensors(prefix + experts.correction_name, dtype=torch.float32)
        correction = stored.flatten()
    weight = reader.read_tensors(f"{name}.weight", dtype=dtype)
    bias = reader.read_tensors(f"{name}.bias", dtype=dtype) if experts.has_bias else None
    return ExpertRouter(PlainLinear(weight, bias), experts, correction, experts.has_wide_router)


def _load_stacked(
    reader: WeightReader, experts: ExpertsConfig, prefix: str
) -> tuple[ExpertLinear, ExpertLinear] | None:
    """Load the experts' projections stacked, if they are multiplied at once."""
    names = [experts.expert_projections(index) for index in range(experts.num_experts)]
    gate_up = reader.load_experts(
        [[prefix + name for name in both] for both, _ in names], experts.has_bias, experts
    )
    if gate_up is None:
        return None
    down = reader.load_experts([[prefix + name] for _, name in names], experts.has_bias, experts)
    return None if down is None else (gate_up, down)
