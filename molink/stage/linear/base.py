"""Interfaces of projections and embeddings."""

from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from molink.facts.dtypes import WeightDType

#: Tolerances of products relative to the largest result, for rounding and summation errors.
PRODUCT_TOLERANCES: dict[WeightDType, float] = {"f32": 1e-5, "f16": 2e-3, "bf16": 2**-7}


class Projection(Protocol):
    """Multiplies rows ``[T, in]`` by a weight ``[out, in]`` and adds an optional bias."""

    def __call__(self, rows: Tensor) -> Tensor:
        """Return rows ``[T, out]``."""

    @property
    def nbytes(self) -> int:
        """Bytes of memory."""


class EmbeddingTable(Protocol):
    """A weight ``[vocabulary, hidden]`` with row access."""

    def look_up(self, tokens: Tensor) -> Tensor:
        """Return new rows ``[T, hidden]`` of ids (int64 ``[T]``, on the device)."""

    @property
    def nbytes(self) -> int:
        """Bytes of memory."""


def pad_rows(rows: Tensor) -> Tensor:
    """Pad ``rows`` with zeros to one of few row counts.

    oneDNN compiles a kernel of about 0.5 MB per shape and caches 1024 of them. With micro-batches
    of all sizes, a worker's memory grew by a quarter over 500 requests.
    """
    count = len(rows)
    if count <= 16:
        return rows
    step = 16 if count <= 128 else 64
    return pad(rows, (0, 0, 0, -count % step))


def total_bytes(*tensors: Tensor | None) -> int:
    """Return the bytes of the given tensors."""
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)


#: Offset between the random numbers of consecutive rows.
_ROW_SHIFT = 7


def make_random_weight(out: int, width: int, generator: torch.Generator) -> Tensor:
    """Create a float32 test weight ``[out, width]``; rows are shifted copies, for speed."""
    drawn = torch.randn(out * _ROW_SHIFT + width, generator=generator)
    return drawn.as_strided((out, width), (_ROW_SHIFT, 1)).contiguous()
