"""The pauser: who is asked, and what it tells."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from molink.facts.device import Device
from molink.swarm.agent import pausing
from molink.swarm.agent.pausing import DRAINED, USED
from molinkd.peer.agent import pauser as pauser_module
from molinkd.peer.agent.gpu_use import GpuUse, OwnUse
from molinkd.peer.agent.pauser import Pauser
from molinkd.peer.settings import Settings
from tests.support.net import until

GPU = Device(kind="cuda", name="x", memory=1)


class Card:
    """A GPU of which others take ``share``."""

    def __init__(self, *, display: bool = True) -> None:
        self.display, self.share, self.closed = display, 0.0, False
        self.asked: list[OwnUse] = []

    def by_others(self, own: OwnUse) -> float:
        self.asked.append(own)
        return self.share

    def close(self) -> None:
        self.closed = True


class Scene:
    def __init__(self) -> None:
        self.card: Card | None = Card()
        self.reasons: list[str] = []
        self.pausers: list[Pauser] = []

    def pauser(self, **settings: Any) -> Pauser:
        def find(_: Device) -> GpuUse | None:
            return self.card  # type: ignore[return-value]

        def changed() -> None:
            self.reasons.append(made.reason)

        own = OwnUse([1], 0.25)
        made = Pauser(Settings(name="pc", **settings), lambda: own, changed, find)
        self.pausers.append(made)
        return made


@pytest.fixture
async def scene(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Scene]:
    monkeypatch.setattr(pauser_module, "LOOK_S", 0.001)
    for name in ("BUSY_S", "FREE_S", "_MEAN_S"):
        monkeypatch.setattr(pausing, name, 1e-3)
    scene = Scene()
    yield scene
    for one in scene.pausers:
        await one.close()


async def test_a_game_begins_and_ends(scene: Scene) -> None:
    card = scene.card
    assert card is not None
    pauser = scene.pauser()
    pauser.start(GPU)
    await until(lambda: card.asked)
    assert card.asked[0] == OwnUse([1], 0.25)
    card.share = 0.9
    await until(lambda: pauser.reason == USED)
    card.share = 0.0
    await until(lambda: not pauser.reason)
    assert scene.reasons == [USED, ""]
    await pauser.close()
    assert card.closed


@pytest.mark.parametrize(
    ("display", "settings", "watched"),
    [
        (True, {}, True),
        (False, {}, False),
        (False, {"pause_when_busy": "on"}, True),
        (True, {"pause_when_busy": "off"}, False),
        (True, {"stages_here": 2}, False),
        (True, {"stages_here": 2, "pause_when_busy": "on"}, True),
    ],
)
async def test_which_cards_are_watched(
    scene: Scene, display: bool, settings: dict[str, Any], watched: bool
) -> None:
    scene.card = Card(display=display)
    pauser = scene.pauser(**settings)
    assert (await asyncio.to_thread(pauser._gpu_to_watch, GPU) is scene.card) is watched
    assert scene.card.closed is (not watched and settings == {})


async def test_a_pc_without_a_card_keeps_the_time(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    scene.card = None
    pauser = scene.pauser(pause_when_busy="on", pause_times=("0:00-24:00",))
    assert pauser.reason == "paused from 00:00 to 24:00", "from the first report on"
    pauser.start(Device(kind="cpu", name="x", memory=1))
    await until(lambda: "can't be told" in caplog.text)
    assert scene.reasons == []


async def test_the_user_is_obeyed_at_once(scene: Scene) -> None:
    pauser = scene.pauser()
    pauser.drain(True)
    pauser.drain(True)
    pauser.drain(False)
    assert scene.reasons == [DRAINED, ""]
    idle = scene.pauser(stage="none")
    idle.drain(True)
    assert idle.reason == "", "it offers no layers anyway"
    assert idle.resting == DRAINED, "and passes on nothing now"
