"""What the owner does over the endpoint, with a fake hub."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import aclosing
from pathlib import Path

import pytest

from molink.checkpoint import hub
from molink.errors import ModelNotFound, Overloaded
from molinkd.peer.frontend import local_administration
from molinkd.peer.frontend.local_administration import MAX_PULLS, LocalAdministration
from molinkd.peer.home import Home
from tests.support.fake_hub import REPOSITORY, FakeHub, in_place
from tests.support.models import MakeModel


@pytest.fixture
def served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make_model: MakeModel
) -> Iterator[FakeHub]:
    monkeypatch.setattr(hub, "RETRY_DELAYS_S", (0.0,))
    with in_place(make_model(tmp_path / "model"), tmp_path / "cache", monkeypatch) as made:
        yield made


@pytest.fixture
def owner(tmp_path: Path) -> LocalAdministration:
    return LocalAdministration(Home(tmp_path / "home"))


async def test_clients_share_a_download(owner: LocalAdministration, served: FakeHub) -> None:
    async def pull(model: str = REPOSITORY) -> int:
        return len([one async for one in owner.pull_model(model)])

    assert min(await asyncio.gather(pull(), pull())) >= 1
    assert hub.find_cached(REPOSITORY) is not None
    assert max(served.sent.values()) == sum(
        path.stat().st_size for path in served.folder.glob("*.safetensors")
    )
    with pytest.raises(ModelNotFound, match="no model"):
        await pull("no-such-model")


async def test_a_download_ends_with_its_last_client(
    owner: LocalAdministration, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped = threading.Event()

    def fetch(_model: str, _home: Home, _progress: object, stop: threading.Event) -> None:
        stop.wait(60)
        stopped.set()

    monkeypatch.setattr(local_administration, "fetch_whole_model", fetch)
    async with aclosing(owner.pull_model("owner/a")) as first:
        await anext(first)
        async with aclosing(owner.pull_model("owner/a")) as second:
            await anext(second)
        others = [owner.pull_model(f"owner/b{number}") for number in range(1, MAX_PULLS)]
        for one in others:
            await anext(one)
        with pytest.raises(Overloaded):
            await anext(owner.pull_model("owner/c"))
        for one in others:
            await one.aclose()
    assert await asyncio.to_thread(stopped.wait, 60)
    async with aclosing(owner.pull_model("owner/c")) as last:
        await anext(last)
