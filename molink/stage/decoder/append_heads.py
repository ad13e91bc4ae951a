"""Norms and rotates queries and keys, and appends keys and values to the KV pool."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from molink.stage.cpu_kernels.kernel_shape import supports_rowwise
from molink.stage.decoder.norm import QueryKeyNorm
from molink.stage.decoder.rotary import Rotate
from molink.stage.kv_pool import KVPool


class AppendHeads(Protocol):
    """Norms and rotates queries and keys, and appends keys and values to the KV cache."""

    def __call__(
        self,
        heads: Tensor,
        norm: QueryKeyNorm | None,
        angles: Tensor | None,
        pool: KVPool,
        layer: int,
        slots: Tensor,
    ) -> Tensor:
        """Process ``heads`` (``[T, n, head_dim]``: queries, keys, values), possibly in place.

        Keys and values are then in ``pool`` at ``slots`` (int64 ``[T]``) of ``layer``.
        """


@dataclass(frozen=True, slots=True)
class SeparateAppend:
    """Separate operators, which work in place.

    ``norm_heads`` is a faster norm than torch's with a separate weight per head (``[n,
    head_dim]``).
    """

    rotate: Rotate
    norm_heads: Callable[[Tensor, Tensor], None] | None = None

    def __call__(
        self,
        heads: Tensor,
        norm: QueryKeyNorm | None,
        angles: Tensor | None,
        pool: KVPool,
        layer: int,
        slots: Tensor,
    ) -> Tensor:
        turned = heads[:, : -pool.kv_heads]
        if norm is not None and not norm.after_rotation:
            self._apply_norm(norm, turned)
        if angles is not None:
            self.rotate(turned, angles)
        if norm is not None and norm.after_rotation:
            self._apply_norm(norm, turned)
        both = heads[:, -2 * pool.kv_heads :].view(len(heads), 2, pool.kv_heads, pool.head_dim)
        pool.write_rows(layer, slots, both)
        return heads

    def _apply_norm(self, norm: QueryKeyNorm, turned: Tensor) -> None:
        fits = supports_rowwise(turned.shape[2:], ())
        if self.norm_heads is None or norm.across_heads or norm.is_centered or not fits:
            norm(turned)
        else:
            self.norm_heads(turned, norm.weight)
