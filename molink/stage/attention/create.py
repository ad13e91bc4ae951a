"""Chooses the attention backend."""

from collections.abc import Collection

import torch

from molink.errors import UsageError
from molink.stage.attention.backend_check import (
    CreateChecked,
    create_checked_compiled,
    create_checked_flash,
    create_checked_triton,
)
from molink.stage.attention.base import AttentionBackend, AttentionShape, BackendName
from molink.stage.attention.gather import GatherAttention, PlainAttention

_CHECKED: dict[str, CreateChecked] = {
    "flash": create_checked_flash,
    "triton": create_checked_triton,
    "compiled": create_checked_compiled,
}


def create_attention(
    name: BackendName,
    shape: AttentionShape,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
    disabled_kernels: Collection[str] = (),
) -> AttentionBackend:
    """Create the backend ``name``.

    ``auto`` is the first of ``flash`` and ``triton`` that works on this device, or ``compiled`` on
    a CPU; otherwise ``gather``, or ``plain`` if ``gather`` is in ``disabled_kernels``. ``flash``
    can't read 8-bit KV, and only ``gather`` and ``plain`` attend to selected positions.

    Raises:
        UsageError: the requested backend doesn't work on this device.
    """
    if name == "plain":
        return PlainAttention(shape)
    if name == "gather":
        return _create_gather(shape, device)
    if shape.chooses:
        if name != "auto":
            raise UsageError(f"{name} attention can't attend to chosen positions; use auto")
        return _create_gather(shape, device, disabled_kernels)
    usual = ("flash", "triton") if device.type == "cuda" else ("compiled",)
    reason = ""
    for each in usual if name == "auto" else (name,):
        if name == "auto" and f"{each}-attention" in disabled_kernels:
            continue
        found, reason = _CHECKED[each](shape, block_size, dtype, device)
        if found is not None:
            return found
    if name != "auto":
        raise UsageError(f"{name} attention can't run on {device}: {reason}; use auto or gather")
    return _create_gather(shape, device, disabled_kernels)


def _create_gather(
    shape: AttentionShape, device: torch.device, disabled_kernels: Collection[str] = ()
) -> AttentionBackend:
    if "gather-attention" in disabled_kernels:
        return PlainAttention(shape)
    if device.type == "cuda":
        # On H100 and B200 SDPA prefers cuDNN, which takes 30 ms to prepare for each new length.
        torch.backends.cuda.enable_cudnn_sdp(False)
    return GatherAttention(shape)
