"""Pausing on request, on schedule, and for other programs on the GPU."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from molink.facts.device import Device
from molink.swarm.agent import pause_policy as pausing
from molink.swarm.agent.pause_policy import CONTENTION_REASON, DRAINED_REASON
from molinkd.peer.agent import pause_controller as pause_module
from molinkd.peer.agent.pause_controller import GpuMonitor, OwnGpuUsage, PauseController
from molinkd.peer.settings import Settings
from tests.support.net import until

GPU = Device(kind="cuda", name="x", memory=1)


class Card:
    """A GPU of which other programs use ``share``."""

    def __init__(self, *, display: bool = True) -> None:
        self.has_display, self.share, self.closed = display, 0.0, False
        self.asked: list[OwnGpuUsage] = []

    def measure_other_usage(self, own: OwnGpuUsage) -> float:
        self.asked.append(own)
        return self.share

    def close(self) -> None:
        self.closed = True


class Scene:
    def __init__(self) -> None:
        self.card: Card | None = Card()
        self.reasons: list[str] = []
        self.controllers: list[PauseController] = []

    def controller(self, **settings: Any) -> PauseController:
        def find(_: Device) -> GpuMonitor | None:
            return self.card  # type: ignore[return-value]

        def changed() -> None:
            self.reasons.append(made.stage_pause_reason)

        own = OwnGpuUsage([1], 0.25)
        made = PauseController(Settings(name="pc", **settings), lambda: own, changed, find)
        self.controllers.append(made)
        return made


@pytest.fixture
async def scene(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Scene]:
    monkeypatch.setattr(pause_module, "POLL_INTERVAL_S", 0.001)
    for name in ("PAUSE_DELAY_S", "RESUME_DELAY_S", "_AVERAGING_TIME_S"):
        monkeypatch.setattr(pausing, name, 1e-3)
    scene = Scene()
    yield scene
    for one in scene.controllers:
        await one.close()


async def test_another_program_pauses_and_resumes(scene: Scene) -> None:
    card = scene.card
    assert card is not None
    controller = scene.controller()
    controller.start(GPU)
    await until(lambda: card.asked)
    assert card.asked[0] == OwnGpuUsage([1], 0.25)
    card.share = 0.9
    await until(lambda: controller.stage_pause_reason == CONTENTION_REASON)
    card.share = 0.0
    await until(lambda: not controller.stage_pause_reason)
    assert scene.reasons == [CONTENTION_REASON, ""]
    await controller.close()
    assert card.closed


@pytest.mark.parametrize(
    ("display", "settings", "watched"),
    [
        (True, {}, True),
        (False, {}, False),
        (False, {"pause_when_busy": "on"}, True),
        (True, {"pause_when_busy": "off"}, False),
        (True, {"stages_per_host": 2}, False),
        (True, {"stages_per_host": 2, "pause_when_busy": "on"}, True),
    ],
)
async def test_which_gpus_are_watched(
    scene: Scene, display: bool, settings: dict[str, Any], watched: bool
) -> None:
    scene.card = Card(display=display)
    controller = scene.controller(**settings)
    assert (await asyncio.to_thread(controller._open_gpu, GPU) is scene.card) is watched
    assert scene.card.closed is (not watched and settings == {})


async def test_pause_times_apply_without_a_gpu(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    scene.card = None
    controller = scene.controller(pause_when_busy="on", pause_times=("0:00-24:00",))
    assert controller.stage_pause_reason == "paused from 00:00 to 24:00", "from the first report on"
    controller.start(Device(kind="cpu", name="x", memory=1))
    await until(lambda: "can't measure the utilization" in caplog.text)
    assert scene.reasons == []


async def test_draining_takes_effect_immediately(scene: Scene) -> None:
    controller = scene.controller()
    controller.set_drained(True)
    controller.set_drained(True)
    controller.set_drained(False)
    assert scene.reasons == [DRAINED_REASON, ""]
    idle = scene.controller(stage="none")
    idle.set_drained(True)
    assert idle.stage_pause_reason == "", "it offers no layers anyway"
    assert idle.pause_reason == DRAINED_REASON, "and passes on nothing now"
