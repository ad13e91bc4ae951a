"""Rows and the weights that multiply them, of a product with several weights; without LLVM."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class WeightTable:
    """Weights of one ``shape`` (uint8 ``[columns / C, bytes]``).

    ``addresses`` (int64 ``[N, 2]``) are those of the weights and their biases.
    """

    addresses: Tensor
    shape: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Segments:
    """Which weights multiply which rows.

    ``counts`` (int64 ``[S]``) of ``pairs`` rows in total belong to weight ``weights`` (int64
    ``[S]``): one segment after the other, or with ``shares_rows`` the first ones to each.
    """

    weights: Tensor
    counts: Tensor
    pairs: int
    shares_rows: bool = False
