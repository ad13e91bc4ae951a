"""Names of devices, and further identification such as drivers."""

import os
import platform
from pathlib import Path

import torch

from molink.stage.torch_dtypes import supports_bf16


def describe_device(device: torch.device) -> str:
    """Return a device's product name."""
    return describe_cpu() if device.type == "cpu" else torch.cuda.get_device_name(device.index or 0)


def describe_instructions(device: torch.device) -> str:
    """Name a CPU's instruction set, which its product name may not tell; empty for a GPU."""
    if device.type != "cpu":
        return ""
    return f" ({torch.backends.cpu.get_cpu_capability()}{' with bf16' * supports_bf16(device)})"


def driver_version() -> str:
    """Return the version of NVIDIA's driver; empty if unknown."""
    import pynvml

    try:
        pynvml.nvmlInit()
        try:
            return str(pynvml.nvmlSystemGetDriverVersion())
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError:
        return ""


def describe_cpu() -> str:
    """Return the CPU's product name, if available."""
    table = Path("/proc/cpuinfo")  # Linux only
    lines = table.read_text(encoding="utf-8").splitlines() if table.exists() else []
    for line in lines:
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or os.environ.get("PROCESSOR_IDENTIFIER") or platform.machine()
