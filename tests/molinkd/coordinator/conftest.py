"""A coordinator that has started."""

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from molinkd.coordinator import coordinator as module
from tests.support.coordinator_scene import Scene
from tests.support.fake_fleet import Kit


@pytest.fixture
async def scene(kit: Kit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Scene]:
    monkeypatch.setattr(module, "TIMER_INTERVAL", 0.02)
    async with contextlib.AsyncExitStack() as stack:
        scene = Scene(kit, tmp_path / "state", stack)
        stack.push_async_callback(scene.stop)
        yield await scene.start()
