"""Root mean square norms (Zhang and Sennrich 2019), in the precision that their models want."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol

import torch
from torch import Tensor
from torch.nn.functional import rms_norm

from molink.checkpoint.config import ModelConfig

if TYPE_CHECKING:
    from molink.stage.kernels.rowwise import RowwiseKernels


class Norm(Protocol):
    """Scales rows ``[T, hidden]`` to a mean square of 1, then by a weight per dimension."""

    def __call__(self, rows: Tensor) -> Tensor:
        """New rows, in the type of computation."""

    @property
    def nbytes(self) -> int:
        """Bytes of memory."""


@dataclass(frozen=True, slots=True)
class RmsNorm:
    """One call in the rows' own type; ``weight`` has that type too."""

    weight: Tensor
    eps: float

    def __call__(self, rows: Tensor) -> Tensor:
        return rms_norm(rows, self.weight.shape, self.weight, self.eps)

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes


@dataclass(frozen=True, slots=True)
class Float32RmsNorm:
    """Computes in float32, with a float32 ``weight``, and rounds once at the end, to ``dtype``."""

    weight: Tensor
    eps: float
    dtype: torch.dtype

    def __call__(self, rows: Tensor) -> Tensor:
        return rms_norm(rows.float(), self.weight.shape, self.weight, self.eps).to(self.dtype)

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes


@dataclass(frozen=True, slots=True)
class CompiledRmsNorm:
    """As :class:`Float32RmsNorm` on a CPU, in one call."""

    weight: Tensor
    rowwise: "RowwiseKernels"

    def __call__(self, rows: Tensor) -> Tensor:
        return self.rowwise.normalize_rows(rows, self.weight)

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes


@dataclass(frozen=True, slots=True)
class IdentityNorm:
    """Stands where a model has none: rows only take the type of computation, ``dtype``."""

    dtype: torch.dtype
    nbytes: ClassVar[int] = 0

    def __call__(self, rows: Tensor) -> Tensor:
        return rows if rows.dtype is self.dtype else rows.to(self.dtype)


@dataclass(frozen=True, slots=True)
class QueryKeyNorm:
    """Norms of queries and keys, in float32: of each head alone, or of all that are
    ``across_heads``.

    ``weight`` is float32 ``[heads + kv_heads, head_dim]``, whose first ``heads`` are of queries.
    """

    weight: Tensor
    heads: int
    across_heads: bool
    eps: float

    def __call__(self, turned: Tensor) -> None:
        """Norm queries and keys ``[T, heads + kv_heads, head_dim]`` in place."""
        wide = turned.float()
        if self.across_heads:
            parts = (wide[:, : self.heads], wide[:, self.heads :])
            normed = torch.cat([rms_norm(x, x.shape[1:], None, self.eps) for x in parts], dim=1)
        else:
            normed = rms_norm(wide, wide.shape[2:], None, self.eps)
        turned.copy_(normed.mul_(self.weight))

    @property
    def nbytes(self) -> int:
        """Bytes of memory."""
        return self.weight.nbytes


def create_norm(config: ModelConfig, weight: Tensor) -> Norm:
    """A norm by torch's operators, on every device; ``weight`` is as it was read, and is taken.

    A model that adds an offset to its weights stores what would vanish in a 16-bit sum. Rows that
    are computed in float16 are summed in float32, and normed from there.
    """
    if weight.dtype == torch.float32:
        return RmsNorm(weight.add_(config.norm_offset), config.norm_eps)
    if config.norm_offset or weight.dtype == torch.float16:
        wide = weight.float().add_(config.norm_offset)
        return Float32RmsNorm(wide, config.norm_eps, weight.dtype)
    return RmsNorm(weight, config.norm_eps)
