"""Element types by the names of the wire, and which one a device computes in."""

from collections.abc import Callable, Mapping

import torch

from molink.facts.dtypes import DTypeChoice, WeightDType

TORCH_DTYPES: dict[WeightDType, torch.dtype] = {
    "f32": torch.float32,
    "bf16": torch.bfloat16,
    "f16": torch.float16,
}
DTYPE_NAMES: dict[torch.dtype, WeightDType] = {dtype: name for name, dtype in TORCH_DTYPES.items()}


def choose_dtype(wanted: DTypeChoice, stored: WeightDType, device: torch.device) -> WeightDType:
    """What to compute in: as asked, else what suits the stored weights and the device.

    On CUDA that is the model's own type, but fp16 instead of bf16 on a GPU that has to emulate bf16
    (before Ampere). A CPU takes bf16 for 16-bit models where it has instructions for it and fp32
    otherwise (fp16 is slower than fp32 there).
    """
    if wanted != "auto":
        return wanted
    if device.type != "cpu":
        return "f16" if stored == "bf16" and not supports_bf16(device) else stored
    return "bf16" if stored != "f32" and supports_bf16(device) else "f32"


def residual_dtype(computed: torch.dtype) -> torch.dtype:
    """What the sums over the layers are kept in: those of bf16 models don't fit fp16."""
    return torch.float32 if computed == torch.float16 else computed


def choose_wire_dtype(wanted: DTypeChoice, stored: WeightDType) -> WeightDType:
    """What rows travel in: the same at every stage of a pipeline, whatever each computes in."""
    return stored if wanted == "auto" else wanted


def supports_bf16(device: torch.device) -> bool:
    """Whether a device multiplies bf16 natively."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device)[0] >= 8
    return cpu_supports_bf16()


def cpu_supports_bf16() -> bool:
    """Whether this CPU multiplies bf16 natively (AVX512-BF16 or AMX)."""
    # Absent from older versions of torch: then nothing is known, and fp32 always works.
    known: Callable[[], Mapping[str, object]] = getattr(torch.cpu, "get_capabilities", dict)
    capabilities = known()
    names = ("avx512_bf16", "amx_bf16", "amx_tile", "bf16")
    return any(capabilities.get(name) for name in names)
