"""Projections that have their weights twice: for many rows, and for the few of a decode step."""

import time
import warnings

import torch
from torch import Tensor

from molink.stage.linear.base import total_bytes
from molink.stage.linear.packed import PackedLinear

#: Rows up to which the second copy is the faster one: beyond, its fp32 arithmetic takes longer.
FEW_ROWS = 3
#: Largest weight that fp16 holds.
_MOST = 65504.0
#: What the second copy has to save to be worth its memory: a seventh of the time.
_WORTH = 0.85
_TRIED, _REPEATED, _ROWS, _WIDTH = 8, 9, 4096, 1024


class TwinLinear:
    """A bf16 projection: oneDNN's layout, and beside it FBGEMM's with fp16 weights for few rows.

    With one row oneDNN streams weights at 60 % of what the memory gives on some CPUs (Zen 4), where
    FBGEMM, which prefetches them, reaches it. The price is the memory of a second copy.
    """

    __slots__ = ("_bias", "_few", "_many")

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        """Of ``weight`` ``[out, in]``, which isn't needed afterwards."""
        self._many = PackedLinear.pack(weight, bias)
        self._bias = None if bias is None else bias.float()
        # Both functions warn once in a process that they are deprecated; see `twin_pays`.
        with warnings.catch_warnings(action="ignore"):
            self._few = torch.fbgemm_pack_gemm_matrix_fp16(weight.float())
            self.few(weight[:1])

    def __call__(self, rows: Tensor) -> Tensor:
        """See :class:`~molink.stage.linear.base.Projection`."""
        return self.few(rows) if len(rows) <= FEW_ROWS else self._many(rows)

    def few(self, rows: Tensor) -> Tensor:
        """By the second copy."""
        result = torch.fbgemm_linear_fp16_weight_fp32_activation(
            rows.float(), self._few, self._bias
        )
        return result.to(rows.dtype)

    def many(self, rows: Tensor) -> Tensor:
        """By the first."""
        return self._many(rows)

    @property
    def nbytes(self) -> int:
        """See :class:`~molink.stage.linear.base.Projection`."""
        return self._many.nbytes + total_bytes(self._many.packed)


def can_twin(weight: Tensor) -> bool:
    """Whether fp16 holds all of a weight."""
    return weight.abs().amax().item() <= _MOST


@torch.inference_mode()
def twin_pays() -> bool:
    """Whether the second copy is worth it here: tried, on weights that no cache holds.

    These functions of torch are deprecated (``torch.ops.quantized`` has the same ones, but each
    call takes 15 µs more): without them there is one copy only.
    """
    weight = torch.ones(_ROWS, _WIDTH, dtype=torch.bfloat16)
    row = torch.ones(1, _WIDTH, dtype=torch.bfloat16)
    try:
        twins = [TwinLinear(weight, None) for _ in range(_TRIED)]
        if not torch.equal(twins[0].few(row), twins[0].many(row)):
            return False
    except (AttributeError, RuntimeError, TypeError):
        return False
    few, many = float("inf"), float("inf")
    for _ in range(_REPEATED):
        for twin in twins:
            begin = time.perf_counter()
            twin.few(row)
            middle = time.perf_counter()
            twin.many(row)
            few = min(few, middle - begin)
            many = min(many, time.perf_counter() - middle)
    return few < _WORTH * many
