"""RMSNorm (Zhang and Sennrich 2019) and LayerNorm (Ba et al. 2016), in the models' precision."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol

import torch
from torch import Tensor
from torch.nn.functional import layer_norm, rms_norm

from molink.checkpoint.config import ModelConfig

if TYPE_CHECKING:
    from molink.stage.cpu_kernels.rowwise import RowwiseKernels


class Norm(Protocol):
    """Normalizes rows ``[T, hidden]`` and scales each dimension."""

    def __call__(self, rows: Tensor) -> Tensor:
        """Return new rows in the compute type."""

    @property
    def nbytes(self) -> int: ...


#: Takes ``rows, result, scale, post_norm, norm``; returns the sum ``rows + scale *
#: post_norm(result)``, and ``norm`` of the sum.
AddResidual = Callable[[Tensor, Tensor, float, Norm, Norm], tuple[Tensor, Tensor]]


@dataclass(frozen=True, slots=True)
class RmsNorm:
    """Computes in the rows' type; ``weight`` has the same type."""

    weight: Tensor
    eps: float

    def __call__(self, rows: Tensor) -> Tensor:
        return rms_norm(rows, self.weight.shape, self.weight, self.eps)

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes


@dataclass(frozen=True, slots=True)
class Float32RmsNorm:
    """Computes in float32 with a float32 ``weight``, and rounds once to ``dtype``."""

    weight: Tensor
    eps: float
    dtype: torch.dtype

    def __call__(self, rows: Tensor) -> Tensor:
        return rms_norm(rows.float(), self.weight.shape, self.weight, self.eps).to(self.dtype)

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes


@dataclass(frozen=True, slots=True)
class LayerNorm:
    """Computes in float32 with float32 weights, and rounds once to ``dtype``."""

    weight: Tensor
    bias: Tensor | None
    eps: float
    dtype: torch.dtype

    def __call__(self, rows: Tensor) -> Tensor:
        normed = layer_norm(rows.float(), self.weight.shape, self.weight, self.bias, self.eps)
        return normed.to(self.dtype)

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)


@dataclass(frozen=True, slots=True)
class CompiledRmsNorm:
    """As :class:`Float32RmsNorm`, compiled for this CPU."""

    weight: Tensor
    rowwise: "RowwiseKernels"

    def __call__(self, rows: Tensor) -> Tensor:
        return self.rowwise.normalize_rows(rows, self.weight)

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes


@dataclass(frozen=True, slots=True)
class IdentityNorm:
    """Replaces an absent norm: converts rows to ``dtype``."""

    dtype: torch.dtype
    nbytes: ClassVar[int] = 0

    def __call__(self, rows: Tensor) -> Tensor:
        return rows if rows.dtype is self.dtype else rows.to(self.dtype)


@dataclass(frozen=True, slots=True)
class QueryKeyNorm:
    """Norms queries and keys in float32, per head or over all heads, before or after rotation.

    ``weight`` is float32 ``[heads + kv_heads, head_dim]``, queries first. With ``is_centered`` the
    mean is subtracted first.
    """

    weight: Tensor
    heads: int
    across_heads: bool
    eps: float
    after_rotation: bool = False
    is_centered: bool = False

    def __call__(self, turned: Tensor) -> None:
        """Norm queries and keys ``[T, heads + kv_heads, head_dim]`` in place."""
        wide = turned.float()
        if self.across_heads:
            parts = (wide[:, : self.heads], wide[:, self.heads :])
            normed = torch.cat([rms_norm(x, x.shape[1:], None, self.eps) for x in parts], dim=1)
        elif self.is_centered:
            normed = layer_norm(wide, wide.shape[2:], None, None, self.eps)
        else:
            normed = rms_norm(wide, wide.shape[2:], None, self.eps)
        turned.copy_(normed.mul_(self.weight))

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes


def create_norm(config: ModelConfig, weight: Tensor) -> Norm:
    """Create a norm of torch operators from the stored weight ``[hidden]``.

    Weights with a norm offset become float32, since the offset would vanish in a 16-bit sum.
    Float16 models have float32 residuals, which are normed in float32.
    """
    if weight.dtype == torch.float32:
        return RmsNorm(weight.add_(config.norm_offset), config.norm_eps)
    if config.norm_offset or weight.dtype == torch.float16:
        wide = weight.float().add_(config.norm_offset)
        return Float32RmsNorm(wide, config.norm_eps, weight.dtype)
    return RmsNorm(weight, config.norm_eps)


def add_residual(
    rows: Tensor, result: Tensor, scale: float, post_norm: Norm, norm: Norm
) -> tuple[Tensor, Tensor]:
    """Add in the rows' type, which is float32 for float16 models; see :data:`AddResidual`."""
    result = post_norm(result)
    memory = result if result.dtype == rows.dtype else None
    rows = torch.add(rows, result, alpha=scale, out=memory)
    return rows, norm(rows)
