"""Assigns rows to weights for a product with several weights. Does not import LLVM."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class WeightTable:
    """Weights of the same ``shape`` (uint8 ``[columns / C, bytes]``).

    ``addresses`` (int64 ``[N, 2]``) has the addresses of each weight and its bias.
    """

    addresses: Tensor
    shape: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Segments:
    """Assigns segments of rows to weights.

    Segment ``s`` multiplies ``counts[s]`` rows by weight ``weights[s]`` (both int64 ``[S]``); the
    counts add up to ``pairs``. Segments are consecutive rows, or with ``shares_rows`` they all
    begin at row 0.
    """

    weights: Tensor
    counts: Tensor
    pairs: int
    shares_rows: bool = False
