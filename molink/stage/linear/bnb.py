"""bitsandbytes, imported late, and never with code that it would fetch from a hub.

On a CPU with AVX512-BF16 it asks the ``kernels`` package, while it is imported, for a compiled
kernel from the Hugging Face hub: code that nobody here has chosen, over a network that may not be
there. So that package can't be imported while bitsandbytes is, and where bitsandbytes was imported
by something else before, what it fetched is dropped.
"""

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

import torch
from torch import Tensor

from molink.checkpoint.quantization import NF4_BLOCK
from molink.errors import UsageError

_KERNELS_PACKAGE = "kernels"


def load_library() -> ModuleType:
    """The operators of bitsandbytes, registered with torch: ``torch.ops.bitsandbytes``.

    Raises:
        UsageError: it isn't installed, or can't be loaded here.
    """
    with _block_kernels_import():
        try:
            import bitsandbytes
            import bitsandbytes.backends.cpu.ops as on_cpu
        except (ImportError, OSError, RuntimeError) as error:
            raise UsageError(
                f"quantized weights need bitsandbytes, which can't be loaded: {error}; "
                "install it with `pip install bitsandbytes`"
            ) from error
    if getattr(on_cpu, "gemm_4bit_forward_kernel", None) is not None:
        on_cpu.gemm_4bit_forward_kernel = None
    loaded: ModuleType = bitsandbytes
    return loaded


def quantize_nf4(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Packed nf4 ``[n / 2]`` (uint8) and the scales ``[n / 64]`` (float32) of ``n`` weights.

    :func:`load_library` has to have been called.
    """
    packed, scales = torch.ops.bitsandbytes.quantize_4bit.default(
        rows, NF4_BLOCK, "nf4", torch.uint8
    )
    return packed.view(-1), scales


def dequantize_nf4(
    packed: Tensor, scales: Tensor, shape: tuple[int, int], dtype: torch.dtype
) -> Tensor:
    """The weights ``shape`` that :func:`quantize_nf4` gave; whole blocks of them."""
    # As one block per row: on a CPU it takes no others for blocks that don't end where rows do.
    weights: Tensor = torch.ops.bitsandbytes.dequantize_4bit.default(
        packed.view(-1, 1), scales, NF4_BLOCK, "nf4", (len(scales), NF4_BLOCK), dtype
    )
    return weights.view(shape)


@contextmanager
def _block_kernels_import() -> Iterator[None]:
    """No import of ``kernels``, and no warning that it is missing."""
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
