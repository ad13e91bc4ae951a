"""Pauses this PC's stages on request, on schedule, or while another program uses the GPU."""

import asyncio
import contextlib
import logging
import sys
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import psutil

from molink.facts.device import Device
from molink.swarm.agent.pause_policy import PausePolicy
from molinkd.peer.settings import Settings
from molinkd.tasks import cancel_tasks

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


#: Between two looks, in seconds.
POLL_INTERVAL_S = 1.0


class PauseController:
    """The shell of :class:`molink.swarm.agent.pause_policy.PausePolicy`."""

    def __init__(
        self,
        settings: Settings,
        own: Callable[[], OwnGpuUsage],
        on_change: Callable[[], None],
        find_gpu: Callable[[Device], GpuMonitor | None] = open_gpu,
    ) -> None:
        """``own()`` returns the current GPU use of this PC's stages.

        ``on_change`` is called when :attr:`pause_reason` changes.
        """
        self._settings, self._own_usage, self._on_change = settings, own, on_change
        self._find_gpu = find_gpu
        self._pausing = PausePolicy(settings.pause_times)
        self._gpu: GpuMonitor | None = None
        self._poller: asyncio.Task[None] | None = None
        #: Why this PC is paused; empty if it is not.
        self.pause_reason = self._current_reason()

    @property
    def stage_pause_reason(self) -> str:
        """Why no layers are offered now; empty if they are, or if this PC never offers any."""
        return "" if self._settings.stage == "none" else self.pause_reason

    def start(self, device: Device) -> None:
        """Start polling the clock and, if configured, the GPU."""
        self._poller = asyncio.get_running_loop().create_task(self._poll(device))

    def set_drained(self, drain: bool) -> None:
        """Drain or resume this PC."""
        self._pausing.drained = drain
        self._update_reason()

    async def close(self) -> None:
        """Stop polling."""
        await cancel_tasks(self._poller)
        if self._gpu is not None:
            self._gpu.close()

    async def _poll(self, device: Device) -> None:
        self._gpu = await asyncio.to_thread(self._open_gpu, device)
        loop = asyncio.get_running_loop()
        while True:
            if self._gpu is not None:
                share = await asyncio.to_thread(self._gpu.measure_other_usage, self._own_usage())
                self._pausing.contention.observe_usage(share, loop.time())
            self._update_reason()
            await asyncio.sleep(POLL_INTERVAL_S)

    def _open_gpu(self, device: Device) -> GpuMonitor | None:
        wanted, settings = self._settings.pause_when_busy, self._settings
        # Several daemons would mistake each other's stages for other programs.
        if wanted == "off" or (wanted == "auto" and settings.stages_per_host > 1):
            return None
        gpu = self._find_gpu(device)
        if gpu is None and wanted == "on":
            log.warning("`pause_when_busy`: can't measure the utilization of %s", device.name)
        if gpu is not None and wanted == "auto" and not gpu.has_display:
            gpu.close()
            return None
        return gpu

    def _update_reason(self) -> None:
        resting = self._current_reason()
        if resting != self.pause_reason:
            log.info("%s", resting or "resumed: this PC offers to hold layers")
            self.pause_reason = resting
            self._on_change()

    def _current_reason(self) -> str:
        now = time.localtime()
        return self._pausing.pause_reason(60 * now.tm_hour + now.tm_min)
