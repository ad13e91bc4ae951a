"""Requirements of compiled kernels on the CPU and torch; tests are skipped without them."""

from collections.abc import Collection

import pytest
import torch
from torch import Tensor

from molink.stage.cpu_kernels.block_integers import IntegerBlockMatMul
from molink.stage.cpu_kernels.block_matmul import BlockMatMul
from molink.stage.cpu_kernels.compiler import host_features
from molink.stage.cpu_kernels.openmp import OpenMp
from molink.stage.cpu_kernels.segments import Segments, WeightTable

#: Why tests that need compiled products for rows of a type are skipped.
NOT_COMPILED = {
    "bf16": "this CPU has no AVX512-BF16: rows are float32",
    "f32": "this CPU has neither AVX2 nor AVX-512",
}


def require(features: Collection[str], threads: int) -> OpenMp | None:
    """The OpenMP library for ``threads``, ``None`` for one; skips if something is missing."""
    missing = [name for name in features if not host_features().get(name)]
    if missing:
        pytest.skip(f"this CPU has no {', '.join(missing)}")
    openmp = OpenMp.find_loaded() if threads > 1 else None
    if threads > 1 and openmp is None:
        pytest.skip("torch has loaded no OpenMP library that is known")
    return openmp


def check_segments(multiply: BlockMatMul | IntegerBlockMatMul, weight: Tensor, depth: int) -> None:
    """Whether segments give what products of their rows and weights do, to the bit.

    ``weight`` is packed, ``[columns / C, bytes]``; a segment multiplies ``depth`` columns.
    """
    biases = [torch.randn(multiply.columns) for _ in weight]
    weights = [part.unsqueeze(0).clone() for part in weight]
    pairs = list(zip(weights, biases, strict=True))
    addresses = torch.tensor([[each.data_ptr() for each in pair] for pair in pairs])
    table = WeightTable(addresses, (1, weight.shape[1]))
    rows = torch.randn(7, depth).to(multiply.dtype)
    chosen, sizes = [1, 0, 1], [3, 1, 3]
    segments = Segments(torch.tensor(chosen), torch.tensor(sizes), len(rows))
    exact = [
        multiply(weights[number], part, biases[number])
        for number, part in zip(chosen, rows.split(sizes), strict=True)
    ]
    assert torch.equal(multiply.multiply_segments(table, rows, segments), torch.cat(exact))
    shared = Segments(torch.tensor([0, 1]), torch.tensor([2, 2]), 4, shares_rows=True)
    exact = [multiply(one, rows[:2], bias) for one, bias in pairs[:2]]
    assert torch.equal(multiply.multiply_segments(table, rows[:2], shared), torch.cat(exact))
