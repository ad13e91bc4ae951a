"""Which attention backend a stage runs: the one asked for, or the best that works here."""

from collections.abc import Collection

import torch

from molink.errors import UsageError
from molink.stage.attention.base import Attention, AttentionShape, BackendName
from molink.stage.attention.gather import GatherAttention
from molink.stage.attention.plain import PlainAttention
from molink.stage.attention.trial import try_compiled, try_flash


def create_attention(
    name: BackendName,
    shape: AttentionShape,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
    avoid: Collection[str] = (),
) -> Attention:
    """The backend called ``name``; ``auto`` takes ``flash`` or ``compiled`` if it works here.

    If neither does, or it is one to ``avoid`` (:mod:`molink.facts.kernels`), it takes ``gather``,
    and ``plain`` where that is to be avoided too.

    Raises:
        UsageError: ``flash`` or ``compiled`` was asked for and doesn't work.
    """
    if name == "plain":
        return PlainAttention(shape)
    if name == "gather":
        return _create_gather(shape, device)
    flash = name == "flash" or device.type == "cuda"
    if name == "auto" and ("flash-attention" if flash else "compiled-attention") in avoid:
        return _create_gather(shape, device, avoid)
    attempt = try_flash if flash else try_compiled
    found, reason = attempt(shape, block_size, dtype, device)
    if found is not None:
        return found
    if name != "auto":
        raise UsageError(f"{name} attention can't run on {device}: {reason}; use auto or gather")
    return _create_gather(shape, device, avoid)


def _create_gather(
    shape: AttentionShape, device: torch.device, avoid: Collection[str] = ()
) -> Attention:
    if "gather-attention" in avoid:
        return PlainAttention(shape)
    if device.type == "cuda":
        # SDPA prefers cuDNN on H100 and B200, which takes 30 ms for each length it hasn't met yet.
        torch.backends.cuda.enable_cudnn_sdp(False)
    return GatherAttention(shape)
