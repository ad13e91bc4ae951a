"""Loading a model while the daemon runs: progress and failures."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from molink.errors import ModelNotFound, NotAuthorized, WorkerError
from molinkd.peer.artifacts.model_loader import ModelLoader
from molinkd.peer.artifacts.transfers import Progress


class FakeBootstrap:
    def __init__(self, model: str) -> None:
        self.model, self.name, self.state = model, "", "looking"
        self.progress = Progress()
        self.gate = asyncio.Event()
        self.error: Exception | None = None

    async def find_model(self) -> None:
        self.state, self.progress.total = "fetching", 10
        await self.gate.wait()
        if self.error is not None:
            raise self.error
        self.name = f"name of {self.model}"

    async def hash_model(self) -> None:
        self.state = "hashing"

    def build_order(self) -> str:
        return f"serve {self.model}"


class Scene:
    def __init__(self) -> None:
        self.bootstraps: list[FakeBootstrap] = []
        self.asked: list[object] = []
        self.served: list[str] = []
        self.refusal: Exception | None = None
        self.loader = ModelLoader(self.begin, self.serve, self.served.append)

    def begin(self, model: str) -> Any:
        self.bootstraps.append(FakeBootstrap(model))
        return self.bootstraps[-1]

    async def serve(self, order: object) -> None:
        if self.refusal is not None:
            raise self.refusal
        self.asked.append(order)

    async def until(self, model: str, met: Callable[[Any], bool]) -> Any:
        while True:
            far = await self.loader.load_model(model)
            if met(far):
                return far
            await asyncio.sleep(0)


async def test_progress_is_polled_until_loaded() -> None:
    scene = Scene()
    far = await scene.until("m", lambda far: far.state == "fetching")
    assert (far.name, far.total) == ("", 10)
    scene.bootstraps[0].gate.set()
    far = await scene.until("m", lambda far: far.state == "asked")
    assert far.name == "name of m"
    assert (scene.asked, scene.served) == (["serve m"], ["m"])
    # Asked again, since the model may have been stopped meanwhile.
    await scene.loader.load_model("m")
    assert len(scene.bootstraps) == 2
    await scene.loader.close()


async def test_a_newer_request_cancels_the_older() -> None:
    scene = Scene()
    await scene.loader.load_model("m")
    await scene.loader.load_model("n")
    assert [one.model for one in scene.bootstraps] == ["m", "n"]
    scene.bootstraps[1].gate.set()
    await scene.until("n", lambda far: far.state == "asked")
    assert scene.asked == ["serve n"]


@pytest.mark.parametrize("error", [ModelNotFound("no such model"), NotAuthorized("not you")])
async def test_failures_are_raised(error: Exception) -> None:
    scene = Scene()
    await scene.loader.load_model("m")
    if isinstance(error, NotAuthorized):
        scene.refusal = error
    else:
        scene.bootstraps[0].error = error
    scene.bootstraps[0].gate.set()
    with pytest.raises(type(error), match=str(error)):
        await scene.until("m", lambda far: far.state == "asked")
    assert scene.served == []
    await scene.loader.load_model("m")  # a new attempt
    assert len(scene.bootstraps) == 2
    scene.bootstraps[1].error = RuntimeError("oops")
    scene.bootstraps[1].gate.set()
    scene.refusal = None
    with pytest.raises(WorkerError, match="oops"):
        await scene.until("m", lambda far: far.state == "asked")
