"""Projections that have their weights twice: for many rows, and for the few of a decode step."""

import time

import torch
from torch import Tensor

from molink.stage.linear.base import total_bytes
from molink.stage.linear.packed import PackedLinear

#: Rows up to which the second copy is the faster one: beyond, its fp32 arithmetic takes longer.
FEW_ROWS = 3
#: Largest weight that fp16 holds.
_MOST = 65504.0
#: What the second copy has to save to be worth its memory: a fifth of the time.
_WORTH = 0.8
_TRIED, _ROWS, _WIDTH = 8, 4096, 1024


class TwinLinear:
    """A bf16 projection: oneDNN's layout, and beside it FBGEMM's with fp16 weights for few rows.

    With one row oneDNN streams weights at 60 % of what the memory gives on some CPUs (Zen 4), where
    FBGEMM, which prefetches them, reaches it. The price is the memory of a second copy.
    """

    __slots__ = ("_few", "_many")

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        """Of ``weight`` ``[out, in]``, which isn't needed afterwards."""
        self._many = PackedLinear.pack(weight, bias)
        wide = None if bias is None else bias.float()
        self._few = torch.ops.quantized.linear_prepack_fp16(weight.float(), wide)

    def __call__(self, rows: Tensor) -> Tensor:
        """See :class:`~molink.stage.linear.base.Projection`."""
        if len(rows) > FEW_ROWS:
            return self._many(rows)
        result: Tensor = torch.ops.quantized.linear_dynamic_fp16(rows.float(), self._few)
        return result.to(rows.dtype)

    @property
    def nbytes(self) -> int:
        """See :class:`~molink.stage.linear.base.Projection`."""
        return self._many.nbytes + total_bytes(self._many.packed)


def can_twin(weight: Tensor) -> bool:
    """Whether fp16 holds all of a weight."""
    return weight.abs().amax().item() <= _MOST


@torch.inference_mode()
def twin_pays() -> bool:
    """Whether the second copy is worth it here: tried, on weights that no cache holds."""
    weight = torch.ones(_ROWS, _WIDTH, dtype=torch.bfloat16)
    row = torch.ones(1, _WIDTH, dtype=torch.bfloat16)
    try:
        twins = [TwinLinear(weight, None) for _ in range(_TRIED)]
        if not torch.equal(twins[0](row), twins[0]._many(row)):
            return False
    except (AttributeError, RuntimeError):
        return False
    few = many = float("inf")
    for _ in range(5):
        begin = time.perf_counter()
        for twin in twins:
            twin(row)
        middle = time.perf_counter()
        for twin in twins:
            twin._many(row)
        few, many = min(few, middle - begin), min(many, time.perf_counter() - middle)
    return few < _WORTH * many
