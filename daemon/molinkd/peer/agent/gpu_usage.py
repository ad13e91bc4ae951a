"""Measures the share of an NVIDIA GPU that other programs use.

NVML reports total utilization everywhere, but per-process memory not under WDDM and per-process
utilization only on some systems. Other programs' use is therefore the total minus the share that
our own stages report. Where NVML lists processes, including ours by ids we know (not in some
containers), the sum over other processes is a lower bound.
"""

import contextlib
import logging
import sys
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import psutil

from molink.facts.device import Device

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class OwnGpuUsage:
    """Process ids of our own stages, and the fraction of time (0 to 1) that they compute."""

    pids: Collection[int] = ()
    share: float = 0.0


class GpuMonitor:
    """One GPU. Methods block on the driver, so call them in a thread."""

    def __init__(self, nvml: Any, handle: Any) -> None:
        """``nvml`` is the initialised module ``pynvml``."""
        self._nvml, self._handle = nvml, handle
        #: Driver timestamp of the last sample read, in microseconds.
        self._last_sample_us = 0

    @property
    def has_display(self) -> bool:
        """Whether the GPU drives a display, which suggests an interactive user."""
        try:
            return bool(self._nvml.nvmlDeviceGetDisplayActive(self._handle))
        except self._nvml.NVMLError:
            return False

    def measure_other_usage(self, own: OwnGpuUsage) -> float:
        """Fraction of the GPU's time (0 to 1) used by other programs; 0 if unknown."""
        try:
            whole = float(self._nvml.nvmlDeviceGetUtilizationRates(self._handle).gpu) / 100
        except self._nvml.NVMLError as error:
            log.debug("can't read the GPU's utilization: %s", error)
            return 0.0
        rest = max(0.0, whole - own.share)
        return min(whole, max(rest, self._read_process_share(_with_children(own.pids))))

    def close(self) -> None:
        """Shut down NVML."""
        with contextlib.suppress(self._nvml.NVMLError):
            self._nvml.nvmlShutdown()

    def _read_process_share(self, own: set[int]) -> float:
        """Utilization of processes that are not ours; 0 where NVML gives no usable answer."""
        nvml = self._nvml
        try:
            running = nvml.nvmlDeviceGetComputeRunningProcesses(self._handle)
            if own and not own & {one.pid for one in running}:
                return 0.0  # NVML sees our processes under other ids
            samples = nvml.nvmlDeviceGetProcessUtilization(self._handle, self._last_sample_us)
        except nvml.NVMLError:
            return 0.0
        newest = {one.pid: one for one in sorted(samples, key=lambda one: one.timeStamp)}
        self._last_sample_us = max(
            (one.timeStamp for one in newest.values()), default=self._last_sample_us
        )
        # Newer drivers report 4294967295 for a missing value.
        shares = [float(one.smUtil) for pid, one in newest.items() if pid not in own]
        return sum(share for share in shares if share <= 100) / 100


def open_gpu(device: Device) -> GpuMonitor | None:
    """The GPU of ``device``; ``None`` without a GPU or without NVML."""
    if device.kind != "cuda":
        return None
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        log.info("can't measure GPU utilization: %s", error)
        return None
    with contextlib.suppress(pynvml.NVMLError):
        handle = _find_handle(pynvml, device)
        if handle is not None:
            return GpuMonitor(pynvml, handle)
    with contextlib.suppress(pynvml.NVMLError):
        pynvml.nvmlShutdown()
    return None


def _find_handle(nvml: Any, device: Device) -> Any:
    """NVML and CUDA number devices differently: match by name first, then by index."""
    count = nvml.nvmlDeviceGetCount()
    handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(count)]
    named = [handle for handle in handles if nvml.nvmlDeviceGetName(handle) == device.name]
    if len(named) == 1:
        return named[0]
    return handles[device.index] if device.index < count else None


def _with_children(pids: Collection[int]) -> set[int]:
    """``pids``, and on Windows their children, since a venv's launcher starts Python as a child."""
    found = set(pids)
    for pid in pids if sys.platform == "win32" else ():
        with contextlib.suppress(psutil.Error):
            found |= {child.pid for child in psutil.Process(pid).children(recursive=True)}
    return found
