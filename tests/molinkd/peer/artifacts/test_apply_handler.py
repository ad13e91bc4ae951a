"""``molink apply``: all models are found first, then requested together."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from molink.errors import ModelNotFound, NotAuthorized, RequestError, UsageError, WorkerError
from molink.wire.messages.admin import (
    ApplyFile,
    ApplyModels,
    ApplyReply,
    DesiredModels,
    LoadModelReply,
    ModelEntry,
)
from molink.wire.messages.base import Payload
from molinkd.peer.artifacts.apply_handler import ApplyHandler
from molinkd.peer.artifacts.transfers import Progress
from tests.support.fake_fleet import FACTS


class FakeBootstrap:
    def __init__(self, model: str) -> None:
        self.model, self.name, self.state = model, "", "looking"
        self.progress = Progress()
        self.facts: Any = None

    async def find_model(self) -> None:
        if self.model == "missing":
            raise ModelNotFound("no model missing")
        if self.model == "broken":
            raise RuntimeError("oops")
        self.name, self.state = self.model, "fetching"
        await asyncio.sleep(0)

    async def hash_model(self) -> None:
        self.state = "hashing"
        self.facts = msgspec.structs.replace(FACTS, name=self.name)


class Scene:
    def __init__(self) -> None:
        self.begun: list[ModelEntry] = []
        self.asked: list[tuple[ApplyModels, DesiredModels]] = []
        self.applied: list[Sequence[ModelEntry]] = []
        self.forbidden: Exception | None = None
        self.refusal: Exception | None = None
        self.handler = ApplyHandler(self.begin, self.ask, self.applied.append)

    def begin(self, entry: ModelEntry) -> Any:
        self.begun.append(entry)
        return FakeBootstrap(entry.source)

    async def ask(self, message: Any, payload: bytes) -> tuple[Any, bytes]:
        desired = msgspec.msgpack.decode(payload, type=DesiredModels)
        if self.forbidden is not None:
            raise self.forbidden
        if not desired.models:
            assert message.dry_run
            return ApplyReply(ref=0, payload=Payload("u8", (0,))), b""
        self.asked.append((message, desired))
        if self.refusal is not None:
            raise self.refusal
        return ApplyReply(ref=0, payload=Payload("u8", (3,))), b"+ m"

    async def end(self, order: ApplyFile) -> tuple[list[str], bytes]:
        """Repeat the request until it ends; returns the states before, and the reply."""
        states = []
        while True:
            far, text = await self.handler.apply_file(order)
            if isinstance(far, ApplyReply):
                return states, text
            assert isinstance(far, LoadModelReply)
            states.append(far.state)
            await asyncio.sleep(0)


def order(*sources: str, dry: bool = False, **more: Any) -> ApplyFile:
    entries = tuple(ModelEntry(source=source, **more) for source in sources)
    return ApplyFile(ref=7, models=entries, molink="1", dry_run=dry)


async def test_all_models_are_found_then_requested_together() -> None:
    scene = Scene()
    states, text = await scene.end(order("m", "n", replicas=2, pins=(("a", "auto"),)))
    assert text == b"+ m"
    assert states[0] == "looking"
    ((message, desired),) = scene.asked
    assert (message.dry_run, desired.molink) == (False, "1")
    assert [(one.model.name, one.replicas, one.pins) for one in desired.models] == [
        ("m", 2, (("a", "auto"),)),
        ("n", 2, (("a", "auto"),)),
    ]
    assert [[entry.source for entry in one] for one in scene.applied] == [["m", "n"]]
    await scene.end(order("m"))
    assert len(scene.asked) == 2
    await scene.handler.close()


async def test_a_newer_file_cancels_the_older() -> None:
    scene = Scene()
    await scene.handler.apply_file(order("m"))
    await scene.end(order("n"))
    assert [[one.model.name for one in desired.models] for _, desired in scene.asked] == [["n"]]


@pytest.mark.parametrize(
    ("source", "refusal", "kind", "why"),
    [
        ("missing", None, ModelNotFound, "no model missing"),
        ("broken", None, WorkerError, "internal error"),
        ("m", RequestError("m: no room"), RequestError, "m: no room"),
    ],
)
async def test_a_failure_applies_nothing(
    source: str, refusal: Exception | None, kind: type[Exception], why: str
) -> None:
    scene = Scene()
    scene.refusal = refusal
    with pytest.raises(kind, match=why):
        await scene.end(order("n", source))
    assert scene.applied == []
    assert len(scene.asked) == (refusal is not None)


async def test_a_rejected_order_fetches_nothing() -> None:
    scene = Scene()
    scene.forbidden = NotAuthorized.owner_only("apply a file")
    with pytest.raises(NotAuthorized, match="may apply a file"):
        await scene.end(order("m"))
    assert scene.begun == []


async def test_a_dry_run_fetches_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    scene = Scene()
    here = {"o/here": tmp_path}
    monkeypatch.setattr("molink.checkpoint.hub.find_cached", here.get)
    with pytest.raises(UsageError, match="`molink pull o/far` first"):
        await scene.end(order("o/here", "o/far", dry=True))
    assert [entry.source for entry in scene.begun] == ["o/here"]
    await scene.end(order("o/here", dry=True))
    assert [message.dry_run for message, _ in scene.asked] == [True]
    assert scene.applied == []
