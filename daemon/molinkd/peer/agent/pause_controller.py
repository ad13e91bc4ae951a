"""Pauses this PC's stages on request, on schedule, or while another program uses the GPU."""

import asyncio
import logging
import time
from collections.abc import Callable

from molink.facts.device import Device
from molink.swarm.agent.pause_policy import PausePolicy
from molinkd.peer.agent.gpu_usage import GpuMonitor, OwnGpuUsage, open_gpu
from molinkd.peer.settings import Settings

log = logging.getLogger(__name__)

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
        if self._poller is not None:
            self._poller.cancel()
            await asyncio.gather(self._poller, return_exceptions=True)
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
