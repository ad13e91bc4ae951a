"""Prefetching files for a future stage."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from molink.errors import Unavailable
from molink.swarm.artifacts.sources import ModelSources
from molink.wire.messages.instructions import Prefetch
from molink.wire.messages.peer_reports import PrefetchState
from molinkd.peer.artifacts.prefetcher import Prefetcher
from molinkd.peer.artifacts.transfers import Progress


class FakeStore:
    def __init__(self) -> None:
        self.calls: list[tuple[int, int]] = []
        self.asked = asyncio.Event()
        self.answers: asyncio.Queue[Exception | None] = asyncio.Queue()

    async def fetch_stage(
        self,
        model: str,
        root: str,
        layers: tuple[int, int],
        supply: ModelSources,
        progress: Progress,
        *,
        rate_limited: bool,
    ) -> Path:
        assert rate_limited
        self.calls.append(layers)
        progress.done, progress.total = 1_000_000, 4_000_000
        self.asked.set()
        answer = await self.answers.get()
        if answer is not None:
            raise answer
        return Path(model)


class Scene:
    def __init__(self) -> None:
        self.store = FakeStore()
        self.said: asyncio.Queue[PrefetchState | None] = asyncio.Queue()
        self.ready = asyncio.Event()
        self.ready.set()
        self.prefetcher = Prefetcher(self.store, self._changed, self._ready)  # type: ignore[arg-type]

    async def _ready(self) -> None:
        await self.ready.wait()

    def _changed(self) -> None:
        self.said.put_nowait(self.prefetcher.state)


@pytest.fixture
async def scene() -> AsyncIterator[Scene]:
    scene = Scene()
    yield scene
    await scene.prefetcher.close()
    assert scene.prefetcher.state is None


def order(number: int = 1, layers: tuple[int, int] = (0, 2)) -> Prefetch:
    return Prefetch(number=number, layers=layers, model="m", sources=("a",))


async def test_files_are_fetched_once(scene: Scene) -> None:
    scene.prefetcher.start_prefetch(order())
    assert await scene.said.get() == PrefetchState(number=1, state="fetching")
    scene.prefetcher.start_prefetch(order())
    await scene.said.get()
    assert "layers 1-2" in scene.prefetcher.transfer_text
    await scene.store.asked.wait()
    state = scene.prefetcher.state
    assert state is not None
    assert (state.done, state.total) == (1_000_000, 4_000_000)
    scene.store.answers.put_nowait(None)
    assert await scene.said.get() == PrefetchState(number=1, state="done")
    scene.prefetcher.start_prefetch(order())
    assert await scene.said.get() == PrefetchState(number=1, state="done")
    assert scene.store.calls == [(0, 2)]
    assert scene.prefetcher.transfer_text == ""


async def test_a_prefetch_is_done_once_a_stage_could_start(scene: Scene) -> None:
    scene.ready.clear()
    scene.prefetcher.start_prefetch(order())
    scene.store.answers.put_nowait(None)
    await scene.store.asked.wait()
    await asyncio.sleep(0)
    state = scene.prefetcher.state
    assert state is not None
    assert state.state == "fetching"
    scene.ready.set()
    await scene.said.get()
    assert await scene.said.get() == PrefetchState(number=1, state="done")


async def test_a_failure_is_reported_and_can_be_retried(scene: Scene) -> None:
    scene.prefetcher.start_prefetch(order())
    scene.store.answers.put_nowait(Unavailable("nobody has it"))
    await scene.said.get()
    assert await scene.said.get() == PrefetchState(number=1, state="failed", reason="nobody has it")
    scene.prefetcher.start_prefetch(order())
    scene.store.answers.put_nowait(RuntimeError("oops"))
    await scene.said.get()
    said = await scene.said.get()
    assert said is not None
    assert "oops" in said.reason


async def test_a_newer_order_cancels_the_older(scene: Scene) -> None:
    scene.prefetcher.start_prefetch(order())
    await asyncio.sleep(0)
    scene.prefetcher.start_prefetch(order(2, (0, 3)))
    await asyncio.sleep(0)
    scene.store.answers.put_nowait(None)
    said = [await scene.said.get() for _ in range(3)]
    assert said[-1] == PrefetchState(number=2, state="done")
    assert scene.store.calls == [(0, 2), (0, 3)]
