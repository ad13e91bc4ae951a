"""Models become available with their pipelines' maximum request length."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

from molink.checkpoint.model_task import GENERATE
from molink.swarm.artifacts.sources import ModelSources
from molink.wire.messages.instructions import Route
from molinkd.api.backend import ServedModel
from molinkd.peer.frontend import served_models as module
from molinkd.peer.frontend.served_models import ServedModels


class FakeStore:
    def __init__(self) -> None:
        self.go_on = asyncio.Event()
        self.go_on.set()

    async def fetch_metadata(
        self, model: str, root: str, supply: ModelSources, *, rate_limited: bool
    ) -> Path:
        await self.go_on.wait()
        return Path(model)


def route(
    context: int, *, ready: bool, epoch: int = 1, root: str = "", pipeline: str = "p1"
) -> Route:
    return Route(
        pipeline=pipeline,
        epoch=epoch,
        model="m",
        is_ready=ready,
        scheduler=None,
        max_model_len=context,
        root=root,
    )


@pytest.fixture
async def scene(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[SimpleNamespace]:
    config = SimpleNamespace(
        max_model_len=999, short_context=0, task=GENERATE, hidden_size=8, vision=None
    )
    config.adapters = []
    monkeypatch.setattr(module.ModelConfig, "load_folder", lambda _: config)
    changes: asyncio.Queue[list[int]] = asyncio.Queue()

    def changed(models: Sequence[ServedModel]) -> None:
        changes.put_nowait([model.max_model_len for model in models])

    store = FakeStore()
    served = ServedModels(store, changed, lambda _: None)  # type: ignore[arg-type]
    yield SimpleNamespace(served=served, store=store, changes=changes, config=config)
    await served.close()


async def test_a_ready_pipeline_determines_max_model_len(scene: SimpleNamespace) -> None:
    scene.served.update_route(route(4096, ready=False))
    assert await scene.changes.get() == [4096]
    scene.served.update_route(route(1024, ready=True))
    assert await scene.changes.get() == [1024]
    scene.served.update_route(route(1024, ready=True))
    scene.served.update_route(route(4096, ready=False, epoch=2))  # doesn't give the new maximum
    assert scene.changes.empty()


async def test_a_route_that_changes_while_the_tokenizer_is_fetched(scene: SimpleNamespace) -> None:
    scene.store.go_on.clear()
    scene.served.update_route(route(4096, ready=False))
    await asyncio.sleep(0)
    scene.served.update_route(route(1024, ready=True))
    scene.store.go_on.set()
    assert await scene.changes.get() == [1024]


async def test_a_model_with_other_adapters_is_fetched_again(scene: SimpleNamespace) -> None:
    def names() -> list[str]:
        return [name for model in scene.served._served.values() for name in model.adapters]

    scene.config.adapters = [SimpleNamespace(name="one")]
    before, after = (f"{digit * 64}:9" for digit in "ab")
    for pipeline in ("p1", "p2"):
        scene.served.update_route(route(64, ready=True, root=before, pipeline=pipeline))
    await scene.changes.get()
    assert names() == ["one"]
    scene.config.adapters = [SimpleNamespace(name="two")]
    # While one replica serves the old version, requests go there.
    scene.served.update_route(route(64, ready=True, root=after, pipeline="p1"))
    assert not scene.served._tasks
    scene.served.update_route(route(64, ready=False, root=after, pipeline="p2"))
    await scene.changes.get()
    assert names() == ["two"]
