"""Maps dtype names to torch, and chooses the dtype to compute in."""

from collections.abc import Callable, Mapping

import torch

from molink.cpu_isa import avx2_only
from molink.facts.dtypes import DTypeChoice, WeightDType

TORCH_DTYPES: dict[WeightDType, torch.dtype] = {
    "f32": torch.float32,
    "bf16": torch.bfloat16,
    "f16": torch.float16,
}
DTYPE_NAMES: dict[torch.dtype, WeightDType] = {dtype: name for name, dtype in TORCH_DTYPES.items()}


def choose_dtype(wanted: DTypeChoice, stored: WeightDType, device: torch.device) -> WeightDType:
    """Choose the compute type: ``wanted``, or by default one that suits weights and device.

    On CUDA the default is the model's own type, but fp16 instead of bf16 on GPUs that emulate bf16
    (before Ampere). A CPU uses bf16 for 16-bit models if it has the instructions, otherwise fp32,
    which is faster than fp16 there.
    """
    if wanted != "auto":
        return wanted
    if device.type != "cpu":
        return "f16" if stored == "bf16" and not supports_bf16(device) else stored
    return "bf16" if stored != "f32" and supports_bf16(device) else "f32"


def residual_dtype(computed: torch.dtype) -> torch.dtype:
    """Return the type of residual sums: float32 for fp16, since bf16 models overflow fp16."""
    return torch.float32 if computed == torch.float16 else computed


def choose_wire_dtype(wanted: DTypeChoice, stored: WeightDType) -> WeightDType:
    """Choose the type of rows between stages, independent of the stages' compute types."""
    return stored if wanted == "auto" else wanted


def supports_bf16(device: torch.device) -> bool:
    """Whether a device multiplies bf16 natively."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device)[0] >= 8
    return cpu_supports_bf16()


def cpu_supports_bf16() -> bool:
    """Whether this CPU multiplies bf16 natively (AVX512-BF16 or AMX)."""
    if avx2_only():
        return False
    # Older torch versions can't detect it; fp32 always works.
    known: Callable[[], Mapping[str, object]] = getattr(torch.cpu, "get_capabilities", dict)
    capabilities = known()
    names = ("avx512_bf16", "amx_bf16", "amx_tile", "bf16")
    return any(capabilities.get(name) for name in names)
