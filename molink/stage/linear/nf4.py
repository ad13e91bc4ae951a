"""Projections with nf4 weights: 4-bit normal floats in blocks of 64 of the flattened weight.

bitsandbytes is imported late, and without the ``kernels`` package, through which it would download
compiled code from the Hugging Face hub on CPUs with AVX512-BF16. If bitsandbytes was already
imported, the downloaded code is dropped.
"""

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from molink.checkpoint.quantized_size import NF4_BLOCK
from molink.cpu_isa import avx2_only
from molink.errors import UsageError
from molink.gguf.block_formats import BlockFormat
from molink.stage.linear.base import total_bytes

#: Values of the 16 codes (QLoRA, appendix E).
NF4_VALUES = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
    -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
    0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
#: Format in which devices multiply by nf4 weights in place, if rows consist of whole blocks.
NF4_FORMAT = BlockFormat(4, 0, NF4_BLOCK, NF4_BLOCK, number_dtype="f32", codebook=NF4_VALUES)
#: Output rows that the CPU kernel processes together.
_ROW_GROUP = 32


@dataclass(frozen=True, slots=True)
class CudaNf4Linear:
    """GPU projection by bitsandbytes' fused kernel; ``in`` is a multiple of 64.

    ``packed`` is uint8 ``[out * in / 2, 1]``, ``scales`` float32 ``[out * in / 64]``.
    """

    packed: Tensor
    scales: Tensor
    shape: tuple[int, int]
    bias: Tensor | None = None

    def __call__(self, rows: Tensor) -> Tensor:
        result: Tensor = torch.ops.bitsandbytes.gemm_4bit.default(
            rows, self.packed, self.shape, self.scales, NF4_BLOCK, "nf4", self.bias
        )
        return result

    @property
    def nbytes(self) -> int:
        return total_bytes(self.packed, self.scales, self.bias)


@dataclass(frozen=True, slots=True)
class PackedNf4Linear:
    """CPU projection with AVX512-BF16: a third of bf16's time with one row, equal at 16 rows.

    ``packed`` is uint8 ``[out, in / 2]`` in the kernel's order, ``scales`` bf16 ``[in / 64, out]``
    (rounding error 0.2 %; nf4's own error is 9 %).
    """

    packed: Tensor
    scales: Tensor
    values: Tensor
    bias: Tensor | None = None

    @classmethod
    def from_quantized(
        cls, packed: Tensor, scales: Tensor, shape: tuple[int, int], bias: Tensor | None
    ) -> "PackedNf4Linear":
        """Repack a quantized weight of a supported ``shape``."""
        out, width = shape
        ordered = torch.empty(out, width // 2, dtype=torch.uint8)
        for first in range(0, out, _ROW_GROUP):
            # A stored byte has two neighbours of a row; the kernel needs rows 0-15 of a group in
            # the low halves and rows 16-31 in the high halves.
            given = packed.view(out, width // 2)[first : first + _ROW_GROUP].t()  # [in / 2, 32]
            both = torch.stack((given >> 4, given & 15), -1)  # [in / 2, 32, 2]
            low, high = both.reshape(width // 2, 2, _ROW_GROUP).unbind(1)
            ordered[first : first + _ROW_GROUP].view(width // 2, _ROW_GROUP).copy_(
                (high << 4) | low
            )
        turned = scales.view(out, width // NF4_BLOCK).t().to(torch.bfloat16).contiguous()
        return cls(ordered, turned, torch.tensor(NF4_VALUES), bias)

    def __call__(self, rows: Tensor) -> Tensor:
        out = len(self.packed)
        result: Tensor = torch.ops.bitsandbytes.gemv_4bit.default(
            rows.contiguous(),
            self.packed,
            (out, rows.shape[1]),
            self.scales,
            self.values,
            NF4_BLOCK,
        )
        return result if self.bias is None else result.add_(self.bias)

    @property
    def nbytes(self) -> int:
        return total_bytes(self.packed, self.scales, self.bias)


def supports_shape(shape: tuple[int, int]) -> bool:
    """Whether :class:`PackedNf4Linear` supports a weight of that shape."""
    return shape[0] % _ROW_GROUP == 0 and shape[1] % NF4_BLOCK == 0


@torch.inference_mode()
def has_nf4_kernel() -> bool:
    """Try whether bitsandbytes' undocumented CPU kernel works."""
    if avx2_only():
        return False  # bitsandbytes detects the CPU itself
    load_library()
    shape = (2 * _ROW_GROUP, 2 * NF4_BLOCK)
    weight = torch.linspace(-1, 1, shape[0] * shape[1]).sin().view(shape)
    rows = torch.linspace(-2, 2, 3 * shape[1]).cos().view(3, -1).bfloat16()
    packed, scales = quantize_nf4(weight)
    exact = rows.float() @ dequantize_nf4(packed, scales, shape, torch.float32).t()
    try:
        found = PackedNf4Linear.from_quantized(packed, scales, shape, None)(rows).float()
    except (AttributeError, RuntimeError):
        return False
    return torch.allclose(found, exact, rtol=0.02, atol=0.02 * float(exact.abs().max()))


_KERNELS_PACKAGE = "kernels"


def load_library() -> ModuleType:
    """Load bitsandbytes and register ``torch.ops.bitsandbytes``.

    Raises:
        UsageError: it is missing or broken.
    """
    with _block_kernels_import():
        try:
            import bitsandbytes
            import bitsandbytes.backends.cpu.ops as on_cpu
        except (ImportError, OSError, RuntimeError) as error:
            raise UsageError(
                f"quantized weights need bitsandbytes, which can't be loaded: {error}; "
                "run `molink setup`"
            ) from error
    if getattr(on_cpu, "gemm_4bit_forward_kernel", None) is not None:
        on_cpu.gemm_4bit_forward_kernel = None
    loaded: ModuleType = bitsandbytes
    return loaded


def quantize_nf4(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize ``n`` weights to nf4 ``[n / 2]`` (uint8) and scales ``[n / 64]`` (float32).

    Requires :func:`load_library`.
    """
    packed, scales = torch.ops.bitsandbytes.quantize_4bit.default(
        rows, NF4_BLOCK, "nf4", torch.uint8
    )
    return packed.view(-1), scales


def dequantize_nf4(
    packed: Tensor, scales: Tensor, shape: tuple[int, int], dtype: torch.dtype
) -> Tensor:
    """Dequantize whole blocks to ``shape``."""
    # One block per row: on a CPU blocks must end where rows do.
    weights: Tensor = torch.ops.bitsandbytes.dequantize_4bit.default(
        packed.view(-1, 1), scales, NF4_BLOCK, "nf4", (len(scales), NF4_BLOCK), dtype
    )
    return weights.view(shape)


@contextmanager
def _block_kernels_import() -> Iterator[None]:
    """Block the import of ``kernels`` without a warning."""
    logger = logging.getLogger("bitsandbytes")
    absent, level = object(), logger.level
    before = sys.modules.get(_KERNELS_PACKAGE, absent)
    sys.modules[_KERNELS_PACKAGE] = None  # type: ignore[assignment]  # what makes an import fail
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
        if before is absent:
            sys.modules.pop(_KERNELS_PACKAGE, None)
        else:
            sys.modules[_KERNELS_PACKAGE] = before  # type: ignore[assignment]
