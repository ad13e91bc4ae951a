"""Of a model in shards on the hub each PC gets the shards of its layers, and believes nobody."""

import asyncio
import hashlib
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from molink.checkpoint import hub as hub_module
from molink.checkpoint import hub_parts, manifest
from molink.checkpoint.folder import ModelFolder
from molink.checkpoint.manifest import Manifest
from molink.errors import FilesMissing, MolinkError, Unavailable
from molink.facts.model import ModelFacts
from molink.swarm import fetch_plan
from molink.swarm.supply import HUB, Supply
from molinkd.peer import library as library_module
from molinkd.peer import shard_draft, shard_fetch
from molinkd.peer import suppliers as suppliers_module
from molinkd.peer.founder import Founder
from molinkd.peer.home import Home
from molinkd.peer.hub_source import HubSource
from molinkd.peer.launch import Launch
from molinkd.peer.library import Library
from molinkd.peer.progress import Progress
from molinkd.peer.settings import Settings
from molinkd.peer.shelf import Shelf
from molinkd.peer.store import Store
from molinkd.peer.suppliers import Source
from tests.support import sources
from tests.support.fake_hub import COMMIT, REPOSITORY, FakeHub, in_place
from tests.support.models import write_plain_model
from tests.support.shards import shard_name, write_shards
from tests.support.sources import LibrarySource

PLACE = f"{REPOSITORY}@{COMMIT}"
#: Bytes of a chunk here.
CHUNK = 1024
#: Shards of the model: its ends and four layers.
SHARDS = [shard_name(number, 5) for number in range(5)]
ENDS = SHARDS[0]


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    chunked = (manifest, fetch_plan, hub_parts, library_module, suppliers_module, sources)
    for module in chunked:
        monkeypatch.setattr(module, "CHUNK_BYTES", CHUNK)
    monkeypatch.setattr(fetch_plan, "RUN_CHUNKS", 2)
    monkeypatch.setattr(shard_draft, "_NOTE_EVERY", 2)
    monkeypatch.setattr(shard_fetch, "PAUSES_S", (0.0, 0.0))
    model = write_shards(write_plain_model(tmp_path / "model"))
    with in_place(model, tmp_path / "cache", monkeypatch) as made:
        yield made


class CountingHub(HubSource):
    """The hub; ``sent`` has the bytes that one PC took from it, by file."""

    def __init__(self, sent: Counter[str]) -> None:
        super().__init__(PLACE)
        self._sent = sent

    async def read_slice(self, root: str, part: str, index: int, begin: int, length: int) -> bytes:
        data = await super().read_slice(root, part, index, begin, length)
        self._sent[part] += len(data)
        return data


class Pc(LibrarySource):
    """A PC with a store, from which others read."""

    def __init__(self, root: Path, peers: Mapping[str, Source] | None = None) -> None:
        super().__init__(Library())
        (root / "models").mkdir(parents=True, exist_ok=True)
        self.home = Home(root)
        self.peers = dict(peers or {})
        self.from_hub = Counter[str]()
        #: Pieces that others read here.
        self.given = Counter[str]()
        self.liars: dict[str, str] = {}
        self.store = Store(
            self.home.models,
            "me",
            self.library,
            self._connect,
            Library(),
            self.liars.__setitem__,
            hub=True,
        )
        self.shelf = Shelf(self.home.models, self.library, lambda: None)

    @asynccontextmanager
    async def _connect(self, peer: str) -> AsyncIterator[Source]:
        if peer == PLACE:
            yield CountingHub(self.from_hub)
        elif peer in self.peers:
            yield self.peers[peer]
        else:
            raise Unavailable(f"{peer} is not there")

    async def read(self, root: str, part: str, index: int) -> bytes:
        data = await super().read(root, part, index)
        self.given[part] += len(data)
        return data

    async def bring(self, model: str = REPOSITORY, **settings: Any) -> ModelFacts:
        """What ``molink up --model`` does about the model."""
        founder = self.founder(model, **settings)
        await founder.find_model()
        await founder.hash_model()
        assert founder.facts is not None
        return founder.facts

    def founder(self, model: str = REPOSITORY, **settings: Any) -> Founder:
        home = self.home.create()
        launch = Launch(
            home=str(home.root),
            settings=Settings(name="n", **settings),
            role="up",
            model=model,
            token=None,
        )
        return Founder(launch, home, home.keys(), self.library, lambda _: None)

    async def stage(
        self,
        facts: ModelFacts,
        layers: tuple[int, int],
        *peers: str,
        use_hub: bool = True,
        progress: Progress | None = None,
    ) -> ModelFolder:
        supply = Supply((), peers, PLACE if use_hub else "")
        folder = await self.store.stage(facts.name, facts.root, layers, supply, progress)
        await self.shelf.look()
        return ModelFolder.open(folder, layers)


def same(opened: ModelFolder, hub: FakeHub, layers: tuple[int, int]) -> None:
    """The tensors of a stage are those on the hub, and the files too."""
    there = ModelFolder.open(hub.folder)
    names = opened.stage_tensors(*layers)
    assert names == there.stage_tensors(*layers)
    for name in {opened.tensors[name].file for name in names}:
        assert (opened.path / name).read_bytes() == (hub.folder / name).read_bytes()


def sizes(hub: FakeHub, *names: str) -> dict[str, int]:
    return {name: (hub.folder / name).stat().st_size for name in names}


# --- bringing ---


async def test_the_bringer_has_a_root_before_any_weights(tmp_path: Path, hub: FakeHub) -> None:
    pc = Pc(tmp_path / "a")
    facts = await pc.bring()
    assert facts.hub == PLACE
    assert facts.files_bytes == sum(sizes(hub, *SHARDS).values())
    whole = facts.files_bytes
    read = sum(int(to) - int(begin) + 1 for _, said in hub.asked for begin, to in [ends(said)])
    assert 0 < read < whole / 4  # heads alone
    held = pc.library.held(facts.root).manifest
    assert {name: shard.nbytes for name, shard in held.shards.items()} == sizes(hub, *SHARDS)
    for name, shard in held.shards.items():
        assert shard.sha256 == hashlib.sha256((hub.folder / name).read_bytes()).digest()
    # Placement goes by the same facts as that of the whole folder.
    there = ModelFolder.open(hub.folder).facts("some-model")
    for field in ("layers", "layer_bytes", "first_bytes", "last_bytes", "context", "narrow"):
        assert getattr(facts, field) == getattr(there, field)


def ends(said: str) -> tuple[str, str]:
    begin, _, last = said.removeprefix("bytes=").partition("-")
    return begin, last


async def test_its_stage_gets_its_shards_alone(tmp_path: Path, hub: FakeHub) -> None:
    pc = Pc(tmp_path / "a")
    facts, progress = await pc.bring(), Progress()
    same(await pc.stage(facts, (1, 3), progress=progress), hub, (1, 3))
    assert pc.from_hub == sizes(hub, SHARDS[2], SHARDS[3])
    assert progress.done == progress.total == pc.from_hub.total()
    assert progress.source == HUB
    (told,) = pc.shelf.parts()
    assert (told.root, told.layers) == (facts.root, ((1, 3),))
    # Nor does it come again, in this run or the next.
    await pc.stage(facts, (1, 3))
    await Pc(tmp_path / "a").stage(facts, (1, 3))
    assert pc.from_hub == sizes(hub, SHARDS[2], SHARDS[3])


async def test_it_is_brought_again_without_the_hub(tmp_path: Path, hub: FakeHub) -> None:
    facts = await Pc(tmp_path / "a").bring()
    hub.status = 503
    assert await Pc(tmp_path / "a").bring() == facts


async def test_two_that_bring_it_agree(tmp_path: Path, hub: FakeHub) -> None:
    assert await Pc(tmp_path / "a").bring() == await Pc(tmp_path / "b").bring()


# --- a swarm ---


async def test_three_pcs_share_it(tmp_path: Path, hub: FakeHub) -> None:
    a = Pc(tmp_path / "a")
    facts = await a.bring()
    b, c = Pc(tmp_path / "b", {"a": a}), Pc(tmp_path / "c", {"a": a})
    parts = {a: (0, 2), b: (2, 3), c: (3, 4)}
    for pc, layers in parts.items():
        same(await pc.stage(facts, layers, *pc.peers), hub, layers)
    assert a.from_hub == sizes(hub, ENDS, *SHARDS[1:3])
    assert b.from_hub == sizes(hub, SHARDS[3])
    # The ends of the model are in one shard: the last stage has it from the first.
    assert c.from_hub == sizes(hub, SHARDS[4])
    assert a.given[ENDS] == sizes(hub, ENDS)[ENDS]
    assert b.given.total() == 0
