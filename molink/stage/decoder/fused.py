"""Row-wise operators as GPU kernels. Imports Triton, so it is imported late."""

from dataclasses import dataclass

import torch
from torch import Tensor

from molink.checkpoint.config import ModelConfig
from molink.checkpoint.traits import Activation
from molink.stage.decoder.append_heads import SeparateAppend
from molink.stage.decoder.mlp import MAX_FLOAT16_INPUT
from molink.stage.decoder.norm import IdentityNorm, Norm, QueryKeyNorm, add_residual
from molink.stage.decoder.rotary import rotate_half, rotate_pairs
from molink.stage.gpu_kernels.row_kernels import (
    add_and_norm,
    append_heads,
    apply_bounded_gate,
    apply_gate,
)
from molink.stage.kv_pool import KVPool


@dataclass(frozen=True, slots=True)
class FusedRmsNorm:
    """As :class:`~molink.stage.decoder.norm.Float32RmsNorm`, in one launch."""

    weight: Tensor
    eps: float
    dtype: torch.dtype

    def __call__(self, rows: Tensor) -> Tensor:
        return add_and_norm(rows, None, None, 1.0, self.weight, self.eps, self.dtype)[1]

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes


@dataclass(frozen=True, slots=True)
class FusedOperators:
    """Operators of a model for rows of ``dtype``; see
    :class:`~molink.stage.decoder.operators.RowOperators`."""

    eps: float
    norm_offset: float
    activation: Activation
    activation_limit: float
    interleaved: bool
    dtype: torch.dtype

    @classmethod
    def from_config(cls, config: ModelConfig, dtype: torch.dtype) -> "FusedOperators":
        """Operators of a model."""
        return cls(
            eps=config.norm_eps,
            norm_offset=config.norm_offset,
            activation=config.activation,
            activation_limit=config.activation_limit,
            interleaved=config.interleaved_rope,
            dtype=dtype,
        )

    def create_norm(self, weight: Tensor) -> Norm:
        """Create a norm from its weight ``[hidden]`` as read."""
        return FusedRmsNorm(weight.float().add_(self.norm_offset), self.eps, self.dtype)

    def apply_gate(self, rows: Tensor) -> Tensor:
        """See :data:`~molink.stage.decoder.mlp.GateFunction`."""
        return apply_gate(rows, self.activation, self.activation_limit)

    def apply_bounded(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """See :data:`~molink.stage.decoder.mlp.BoundedGate`."""
        return apply_bounded_gate(rows, self.activation, self.activation_limit, MAX_FLOAT16_INPUT)

    def add_residual(
        self, rows: Tensor, result: Tensor, scale: float, post_norm: Norm, norm: Norm
    ) -> tuple[Tensor, Tensor]:
        """See :data:`~molink.stage.decoder.norm.AddResidual`."""
        if not (
            isinstance(post_norm, FusedRmsNorm | IdentityNorm)
            and isinstance(norm, FusedRmsNorm | IdentityNorm)
        ):
            return add_residual(rows, result, scale, post_norm, norm)
        post_weight, weight = (
            one.weight if isinstance(one, FusedRmsNorm) else None for one in (post_norm, norm)
        )
        return add_and_norm(rows, result, post_weight, scale, weight, self.eps, norm.dtype)

    def append_heads(
        self,
        heads: Tensor,
        norm: QueryKeyNorm | None,
        angles: Tensor | None,
        pool: KVPool,
        layer: int,
        slots: Tensor,
    ) -> Tensor:
        """See :class:`~molink.stage.decoder.append_heads.AppendHeads`."""
        if norm is not None and norm.after_rotation:
            # The kernel applies the norm before the rotation.
            separate = SeparateAppend(rotate_pairs if self.interleaved else rotate_half)
            return separate(heads, norm, angles, pool, layer, slots)
        weight = None
        if norm is not None and (norm.across_heads or norm.is_centered):
            norm(heads[:, : -pool.kv_heads])
        elif norm is not None:
            weight = norm.weight
        pages, scales = pool.layer_pages(layer), pool.layer_scales(layer)
        return append_heads(heads, weight, self.eps, angles, slots, pages, scales, self.interleaved)
