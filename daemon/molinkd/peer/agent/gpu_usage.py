"""How much of an NVIDIA GPU's time other programs take, as its driver tells it.

Under WDDM the driver tells no process's memory, and on some systems no process's share of the time.
What it tells everywhere is how busy the whole GPU is. So that is what counts, less what our own
stages take by their own word; and where it tells the shares and knows our processes by the ids
that we know (in a container it may not), those of all others.
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
    """Our own stages: ids of their processes, and the part of the time (0 to 1) they compute."""

    pids: Collection[int] = ()
    share: float = 0.0


class GpuMonitor:
    """One GPU. Its methods wait for the driver: call them in a thread."""

    def __init__(self, nvml: Any, handle: Any) -> None:
        """``nvml`` is the module ``pynvml``, which was initialised."""
        self._nvml, self._handle = nvml, handle
        #: The driver's time of the newest sample that was read, in microseconds.
        self._last_sample_us = 0

    @property
    def has_display(self) -> bool:
        """Whether a screen is driven by it, so that somebody may sit there."""
        try:
            return bool(self._nvml.nvmlDeviceGetDisplayActive(self._handle))
        except self._nvml.NVMLError:
            return False

    def measure_other_usage(self, own: OwnGpuUsage) -> float:
        """The part of its time (0 to 1) that other programs take; 0 if that can't be told."""
        try:
            whole = float(self._nvml.nvmlDeviceGetUtilizationRates(self._handle).gpu) / 100
        except self._nvml.NVMLError as error:
            log.debug("the GPU doesn't tell how busy it is: %s", error)
            return 0.0
        rest = max(0.0, whole - own.share)
        return min(whole, max(rest, self._read_process_share(_with_children(own.pids))))

    def close(self) -> None:
        """Ask no more."""
        with contextlib.suppress(self._nvml.NVMLError):
            self._nvml.nvmlShutdown()

    def _read_process_share(self, own: set[int]) -> float:
        """What the driver says of processes that aren't ours; 0 where it says nothing of use."""
        nvml = self._nvml
        try:
            running = nvml.nvmlDeviceGetComputeRunningProcesses(self._handle)
            if own and not own & {one.pid for one in running}:
                return 0.0  # it knows our processes by other ids
            samples = nvml.nvmlDeviceGetProcessUtilization(self._handle, self._last_sample_us)
        except nvml.NVMLError:
            return 0.0
        newest = {one.pid: one for one in sorted(samples, key=lambda one: one.timeStamp)}
        self._last_sample_us = max(
            (one.timeStamp for one in newest.values()), default=self._last_sample_us
        )
        # A newer driver says 4294967295 where there is no value.
        shares = [float(one.smUtil) for pid, one in newest.items() if pid not in own]
        return sum(share for share in shares if share <= 100) / 100


def open_gpu(device: Device) -> GpuMonitor | None:
    """The GPU that a stage computes on; ``None`` if there is none, or no driver that tells."""
    if device.kind != "cuda":
        return None
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        log.info("how busy the GPU is can't be told: %s", error)
        return None
    with contextlib.suppress(pynvml.NVMLError):
        handle = _find_handle(pynvml, device)
        if handle is not None:
            return GpuMonitor(pynvml, handle)
    with contextlib.suppress(pynvml.NVMLError):
        pynvml.nvmlShutdown()
    return None


def _find_handle(nvml: Any, device: Device) -> Any:
    """The driver counts by slots, CUDA as it likes: the name decides, and then the number."""
    count = nvml.nvmlDeviceGetCount()
    handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(count)]
    named = [handle for handle in handles if nvml.nvmlDeviceGetName(handle) == device.name]
    if len(named) == 1:
        return named[0]
    return handles[device.index] if device.index < count else None


def _with_children(pids: Collection[int]) -> set[int]:
    """These processes; on Windows, the Python of a virtual environment is a child of each."""
    found = set(pids)
    for pid in pids if sys.platform == "win32" else ():
        with contextlib.suppress(psutil.Error):
            found |= {child.pid for child in psutil.Process(pid).children(recursive=True)}
    return found
