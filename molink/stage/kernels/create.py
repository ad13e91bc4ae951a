"""What can be compiled for this CPU, if anything. LLVM is imported late: no GPU needs it."""

import logging
from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING

import torch

from molink.model.traits import Activation
from molink.stage.kernels.shape import AttendShape

if TYPE_CHECKING:
    from molink.stage.kernels.arithmetic import Arithmetic
    from molink.stage.kernels.attend import Attend
    from molink.stage.kernels.matmul import MatMul
    from molink.stage.kernels.rowwise import Rowwise

log = logging.getLogger(__name__)


@cache
def create_matmul(dtype: torch.dtype, threads: int) -> "MatMul | None":
    """A product of bf16 weights and rows of ``dtype``, on ``threads`` threads of a CPU.

    ``None`` where this CPU or system has no such product, or it gives anything but what torch does.
    """
    try:
        from molink.stage.kernels.compiler import host_features
        from molink.stage.kernels.matmul import MatMul
        from molink.stage.kernels.openmp import OpenMp

        arithmetic = _choose(dtype, host_features())
        openmp = OpenMp.find() if threads > 1 else None
        if arithmetic is None or (threads > 1 and openmp is None):
            return None
        product = MatMul(arithmetic, openmp, threads)
    except (ImportError, OSError, RuntimeError) as error:
        log.info("no compiled products here: %s", error)
        return None
    if not _is_right(product):
        log.warning("a compiled product computes wrongly on this CPU: not used")
        return None
    return product


@cache
def create_attend(shape: AttendShape, threads: int) -> "Attend | None":
    """Attention in bf16 for models of ``shape``, on ``threads`` threads of a CPU, if it can."""
    try:
        from molink.stage.kernels.attend import Attend
        from molink.stage.kernels.compiler import host_features
        from molink.stage.kernels.openmp import OpenMp

        native = host_features().get("avx512bf16")
        openmp = OpenMp.find() if threads > 1 else None
        if not native or not shape.fits or (threads > 1 and openmp is None):
            return None
        return Attend(shape, openmp, threads)
    except (ImportError, OSError, RuntimeError) as error:
        log.info("no compiled attention here: %s", error)
        return None


@cache
def create_rowwise(eps: float, activation: Activation, threads: int) -> "Rowwise | None":
    """Norms, activations and rotations of bf16 rows, on ``threads`` threads of a CPU, if it can."""
    try:
        from molink.stage.kernels.compiler import host_features
        from molink.stage.kernels.openmp import OpenMp
        from molink.stage.kernels.rowwise import Rowwise

        openmp = OpenMp.find() if threads > 1 else None
        if not host_features().get("avx512bf16") or (threads > 1 and openmp is None):
            return None
        return Rowwise(eps, activation, openmp, threads)
    except (ImportError, OSError, RuntimeError) as error:
        log.info("no compiled norms here: %s", error)
        return None


def _choose(dtype: torch.dtype, features: Mapping[str, bool]) -> "Arithmetic | None":
    """The fastest arithmetic that a CPU with ``features`` (LLVM's names) has for rows of a type."""
    from molink.stage.kernels.arithmetic import DotBf16, WidenedBf16

    def has(*names: str) -> bool:
        return all(features.get(name) for name in names)

    if dtype is torch.bfloat16 and has("avx512bf16", "avx512f"):
        return DotBf16()
    if dtype is torch.float32 and has("avx512f"):
        return WidenedBf16(lanes=16, vectors=2, tile=10)
    if dtype is torch.float32 and has("avx2", "fma"):
        return WidenedBf16()
    return None


def _is_right(product: "MatMul") -> bool:
    """Whether small integers, which every sum here holds exactly, are multiplied without error."""
    weight = torch.arange(96 * 64).remainder(7).sub(3).view(96, 64)
    rows = torch.arange(29 * 64).remainder(5).sub(2).view(29, 64)
    bias = torch.arange(96.0)
    given = product(product.pack(weight.bfloat16()), rows.to(product.dtype), bias)
    exact = (rows @ weight.T + bias).to(product.dtype)
    return torch.equal(given, exact)
