"""Chooses and times the projections of a device.

:mod:`molink.stage.linear.quantized` creates those of int8 and nf4 weights.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from molink.checkpoint.experts import Routing
from molink.facts.kernels import INTEGER_KERNELS, KernelName
from molink.gguf.block_formats import BLOCK_FORMATS, BlockFormat, fits_planes, fits_rows
from molink.stage.cpu_kernels.create import (
    create_block_matmul,
    create_integer_matmul,
    create_matmul,
    supports_block_weights,
)
from molink.stage.cpu_kernels.repack import BlockCodes
from molink.stage.gpu_kernels.block_planes import BlockPlanes, PlaneLayout
from molink.stage.gpu_kernels.block_product import find_planes_problem
from molink.stage.linear.base import Projection
from molink.stage.linear.compiled import PART_ROWS, BlockLinear, CompiledLinear
from molink.stage.linear.dense import PackedLinear, PlainLinear, can_pack
from molink.stage.linear.experts_check import check_experts
from molink.stage.linear.nf4 import NF4_FORMAT
from molink.stage.linear.planes import PlanesLinear
from molink.stage.linear.planes_check import check_planes
from molink.stage.linear.timing import COLUMNS, DEPTH, TRIED, is_slower

if TYPE_CHECKING:
    from molink.stage.cpu_kernels.block_integers import IntegerBlockMatMul
    from molink.stage.cpu_kernels.block_matmul import BlockMatMul
    from molink.stage.cpu_kernels.matmul import MatMul

#: Formats with which integer products are timed; the most expensive one stands for codebooks.
_TIMED_FORMATS: dict[KernelName, BlockFormat] = {
    "int8-rows": BLOCK_FORMATS["q4_k"],
    "int8-rows-8bit": BLOCK_FORMATS["q8_0"],
    "int8-rows-codebook": NF4_FORMAT,
}


@dataclass(frozen=True, slots=True)
class ProjectionFactory:
    """Creates projections for rows of ``dtype``, preferably compiled, then oneDNN's, then plain."""

    dtype: torch.dtype
    #: For bf16 weights; a float16 product is compiled on demand.
    product: "MatMul | None" = None
    packs_onednn: bool = False
    #: Whether quantized weights stay quantized.
    keeps_blocks: bool = False
    #: The device on which they are packed in bit planes; ``None`` on a CPU.
    planes_device: torch.device | None = None
    #: The device that multiplies by all experts of a layer at once; ``None`` if none does.
    experts_device: torch.device | None = None
    #: Products of quantized weights that round rows to 8 bits.
    integer_kernels: frozenset[str] = frozenset()

    @classmethod
    def probe_device(
        cls,
        dtype: torch.dtype,
        device: torch.device,
        disabled_kernels: Collection[str] = (),
    ) -> "ProjectionFactory":
        """Find the preferred implementations without timing them (see :func:`slow_kernels`)."""
        if device.type != "cpu":
            works = not find_planes_problem(device)
            keeps = works and "gguf-blocks" not in disabled_kernels
            groups = works and "grouped-experts" not in disabled_kernels
            return cls(
                dtype,
                keeps_blocks=keeps,
                planes_device=device if keeps else None,
                experts_device=device if groups else None,
            )
        return cls(
            dtype,
            product=None
            if "compiled-linear" in disabled_kernels
            else create_matmul(dtype, torch.get_num_threads()),
            packs_onednn="packed-linear" not in disabled_kernels and can_pack(dtype, device),
            keeps_blocks="gguf-blocks" not in disabled_kernels and supports_block_weights(),
            integer_kernels=frozenset(INTEGER_KERNELS).difference(disabled_kernels),
        )

    def keeps_dtype(self, weight_dtype: torch.dtype) -> bool:
        """Whether :meth:`create_projection` keeps weights of that type."""
        return self._find_product(weight_dtype) is not None

    def keeps_format(self, form: BlockFormat, shape: tuple[int, int]) -> bool:
        """Whether :meth:`create_quantized` takes a weight ``[out, in]`` of that format."""
        if self.planes_device is not None:
            return fits_planes(form, shape) and check_planes(
                form, shape[1], self.dtype, self.planes_device
            )
        fits = self.keeps_blocks and fits_rows(form, shape)
        return fits and self._find_block_product(form) is not None

    def groups_experts(self, form: BlockFormat | None, columns: int, routing: Routing) -> bool:
        """Whether experts with weights of that format, or of ``dtype``, are multiplied at once."""
        device = self.experts_device
        return device is not None and check_experts(form, columns, routing, self.dtype, device)

    def create_quantized(
        self,
        form: BlockFormat,
        shape: tuple[int, int],
        parts: Iterable[BlockCodes],
        bias: Tensor | None,
        order: Tensor | None = None,
    ) -> BlockLinear | PlanesLinear:
        """Create a projection whose weight ``[out, in]`` stays quantized, from stacked ``parts``.

        ``order`` permutes its columns.
        """
        device = self.planes_device
        if device is not None:
            planes = BlockPlanes.pack_blocks(PlaneLayout(form, shape), parts, device)
            order = None if order is None else order.to(device)
            return PlanesLinear(planes, bias, self.dtype, order)
        product = self._find_block_product(form)
        assert product is not None  # nothing else stays quantized
        return BlockLinear.pack_blocks(product, shape[0], parts, bias, self.dtype, order)

    def _find_block_product(self, form: BlockFormat) -> "BlockMatMul | IntegerBlockMatMul | None":
        """Return the product for a quantized format, if supported."""
        if integer_kernel(form) in self.integer_kernels:
            product = create_integer_matmul(form, self.dtype, torch.get_num_threads())
            if product is not None:
                return product
        return create_block_matmul(form, self.dtype, torch.get_num_threads())

    def create_tied(self, weight: Tensor) -> PlainLinear | CompiledLinear:
        """Create a tied output head and embedding from ``weight`` ``[vocabulary, hidden]``."""
        return self._pack_compiled(weight, None) or PlainLinear(weight.to(self.dtype))

    def create_projection(self, weight: Tensor, bias: Tensor | None) -> Projection:
        """Create a projection from ``weight`` ``[out, in]``."""
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
        """Create a projection to fill with stacked weights, part by part, if supported."""
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
        """Return the product for a weight type; float16 is compiled on first use."""
        if self.product is None or weight_dtype is self.product.weight_dtype:
            return self.product
        return create_matmul(self.dtype, torch.get_num_threads(), weight_dtype)


@cache
@torch.inference_mode()
def slow_kernels(dtype: torch.dtype, device: torch.device) -> tuple[KernelName, ...]:
    """Time kernels on ``device``; return those to disable, whose fallback is faster."""
    compiled = ProjectionFactory.probe_device(dtype, device)
    if compiled.product is None:
        return ()
    weight = torch.ones(COLUMNS, DEPTH, dtype=torch.bfloat16)
    sides = [
        [
            maker.create_projection(
                weight if maker.keeps_dtype(torch.bfloat16) else weight.to(maker.dtype), None
            )
            for _ in range(TRIED)
        ]
        for maker in (compiled, replace(compiled, product=None))
    ]
    return ("compiled-linear",) if is_slower(sides, dtype) else ()


def integer_kernel(form: BlockFormat) -> KernelName:
    """Return the kernel for weights in ``form`` and rows rounded to 8 bits."""
    if form.codebook:
        return "int8-rows-codebook"
    return "int8-rows-8bit" if form.bits == 8 else "int8-rows"


@cache
@torch.inference_mode()
def has_slow_integers(dtype: torch.dtype, kernel: KernelName) -> bool:
    """Return whether full-precision rows are faster than an integer product.

    Times both with quantized weights.
    """
    form, threads = _TIMED_FORMATS[kernel], torch.get_num_threads()
    integers = create_integer_matmul(form, dtype, threads)
    usual = create_block_matmul(form, dtype, threads)
    if integers is None or usual is None:
        return integers is None
    sides = []
    for product in (integers, usual):
        nbytes = DEPTH // form.block * product.columns * form.nbytes
        weight = torch.zeros(COLUMNS // product.columns, nbytes, dtype=torch.uint8)
        bias = torch.zeros(COLUMNS)
        sides.append([partial(product, weight.clone(), bias=bias) for _ in range(TRIED)])
    return is_slower(sides, integers.dtype)
