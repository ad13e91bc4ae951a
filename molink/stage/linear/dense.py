"""Unquantized projections: torch's, and those prepacked for oneDNN."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import embedding, linear

from molink.stage.linear.base import pad_rows, total_bytes


@dataclass(frozen=True, slots=True)
class PlainLinear:
    """A projection by torch."""

    weight: Tensor
    bias: Tensor | None = None

    def __call__(self, rows: Tensor) -> Tensor:
        if rows.dtype is torch.bfloat16 and rows.device.type == "cpu":
            return linear(pad_rows(rows), self.weight, self.bias)[: len(rows)]
        return linear(rows, self.weight, self.bias)

    def look_up(self, tokens: Tensor) -> Tensor:
        """Look up rows ``[tokens, hidden]`` of an embedding."""
        return embedding(tokens, self.weight)

    @property
    def nbytes(self) -> int:
        return total_bytes(self.weight, self.bias)


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """A bf16 projection in oneDNN's blocked layout, which halves the time of few rows.

    ``packed`` is opaque; the plain weight is dropped.
    """

    packed: Tensor
    bias: Tensor | None = None

    @classmethod
    def pack_weight(cls, weight: Tensor, bias: Tensor | None) -> "PackedLinear":
        """Pack ``weight`` ``[out, in]``."""
        return cls(torch.ops.mkldnn._reorder_linear_weight(weight, None), bias)

    def __call__(self, rows: Tensor) -> Tensor:
        result: Tensor = torch.ops.mkldnn._linear_pointwise(
            pad_rows(rows), self.packed, self.bias, "none", [], ""
        )
        return result[: len(rows)]

    @property
    def nbytes(self) -> int:
        return total_bytes(self.packed, self.bias)


@torch.inference_mode()
def can_pack(dtype: torch.dtype, device: torch.device) -> bool:
    """Try whether packing works, since the operators are not public API."""
    if device.type != "cpu" or dtype != torch.bfloat16:
        return False
    weight, rows = torch.eye(32, dtype=dtype), torch.arange(64, dtype=dtype).view(2, 32)
    try:
        return torch.equal(PackedLinear.pack_weight(weight, rows[0])(rows), rows + rows[0])
    except (AttributeError, RuntimeError):
        return False
