"""How a device keeps the weights of projections: tried out, not guessed from its name."""

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from molink.gguf.block_formats import BlockFormat
from molink.stage.kernels.create import create_block_matmul, create_matmul, supports_block_weights
from molink.stage.linear.base import Projection
from molink.stage.linear.compiled import PART_ROWS, CompiledLinear
from molink.stage.linear.dense import PackedLinear, PlainLinear, can_pack

if TYPE_CHECKING:
    from molink.stage.kernels.block_matmul import BlockMatMul
    from molink.stage.kernels.matmul import MatMul

#: How much slower than torch's a compiled product may be for many rows (CPUs with AMX have more).
_MAX_SLOWDOWN = 1.1
#: Matrices that are tried: with one row so many that no cache holds them; many rows take most of
#: their time for products, wherever the weights are.
_TRIED, _TRIED_MANY, _REPEATED = 8, 2, 5
_COLUMNS, _DEPTH, _MANY = 4096, 1024, 64


@dataclass(frozen=True, slots=True)
class ProjectionFactory:
    """Makes projections for rows of ``dtype``: compiled, else packed for oneDNN, else torch's."""

    dtype: torch.dtype
    #: Of bf16 weights; where it is worth while, so is one of float16.
    product: "MatMul | None" = None
    packs_onednn: bool = False
    #: Whether it can multiply by weights that stay in few bits.
    keeps_blocks: bool = False

    @classmethod
    def probe_device(
        cls, dtype: torch.dtype, device: torch.device, disabled_kernels: Collection[str] = ()
    ) -> "ProjectionFactory":
        """What is fastest on a device; a CPU is tried once for each number of torch's threads.

        Kernels to ``avoid`` are named as in :mod:`molink.facts.kernels`.
        """
        if device.type != "cpu":
            return cls(dtype)
        packs, compiles = (
            "packed-linear" not in disabled_kernels,
            "compiled-linear" not in disabled_kernels,
        )
        probed = _probe_cpu(dtype, torch.get_num_threads(), packs, compiles)
        return replace(
            probed, keeps_blocks="gguf-blocks" not in disabled_kernels and supports_block_weights()
        )

    def keeps_dtype(self, weight_dtype: torch.dtype) -> bool:
        """Whether :meth:`create_projection` keeps weights of that type as they are, whatever the
        rows are."""
        return self._find_product(weight_dtype) is not None

    def find_block_product(self, form: BlockFormat) -> "BlockMatMul | None":
        """What multiplies by weights in such blocks, if anything does."""
        if not self.keeps_blocks:
            return None
        return create_block_matmul(form, self.dtype, torch.get_num_threads())

    def create_tied(self, weight: Tensor) -> PlainLinear | CompiledLinear:
        """What is an output head and the embedding too, of ``weight`` ``[vocabulary, hidden]``."""
        return self._pack_compiled(weight, None) or PlainLinear(weight.to(self.dtype))

    def create_projection(self, weight: Tensor, bias: Tensor | None) -> Projection:
        """A projection of ``weight`` ``[out, in]``, which isn't needed afterwards."""
        compiled = self._pack_compiled(weight, bias)
        if compiled is not None:
            return compiled
        weight_dtype = weight.to(self.dtype)
        return (
            PackedLinear.pack_weight(weight_dtype, bias)
            if self.packs_onednn
            else PlainLinear(weight_dtype, bias)
        )

    def create_empty(
        self, shapes: Sequence[tuple[int, int]], weight_dtype: torch.dtype, bias: Tensor | None
    ) -> CompiledLinear | None:
        """A projection to put weights of these shapes into, one below the other, part by part.

        ``None`` if that can't be: :meth:`create_projection` makes one of the whole weight.
        """
        product = self._find_product(weight_dtype)
        if product is None or any(rows % PART_ROWS for rows, _ in shapes):
            return None
        whole = sum(rows for rows, _ in shapes), shapes[0][1]
        return CompiledLinear.create_empty(product, whole, weight_dtype, bias)

    def _pack_compiled(self, weight: Tensor, bias: Tensor | None) -> CompiledLinear | None:
        product = self._find_product(weight.dtype)
        if product is None or not product.supports_weight(weight):
            return None
        return CompiledLinear.pack_weight(product, weight, bias)

    def _find_product(self, weight_dtype: torch.dtype) -> "MatMul | None":
        """What multiplies by weights of that type; float16 is compiled when it is met."""
        if self.product is None or weight_dtype is self.product.weight_dtype:
            return self.product
        return create_matmul(self.dtype, torch.get_num_threads(), weight_dtype)


@cache
@torch.inference_mode()
def _probe_cpu(
    dtype: torch.dtype, threads: int, packs: bool = True, compiles: bool = True
) -> ProjectionFactory:
    usual = ProjectionFactory(dtype, packs_onednn=packs and can_pack(dtype, torch.device("cpu")))
    compiled = replace(usual, product=create_matmul(dtype, threads) if compiles else None)
    if compiled.product is None:
        return usual
    few, many = _relative_time(compiled, usual)
    return compiled if few < 1 and many < _MAX_SLOWDOWN else usual


def _relative_time(one: ProjectionFactory, other: ProjectionFactory) -> tuple[float, float]:
    """Seconds of ``one`` by those of the ``other``, with one row and with many.

    Of the fastest runs, taking turns.
    """
    weight = torch.ones(_COLUMNS, _DEPTH, dtype=torch.bfloat16)
    sides = [
        [
            maker.create_projection(
                weight if maker.keeps_dtype(torch.bfloat16) else weight.to(maker.dtype), None
            )
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
