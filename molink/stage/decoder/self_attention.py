"""Attention of a layer over the KV pool."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import rms_norm

from molink.checkpoint.config import ModelConfig
from molink.checkpoint.tensor_layout import (
    SINKS_NAME,
    attention_output,
    attention_projections,
)
from molink.stage.decoder.append_heads import AppendHeads
from molink.stage.decoder.latent import load_latent_attention
from molink.stage.decoder.mixer import ForwardContext
from molink.stage.decoder.norm import QueryKeyNorm
from molink.stage.decoder.scaled import scale_outputs
from molink.stage.linear import Projection, apply_projection
from molink.stage.weights.weight_reader import WeightReader


@dataclass(frozen=True, slots=True)
class SelfAttention:
    """Weights of a layer's attention; q, k and v are one projection.

    ``rope`` is the layer's index in ``angles``, if it has RoPE. ``qk_norm`` and ``sinks`` (float32
    ``[heads]``) are optional. With ``gated_heads``, a gate follows each head's query. With
    ``scales_queries``, the last of ``angles`` has the queries' factors. With ``copies_keys``, the
    projected keys also serve as values. ``value_norm`` is the epsilon of the values' norm, if they
    have one. ``capturable`` requires equal heads in all layers.
    """

    index: int
    heads: int
    kv_heads: int
    head_dim: int
    rope: int | None
    qkv: Projection
    qk_norm: QueryKeyNorm | None
    sinks: Tensor | None
    output: Projection
    append_heads: AppendHeads
    gated_heads: bool = False
    scales_queries: bool = False
    copies_keys: bool = False
    value_norm: float | None = None
    capturable: bool = True

    def __call__(self, normed: Tensor, context: ForwardContext) -> Tensor:
        """See :class:`~molink.stage.decoder.mixer.Mixer`."""
        rows, gates = apply_projection(self.qkv, normed, context.adapters), None
        if self.gated_heads:
            rows, gates = self._split_gates(rows)
        if self.copies_keys:
            rows = torch.cat((rows, rows[:, -self.kv_heads * self.head_dim :]), dim=1)
        heads = rows.view(len(normed), self.heads + 2 * self.kv_heads, self.head_dim)
        if self.value_norm is not None:
            values = heads[:, -self.kv_heads :]
            values.copy_(rms_norm(values.float(), values.shape[2:], None, self.value_norm))
        angles = None if self.rope is None else context.angles[self.rope]
        pool, index = context.pool.locate_layer(self.index)
        heads = self.append_heads(heads, self.qk_norm, angles, pool, index, context.slots)
        if self.scales_queries:
            heads[:, : self.heads].mul_(context.angles[-1])
        attended = context.attention(self.index, heads, pool, self.sinks)
        attended = attended if gates is None else attended * gates
        return apply_projection(self.output, attended, context.adapters)

    @property
    def nbytes(self) -> int:
        parts = (self.qkv, self.qk_norm, self.sinks, self.output)
        return sum(part.nbytes for part in parts if part is not None)

    def with_index(self, index: int) -> "SelfAttention":
        """See :class:`~molink.stage.decoder.mixer.Mixer`."""
        return replace(self, index=index)

    def _split_gates(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Split the gates off.

        Returns rows ``[T, (heads + 2 * kv_heads) * head_dim]`` and the gates' sigmoids ``[T, heads
        * head_dim]``.
        """
        size = self.heads * self.head_dim
        both = rows[:, : 2 * size].view(len(rows), self.heads, 2, self.head_dim)
        queries, gates = both.unbind(2)
        merged = torch.cat((queries.flatten(1), rows[:, 2 * size :]), dim=1)
        return merged, gates.flatten(1).sigmoid()


def load_attention(
    reader: WeightReader,
    config: ModelConfig,
    append_heads: AppendHeads,
    layer: int,
    index: int,
) -> SelfAttention:
    """Load attention of the model's layer ``layer``, which has index ``index`` in the KV pool."""
    prefix = config.layer_prefix(layer)
    qkv, output = _load_projections(reader, config, layer)
    shape = config.head_shape(layer)
    return SelfAttention(
        index=index,
        heads=config.heads,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        rope=config.rope_index(layer),
        qkv=qkv,
        qk_norm=_load_qk_norm(reader, config, layer),
        sinks=reader.read_tensors(prefix + SINKS_NAME).float() if config.sinks else None,
        output=output,
        append_heads=append_heads,
        gated_heads=config.gated_heads,
        scales_queries=config.scales_queries(layer),
        copies_keys=config.keys_are_values(layer),
        value_norm=config.norm_eps if config.normed_values else None,
        capturable=config.full_heads is None,
    )


def _load_projections(
    reader: WeightReader, config: ModelConfig, layer: int
) -> tuple[Projection, Projection]:
    """Load the projections from rows to heads, and from attention outputs to rows."""
    prefix = config.layer_prefix(layer)
    if config.latent is not None:
        return load_latent_attention(reader, config, config.latent, prefix)
    names = [prefix + name for name in attention_projections(config, layer)]
    qkv = reader.load_projection(names, config.attention_bias)
    if config.output_factors is not None:
        sizes = [config.head_dim * n for n in (config.heads, config.kv_heads, config.kv_heads)]
        qkv = scale_outputs(qkv, sizes, config.output_factors.heads, reader)
    return qkv, reader.load_projection([prefix + attention_output(config)], config.output_bias)


def _load_qk_norm(reader: WeightReader, config: ModelConfig, layer: int) -> QueryKeyNorm | None:
    shape = config.head_shape(layer)
    if config.qk_norm == "none":
        return None
    if config.qk_norm == "each unweighted head":
        if config.rope_index(layer) is None:
            return None
        weight = torch.ones(config.heads + shape.kv_heads, shape.head_dim, device=reader.device)
    else:
        queries, keys = (
            reader.read_tensors(f"{config.layer_prefix(layer)}self_attn.{name}.weight")
            .view(-1, shape.head_dim)
            .expand(count, -1)
            for name, count in zip(
                config.qk_norm_names, (config.heads, shape.kv_heads), strict=True
            )
        )
        weight = torch.cat((queries, keys)).float().add_(config.norm_offset)
    return QueryKeyNorm(
        weight=weight,
        heads=config.heads,
        across_heads=config.qk_norm == "all heads",
        eps=config.norm_eps,
        after_rotation=config.qk_norm in ("each rotated head", "each unweighted head"),
        is_centered=config.qk_norm == "each centered head",
    )
