"""Sees to it that this PC holds no layers while its user, or the time, or a game says so."""

import asyncio
import logging
import time
from collections.abc import Callable

from molink.facts.device import Device
from molink.swarm.agent.pausing import Pausing
from molinkd.peer.agent.gpu_use import GpuUse, OwnUse, open_gpu
from molinkd.peer.settings import Settings

log = logging.getLogger(__name__)

#: Between two looks, in seconds.
LOOK_S = 1.0


class Pauser:
    """The shell of :class:`molink.swarm.agent.pausing.Pausing`."""

    def __init__(
        self,
        settings: Settings,
        own: Callable[[], OwnUse],
        on_change: Callable[[], None],
        find_gpu: Callable[[Device], GpuUse | None] = open_gpu,
    ) -> None:
        """``own()`` is what this PC's stages take of the GPU now.

        ``on_change`` is called when :attr:`resting` is another than before.
        """
        self._settings, self._own, self._on_change = settings, own, on_change
        self._find_gpu = find_gpu
        self._pausing = Pausing(settings.pause_times)
        self._gpu: GpuUse | None = None
        self._looking: asyncio.Task[None] | None = None
        #: Why this PC does nothing for others at present; empty if it does.
        self.resting = self._why()

    @property
    def reason(self) -> str:
        """Why no layers are offered though they are at other times; empty if they are."""
        return "" if self._settings.stage == "none" else self.resting

    def start(self, device: Device) -> None:
        """Begin to look at the clock, and at the device if that is wanted."""
        self._looking = asyncio.get_running_loop().create_task(self._look(device))

    def drain(self, drain: bool) -> None:
        """The user wants no layers here for now, or does again."""
        self._pausing.drained = drain
        self._review()

    async def close(self) -> None:
        """Look no more."""
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.gather(self._looking, return_exceptions=True)
        if self._gpu is not None:
            self._gpu.close()

    async def _look(self, device: Device) -> None:
        self._gpu = await asyncio.to_thread(self._gpu_to_watch, device)
        loop = asyncio.get_running_loop()
        while True:
            if self._gpu is not None:
                share = await asyncio.to_thread(self._gpu.by_others, self._own())
                self._pausing.others.observe(share, loop.time())
            self._review()
            await asyncio.sleep(LOOK_S)

    def _gpu_to_watch(self, device: Device) -> GpuUse | None:
        wanted, settings = self._settings.pause_when_busy, self._settings
        # Stages of several daemons would take each other for games.
        if wanted == "off" or (wanted == "auto" and settings.stages_here > 1):
            return None
        gpu = self._find_gpu(device)
        if gpu is None and wanted == "on":
            log.warning("`pause_when_busy`: how busy %s is can't be told here", device.name)
        if gpu is not None and wanted == "auto" and not gpu.display:
            gpu.close()
            return None
        return gpu

    def _review(self) -> None:
        resting = self._why()
        if resting != self.resting:
            log.info("%s", resting or "layers are offered again")
            self.resting = resting
            self._on_change()

    def _why(self) -> str:
        now = time.localtime()
        return self._pausing.reason(60 * now.tm_hour + now.tm_min)
