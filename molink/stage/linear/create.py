"""How a device keeps the weights of projections: tried out, not guessed from its name."""

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from molink.gguf.formats import BlockFormat
from molink.stage.kernels.create import create_block_matmul, create_matmul, keeps_blocks
from molink.stage.linear.base import Projection
from molink.stage.linear.compiled import PART_ROWS, CompiledLinear
from molink.stage.linear.packed import PackedLinear, can_pack
from molink.stage.linear.plain import Linear

if TYPE_CHECKING:
    from molink.stage.kernels.block_matmul import BlockMatMul
    from molink.stage.kernels.matmul import MatMul

#: How much slower than torch's a compiled product may be for many rows (CPUs with AMX have more).
_SLOWER = 1.1
#: Matrices that are tried: with one row so many that no cache holds them; many rows take most of
#: their time for products, wherever the weights are.
_TRIED, _TRIED_MANY, _REPEATED = 8, 2, 5
_COLUMNS, _DEPTH, _MANY = 4096, 1024, 64


@dataclass(frozen=True, slots=True)
class Projections:
    """Makes projections for rows of ``dtype``: compiled, else packed for oneDNN, else torch's."""

    dtype: torch.dtype
    #: Of bf16 weights; where it is worth while, so is one of float16.
    product: "MatMul | None" = None
    packs: bool = False
    #: Whether it can multiply by weights that stay in few bits.
    keeps: bool = False

    @classmethod
    def probe(
        cls, dtype: torch.dtype, device: torch.device, avoid: Collection[str] = ()
    ) -> "Projections":
        """What is fastest on a device; a CPU is tried once for each number of torch's threads.

        Kernels to ``avoid`` are named as in :mod:`molink.facts.kernels`.
        """
        if device.type != "cpu":
            return cls(dtype)
        packs, compiles = "packed-linear" not in avoid, "compiled-linear" not in avoid
        probed = _probe_cpu(dtype, torch.get_num_threads(), packs, compiles)
        return replace(probed, keeps="gguf-blocks" not in avoid and keeps_blocks())

    def holds(self, kept: torch.dtype) -> bool:
        """Whether :meth:`create` keeps weights of that type as they are, whatever the rows are."""
        return self._multiplier(kept) is not None

    def product_of(self, form: BlockFormat) -> "BlockMatMul | None":
        """What multiplies by weights in such blocks, if anything does."""
        if not self.keeps:
            return None
        return create_block_matmul(form, self.dtype, torch.get_num_threads())

    def create_tied(self, weight: Tensor) -> Linear | CompiledLinear:
        """What is an output head and the embedding too, of ``weight`` ``[vocabulary, hidden]``."""
        return self._compile(weight, None) or Linear(weight.to(self.dtype))

    def create(self, weight: Tensor, bias: Tensor | None) -> Projection:
        """A projection of ``weight`` ``[out, in]``, which isn't needed afterwards."""
        compiled = self._compile(weight, bias)
        if compiled is not None:
            return compiled
        kept = weight.to(self.dtype)
        return PackedLinear.pack(kept, bias) if self.packs else Linear(kept, bias)

    def begin(
        self, shapes: Sequence[tuple[int, int]], kept: torch.dtype, bias: Tensor | None
    ) -> CompiledLinear | None:
        """A projection to put weights of these shapes into, one below the other, part by part.

        ``None`` if that can't be: :meth:`create` makes one of the whole weight.
        """
        product = self._multiplier(kept)
        if product is None or any(rows % PART_ROWS for rows, _ in shapes):
            return None
        whole = sum(rows for rows, _ in shapes), shapes[0][1]
        return CompiledLinear.empty(product, whole, kept, bias)

    def _compile(self, weight: Tensor, bias: Tensor | None) -> CompiledLinear | None:
        product = self._multiplier(weight.dtype)
        if product is None or not product.fits(weight):
            return None
        return CompiledLinear.pack(product, weight, bias)

    def _multiplier(self, kept: torch.dtype) -> "MatMul | None":
        """What multiplies by weights of that type; float16 is compiled when it is met."""
        if self.product is None or kept is self.product.kept:
            return self.product
        return create_matmul(self.dtype, torch.get_num_threads(), kept)


@cache
@torch.inference_mode()
def _probe_cpu(
    dtype: torch.dtype, threads: int, packs: bool = True, compiles: bool = True
) -> Projections:
    usual = Projections(dtype, packs=packs and can_pack(dtype, torch.device("cpu")))
    compiled = replace(usual, product=create_matmul(dtype, threads) if compiles else None)
    if compiled.product is None:
        return usual
    few, many = _compare(compiled, usual)
    return compiled if few < 1 and many < _SLOWER else usual


def _compare(one: Projections, other: Projections) -> tuple[float, float]:
    """Seconds of ``one`` by those of the ``other``, with one row and with many.

    Of the fastest runs, taking turns.
    """
    weight = torch.ones(_COLUMNS, _DEPTH, dtype=torch.bfloat16)
    sides = [
        [
            maker.create(weight if maker.holds(torch.bfloat16) else weight.to(maker.dtype), None)
            for _ in range(_TRIED)
        ]
        for maker in (one, other)
    ]
    ratios = []
    for count, tried in ((1, _TRIED), (_MANY, _TRIED_MANY)):
        rows = torch.ones(count, _DEPTH, dtype=one.dtype)
        fastest = [float("inf")] * 2
        for _ in range(_REPEATED):
            for index in range(tried):
                for side, projections in enumerate(sides):
                    begin = time.perf_counter()
                    projections[index](rows)
                    fastest[side] = min(fastest[side], time.perf_counter() - begin)
        ratios.append(fastest[0] / fastest[1])
    return ratios[0], ratios[1]
