"""Models in shards on the hub: each PC fetches the shards of its layers, and trusts no source."""

import asyncio
import hashlib
import json
import os
import threading
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from molink.checkpoint import hub as hub_module
from molink.checkpoint import hub_reader as hub_parts
from molink.checkpoint import manifest
from molink.checkpoint.manifest import ShardEntry
from molink.checkpoint.model_folder import ModelFolder
from molink.errors import BrokenModel, FilesMissing, ModelError, Unavailable
from molink.facts.model import ModelFacts
from molink.swarm.artifacts import fetch_plan
from molink.swarm.artifacts.sources import HUB, ModelSources
from molinkd.peer.artifacts import model_repository as library_module
from molinkd.peer.artifacts import partial_shard as shard_draft
from molinkd.peer.artifacts import shard_fetch
from molinkd.peer.artifacts import sources as sources_module
from molinkd.peer.artifacts.bootstrap import Bootstrap
from molinkd.peer.artifacts.model_repository import ModelRepository
from molinkd.peer.artifacts.model_store import ModelStore
from molinkd.peer.artifacts.partial_models import PartialModels
from molinkd.peer.artifacts.partial_shard import PartialShard
from molinkd.peer.artifacts.replicator import ModelReplicator
from molinkd.peer.artifacts.source_clients import HubSource
from molinkd.peer.artifacts.sources import Source
from molinkd.peer.artifacts.stored_model import create_file
from molinkd.peer.artifacts.transfers import Progress
from molinkd.peer.home import Home
from molinkd.peer.launch import Launch
from molinkd.peer.settings import Settings
from tests.support import fake_sources as sources
from tests.support.fake_hub import COMMIT, REPOSITORY, FakeHub, in_place
from tests.support.fake_sources import RepositorySource
from tests.support.models import write_plain_model
from tests.support.shards import shard_name, write_shards

PLACE = f"{REPOSITORY}@{COMMIT}"
#: Bytes of a chunk in these tests.
CHUNK = 1024
#: The model's shards: one with embeddings and head, and four with a layer each.
SHARDS = [shard_name(number, 5) for number in range(5)]
ENDS = SHARDS[0]
#: A valid tokenizer of a single word.
TOKENIZER = '{"model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}}'


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    chunked = (manifest, fetch_plan, hub_parts, library_module, sources_module, sources)
    for module in chunked:
        monkeypatch.setattr(module, "CHUNK_BYTES", CHUNK)
    monkeypatch.setattr(fetch_plan, "RUN_CHUNKS", 2)
    monkeypatch.setattr(shard_draft, "_INDEX_INTERVAL", 2)
    monkeypatch.setattr(shard_fetch, "RETRY_PAUSES_S", (0.0, 0.0))
    plain = write_plain_model(tmp_path / "model")
    (plain / "tokenizer.json").write_text(TOKENIZER, encoding="utf-8")
    model = write_shards(plain)
    with in_place(model, tmp_path / "cache", monkeypatch) as made:
        yield made


class CountingHub(HubSource):
    """The hub; ``sent`` counts the bytes that one PC reads from it, by file."""

    def __init__(self, sent: Counter[str]) -> None:
        super().__init__(PLACE)
        self._sent = sent

    async def read_slice(self, root: str, part: str, index: int, begin: int, length: int) -> bytes:
        data = await super().read_slice(root, part, index, begin, length)
        self._sent[part] += len(data)
        return data


class Pc(RepositorySource):
    """A PC with a store, from which others read."""

    def __init__(self, root: Path, peers: Mapping[str, Source] | None = None) -> None:
        super().__init__(ModelRepository())
        (root / "models").mkdir(parents=True, exist_ok=True)
        self.home = Home(root)
        self.peers = dict(peers or {})
        self.from_hub = Counter[str]()
        #: Bytes that others read here, by part.
        self.given = Counter[str]()
        self.liars: dict[str, str] = {}
        self.store = ModelStore(
            self.home.models,
            "me",
            self.library,
            self._connect,
            ModelRepository(),
            self.liars.__setitem__,
            hub=True,
        )
        self.shelf = PartialModels(self.home.models, self.library, lambda: None)

    @asynccontextmanager
    async def _connect(self, peer: str) -> AsyncIterator[Source]:
        if peer == PLACE:
            yield CountingHub(self.from_hub)
        elif peer in self.peers:
            yield self.peers[peer]
        else:
            raise Unavailable(f"{peer} is not there")

    async def read_chunk(self, root: str, part: str, index: int) -> bytes:
        data = await super().read_chunk(root, part, index)
        self.given[part] += len(data)
        return data

    async def bring(self, model: str = REPOSITORY, **settings: Any) -> ModelFacts:
        """Provide the model as ``molink up --model`` does; returns its facts."""
        bootstrap = self.founder(model, **settings)
        await bootstrap.find_model()
        await bootstrap.hash_model()
        assert bootstrap.facts is not None
        return bootstrap.facts

    def founder(self, model: str = REPOSITORY, **settings: Any) -> Bootstrap:
        home = self.home.create_folders()
        launch = Launch(
            home=str(home.root),
            settings=Settings(name="n", **settings),
            role="up",
            model=model,
            token=None,
        )
        return Bootstrap(launch, home, home.load_keys(), self.library, lambda _: None)

    async def stage(
        self,
        facts: ModelFacts,
        layers: tuple[int, int],
        *peers: str,
        use_hub: bool = True,
        progress: Progress | None = None,
    ) -> ModelFolder:
        supply = ModelSources((), peers, PLACE if use_hub else "")
        folder = await self.store.fetch_stage(facts.name, facts.root, layers, supply, progress)
        await self.shelf.scan_store()
        return ModelFolder.open(folder, layers)


def same(opened: ModelFolder, hub: FakeHub, layers: tuple[int, int]) -> None:
    """Check that a stage's tensors and files are the hub's."""
    there = ModelFolder.open(hub.folder)
    names = opened.stage_tensors(*layers)
    assert names == there.stage_tensors(*layers)
    for name in {opened.tensors[name].file for name in names}:
        assert (opened.path / name).read_bytes() == (hub.folder / name).read_bytes()


def sizes(hub: FakeHub, *names: str) -> dict[str, int]:
    return {name: (hub.folder / name).stat().st_size for name in names}


# --- providing a model
# -----------------------------------------------------------------------------


async def test_the_provider_has_a_root_before_any_weights(tmp_path: Path, hub: FakeHub) -> None:
    pc = Pc(tmp_path / "a")
    facts = await pc.bring()
    assert facts.hub == PLACE
    assert facts.files_bytes == sum(sizes(hub, *SHARDS).values())
    whole = facts.files_bytes
    read = sum(int(to) - int(begin) + 1 for _, said in hub.asked for begin, to in [ends(said)])
    assert 0 < read < whole / 4  # only the shards' headers
    held = pc.library.require_model(facts.root).manifest
    assert {name: shard.nbytes for name, shard in held.shards.items()} == sizes(hub, *SHARDS)
    for name, shard in held.shards.items():
        assert shard.sha256 == hashlib.sha256((hub.folder / name).read_bytes()).digest()
    # Placement uses the same facts as for the whole folder.
    there = ModelFolder.open(hub.folder).placement_facts("some-model")
    for field in ("layers", "layer_bytes", "first_bytes", "last_bytes", "max_model_len", "narrow"):
        assert getattr(facts, field) == getattr(there, field)


async def test_shard_headers_are_retried(
    tmp_path: Path, hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub_module, "RETRY_DELAYS_S", (0.0, 0.0))
    hub.cuts = [3, 0]
    facts = await Pc(tmp_path / "a").bring()
    assert hub.cuts == []
    assert facts.files_bytes
    hub.cuts = [0] * 100
    with pytest.raises(Unavailable, match="Try again later"):
        await Pc(tmp_path / "b").bring()


def ends(said: str) -> tuple[str, str]:
    begin, _, last = said.removeprefix("bytes=").partition("-")
    return begin, last


async def test_a_stage_fetches_only_its_shards(tmp_path: Path, hub: FakeHub) -> None:
    pc = Pc(tmp_path / "a")
    facts, progress = await pc.bring(), Progress()
    same(await pc.stage(facts, (1, 3), progress=progress), hub, (1, 3))
    assert pc.from_hub == sizes(hub, SHARDS[2], SHARDS[3])
    assert progress.done == progress.total == pc.from_hub.total()
    assert progress.source == HUB
    (told,) = pc.shelf.list_models()
    assert (told.root, told.layers) == (facts.root, ((1, 3),))
    # It is not fetched again, in this run or the next.
    await pc.stage(facts, (1, 3))
    await Pc(tmp_path / "a").stage(facts, (1, 3))
    assert pc.from_hub == sizes(hub, SHARDS[2], SHARDS[3])


async def test_a_stored_model_is_provided_again_without_the_hub(
    tmp_path: Path, hub: FakeHub
) -> None:
    facts = await Pc(tmp_path / "a").bring()
    hub.status = 503
    assert await Pc(tmp_path / "a").bring() == facts
    (kept,) = (tmp_path / "a" / "models").iterdir()
    (kept / "tokenizer.json").write_text("{}", encoding="utf-8")
    with pytest.raises(Unavailable):
        await Pc(tmp_path / "a").bring()
    hub.status = 0
    assert await Pc(tmp_path / "a").bring() == facts
    assert (kept / "tokenizer.json").read_text(encoding="utf-8") == TOKENIZER


async def test_two_providers_agree_on_the_root(tmp_path: Path, hub: FakeHub) -> None:
    assert await Pc(tmp_path / "a").bring() == await Pc(tmp_path / "b").bring()


# --- a swarm
# ---------------------------------------------------------------------------------------


async def test_three_pcs_share_a_model(tmp_path: Path, hub: FakeHub) -> None:
    a = Pc(tmp_path / "a")
    facts = await a.bring()
    b, c = Pc(tmp_path / "b", {"a": a}), Pc(tmp_path / "c", {"a": a})
    parts = {a: (0, 2), b: (2, 3), c: (3, 4)}
    for pc, layers in parts.items():
        same(await pc.stage(facts, layers, *pc.peers), hub, layers)
    assert a.from_hub == sizes(hub, ENDS, *SHARDS[1:3])
    assert b.from_hub == sizes(hub, SHARDS[3])
    # Embeddings and head are in one shard, which the last stage gets from the first.
    assert c.from_hub == sizes(hub, SHARDS[4])
    assert a.given[ENDS] == sizes(hub, ENDS)[ENDS]
    assert b.given.total() == 0


async def test_peers_replace_an_unreachable_hub(tmp_path: Path, hub: FakeHub) -> None:
    a = Pc(tmp_path / "a")
    facts = await a.bring()
    await a.stage(facts, (0, 4))
    b = Pc(tmp_path / "b", {"a": a})
    hub.status = 503
    same(await b.stage(facts, (1, 3), "a"), hub, (1, 3))
    with pytest.raises(FilesMissing, match=r"no connected PC has model-00001.*hub_files"):
        await Pc(tmp_path / "c", {"b": b}).stage(facts, (0, 4), "b", use_hub=False)
    with pytest.raises(Unavailable, match="hub: can't reach"):
        await Pc(tmp_path / "d", {"b": b}).stage(facts, (0, 4), "b")


async def test_a_replica_has_all_shards(tmp_path: Path, hub: FakeHub) -> None:
    a = Pc(tmp_path / "a")
    facts = await a.bring()
    await a.stage(facts, (0, 4))
    b = Pc(tmp_path / "b", {"a": a})
    whole = asyncio.Event()
    model = facts.name, facts.root
    replicator = ModelReplicator(b.store, b.library, model, lambda: (0, 0), whole.set, lambda: True)
    replicator.on_change(ModelSources((), ("a",), PLACE), serving=True)
    await whole.wait()
    assert replicator.percent == 100
    await asyncio.gather(replicator.stop_replication(), return_exceptions=True)
    # Replication never uses the hub: it isn't urgent, and downloads may be metered.
    assert b.from_hub.total() == 0
    same(await b.stage(facts, (0, 4), use_hub=False), hub, (0, 4))
    assert left(b) == []


# --- interruptions
# ---------------------------------------------------------------------------------


def left(pc: Pc) -> list[str]:
    """The names of partial files."""
    return sorted(path.name for path in pc.home.models.rglob(".model*"))


def cut_off(pc: Pc, after: int) -> None:
    """Let the hub answer ``after`` reads of that PC, and then fail."""

    class Cut(CountingHub):
        async def read_slice(self, *asked: Any) -> bytes:
            nonlocal after
            after -= 1
            if after < 0:
                raise Unavailable("the hub gives nothing: 429")
            return await super().read_slice(*asked)

    @asynccontextmanager
    async def connect(peer: str) -> AsyncIterator[Source]:
        yield Cut(pc.from_hub) if peer == PLACE else pc.peers[peer]

    pc.store._connect = connect


async def test_received_runs_of_a_shard_are_kept(tmp_path: Path, hub: FakeHub) -> None:
    pc = Pc(tmp_path / "a")
    facts = await pc.bring()
    cut_off(pc, 3)
    with pytest.raises(Unavailable, match="429"):
        await pc.stage(facts, (1, 2))
    came = pc.from_hub.total()
    assert came == 3 * 2 * CHUNK
    # The daemon starts again and keeps what was fetched before.
    again, progress = Pc(tmp_path / "a"), Progress()
    same(await again.stage(facts, (1, 2), progress=progress), hub, (1, 2))
    size = sizes(hub, SHARDS[2])[SHARDS[2]]
    assert again.from_hub.total() == size - came
    assert (progress.done, progress.total, progress.existing) == (size, size, came)
    assert left(again) == []


async def test_a_repeatedly_broken_connection(tmp_path: Path, hub: FakeHub) -> None:
    pc = Pc(tmp_path / "a")
    facts = await pc.bring()
    broken = 0

    class Flaky(CountingHub):
        async def read_slice(self, *asked: Any) -> bytes:
            nonlocal broken
            broken += 1
            if broken % 3:
                raise Unavailable("429")
            return await super().read_slice(*asked)

    @asynccontextmanager
    async def connect(_: str) -> AsyncIterator[Source]:
        yield Flaky(pc.from_hub)

    pc.store._connect = connect
    same(await pc.stage(facts, (1, 2)), hub, (1, 2))
    assert pc.from_hub == sizes(hub, SHARDS[2])
    assert broken > 6


async def test_an_altered_partial_shard_costs_a_retry(tmp_path: Path, hub: FakeHub) -> None:
    pc = Pc(tmp_path / "a")
    facts = await pc.bring()
    cut_off(pc, 3)
    with pytest.raises(Unavailable):
        await pc.stage(facts, (1, 2))
    (draft,) = pc.home.models.rglob(".*.shard")
    draft.write_bytes(bytes(len(draft.read_bytes())))
    again = Pc(tmp_path / "a")
    same(await again.stage(facts, (1, 2)), hub, (1, 2))
    assert again.liars == {}


def test_a_crash_loses_few_runs(tmp_path: Path, hub: FakeHub) -> None:
    data = bytes(range(256)) * 33
    shard = ShardEntry("m.safetensors", len(data), hashlib.sha256(data).digest())
    runs = list(fetch_plan.split_part(shard))
    assert [run.nbytes for run in runs] == [2 * CHUNK] * 4 + [256]

    def write(draft: PartialShard, *numbers: int) -> None:
        for number in numbers:
            run = runs[number]
            draft.write_run(run, data[run.offset :][: run.nbytes], "a")

    before = PartialShard(tmp_path, shard)
    write(before, 4, 1, 3)
    after = PartialShard(tmp_path, shard)  # after a crash: the first one wasn't closed
    assert [run.index // 2 for run in after.missing_runs()] == [0, 2, 3]
    before.close()
    after = PartialShard(tmp_path, shard)
    assert [run.index // 2 for run in after.missing_runs()] == [0, 2]
    write(after, 2)
    assert after.hash_next() == 0
    assert not after.is_complete
    write(after, 0)
    while after.hash_next():
        pass
    assert after.is_valid
    after.commit_shard()
    assert (tmp_path / shard.name).read_bytes() == data
    write(after, 0)  # no effect: it is committed
    assert [path.name for path in tmp_path.glob(".m.*")] == []
    # Chunks that are recorded but not in the file don't count.
    other = msgspec.structs.replace(shard, name="other")
    before = PartialShard(tmp_path, other)
    write(before, 0, 1, 2)
    before.close()
    os.truncate(tmp_path / ".other.shard", 2 * CHUNK)
    assert len(PartialShard(tmp_path, other).missing_runs()) == 4


async def test_nothing_is_written_outside_of_the_folder(tmp_path: Path) -> None:
    """Manifests refuse such names; this is the second line of defence."""
    folder = tmp_path / "folder"
    with pytest.raises(OSError, match="is outside of"):
        PartialShard(folder, ShardEntry("../m.safetensors", 1, bytes(32)))
    with pytest.raises(ModelError, match="is outside of"):
        async with create_file(folder, "../config.json"):
            pass
    assert not any(os.scandir(tmp_path))


async def test_a_locally_altered_shard_is_fetched_again(tmp_path: Path, hub: FakeHub) -> None:
    pc = Pc(tmp_path / "a")
    facts = await pc.bring()
    opened = await pc.stage(facts, (1, 2))
    path = opened.path / SHARDS[2]
    path.write_bytes(path.read_bytes()[:-1] + b"\1")
    progress = Progress()
    again = Pc(tmp_path / "a")
    same(await again.stage(facts, (1, 2), progress=progress), hub, (1, 2))
    assert progress.done == progress.total


async def test_a_locally_altered_shard_is_not_offered(tmp_path: Path, hub: FakeHub) -> None:
    a = Pc(tmp_path / "a")
    facts = await a.bring()
    path = (await a.stage(facts, (0, 4))).path / SHARDS[2]
    path.write_bytes(path.read_bytes()[:-1] + b"\1")
    b = Pc(tmp_path / "b", {"a": a})
    same(await b.stage(facts, (1, 2), "a"), hub, (1, 2))  # the file on disk has changed
    assert (b.from_hub, b.liars) == (sizes(hub, SHARDS[2]), {})
    again = Pc(tmp_path / "a")
    await again.shelf.scan_store()
    assert again.shelf.list_models()[0].layers == ((0, 1), (2, 4))
    same(await again.stage(facts, (0, 4)), hub, (0, 4))
    assert again.shelf.list_models()[0].layers == ((0, 4),)
    # A shard with a new time is hashed again, and is intact.
    os.utime(path)
    await again.shelf.scan_store()
    third = Pc(tmp_path / "a")
    await third.shelf.scan_store()
    assert third.shelf.list_models()[0].layers == ((0, 1), (2, 4))
    await third.stage(facts, (1, 2), use_hub=False)
    assert third.shelf.list_models()[0].layers == ((0, 4),)


async def test_disk_space_is_checked_first(
    tmp_path: Path, hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    pc = Pc(tmp_path / "a")
    facts = await pc.bring()
    monkeypatch.setattr("molink.checkpoint.disk_space.DISK_RESERVE_BYTES", 1 << 62)
    with pytest.raises(ModelError, match="free"):
        await pc.stage(facts, (0, 4))
    assert pc.from_hub.total() == 0
    assert await Pc(tmp_path / "a").bring() == facts  # the stored facts are still here


# --- sources that send wrong data
# ------------------------------------------------------------------


class Liar(Pc):
    """Sends wrong bytes of shards."""

    async def read_chunk(self, root: str, part: str, index: int) -> bytes:
        data = await super().read_chunk(root, part, index)
        return data[:-1] + bytes([data[-1] ^ 1]) if part in SHARDS else data


async def have_all(pc: Pc, facts: ModelFacts) -> Pc:
    await pc.stage(facts, (0, 4), *pc.peers)
    pc.given.clear()
    return pc


@pytest.mark.parametrize("use_hub", [True, False])
async def test_an_altering_peer_is_found(tmp_path: Path, hub: FakeHub, use_hub: bool) -> None:
    a = Pc(tmp_path / "a")
    facts = await a.bring()
    await have_all(a, facts)
    liar = await have_all(Liar(tmp_path / "l", {"a": a}), facts)
    b = Pc(tmp_path / "b", {"l": liar, "a": a})
    same(await b.stage(facts, (1, 2), "l", "a", use_hub=use_hub), hub, (1, 2))
    assert liar.given[SHARDS[2]] > 0
    assert a.given[SHARDS[2]] > 0  # both sent some chunks
    assert list(b.liars) == ["l"]
    assert SHARDS[2] in b.liars["l"]
    assert b.from_hub == (sizes(hub, SHARDS[2]) if use_hub else {})
    assert left(b) == []
    # The liar isn't asked again.
    liar.given.clear()
    same(await b.stage(facts, (2, 3), "l", "a", use_hub=use_hub), hub, (2, 3))
    assert liar.given.total() == 0


async def test_a_single_altering_peer_yields_nothing(tmp_path: Path, hub: FakeHub) -> None:
    a = Pc(tmp_path / "a")
    facts = await a.bring()
    liar = await have_all(Liar(tmp_path / "l", {"a": a}), facts)
    b = Pc(tmp_path / "b", {"l": liar})
    with pytest.raises(Unavailable, match=r"no source has a valid model-00003"):
        await b.stage(facts, (1, 2), "l", use_hub=False)
    assert list(b.liars) == ["l"]
    assert left(b) == []
    assert not list(b.home.models.rglob("*.safetensors"))


async def test_the_hub_is_not_trusted_either(tmp_path: Path, hub: FakeHub) -> None:
    a = Pc(tmp_path / "a")
    facts = await a.bring()
    await have_all(a, facts)
    hub.altered = True
    b = Pc(tmp_path / "b")
    b.peers["a"] = a
    b.store._is_nearby = lambda _: False  # no peer is nearby, so the hub is asked first
    same(await b.stage(facts, (1, 2), "a"), hub, (1, 2))
    assert list(b.liars) == [HUB]


async def test_runs_of_a_wrong_length_are_rejected(tmp_path: Path, hub: FakeHub) -> None:
    class Shortener(Pc):
        async def read_chunk(self, root: str, part: str, index: int) -> bytes:
            data = await super().read_chunk(root, part, index)
            return data + data if part in SHARDS else data

    a = Pc(tmp_path / "a")
    facts = await a.bring()
    wrong = await have_all(Shortener(tmp_path / "s", {"a": a}), facts)
    b = Pc(tmp_path / "b", {"s": wrong, "a": a})
    same(await b.stage(facts, (1, 2), "s"), hub, (1, 2))
    assert b.from_hub == sizes(hub, SHARDS[2])


@pytest.mark.parametrize("rate_limited", [False, True])
async def test_a_rate_limited_stage(tmp_path: Path, hub: FakeHub, rate_limited: bool) -> None:
    a = Pc(tmp_path / "a")
    facts = await a.bring()
    await have_all(a, facts)
    b = Pc(tmp_path / "b", {"a": a})
    for layers, peers in (((1, 2), ("a",)), ((2, 3), ())):
        supply = ModelSources((), ("a", *peers), PLACE)
        folder = await b.store.fetch_stage(
            facts.name, facts.root, layers, supply, rate_limited=rate_limited
        )
        same(ModelFolder.open(folder, layers), hub, layers)


# --- models that are fetched whole
# -----------------------------------------------------------------


async def test_a_single_file_model_is_fetched_whole(tmp_path: Path, hub: FakeHub) -> None:
    write_shards(hub.folder, only=True)
    await comes_whole(tmp_path, hub)


async def comes_whole(tmp_path: Path, hub: FakeHub) -> None:
    pc = Pc(tmp_path / "a")
    facts = await pc.bring()
    assert facts.files_bytes == 0
    held = pc.library.find_by_root(facts.root)
    assert held is not None
    assert held.manifest.tensors


async def test_a_file_without_a_hash_is_fetched_with_the_others(
    tmp_path: Path, hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    described = FakeHub.described

    def without(self: FakeHub, path: Path) -> dict[str, object]:
        found = described(self, path)
        return {k: v for k, v in found.items() if k != "lfs" or path.name != ENDS}

    monkeypatch.setattr(FakeHub, "described", without)
    await comes_whole(tmp_path, hub)


async def test_a_tensor_in_two_files(tmp_path: Path, hub: FakeHub) -> None:
    (hub.folder / "twice.safetensors").write_bytes((hub.folder / SHARDS[1]).read_bytes())
    await comes_whole(tmp_path, hub)


async def test_sharded_loading_can_be_disabled(tmp_path: Path, hub: FakeHub) -> None:
    assert (await Pc(tmp_path / "a").bring(hub_files=False)).files_bytes == 0


async def test_a_complete_cached_model_is_used(tmp_path: Path, hub: FakeHub) -> None:
    hub_module.pull_model(REPOSITORY, Progress(), threading.Event())
    await comes_whole(tmp_path, hub)


# --- refused before any weights are fetched
# --------------------------------------------------------


async def test_tensors_of_another_model(tmp_path: Path, hub: FakeHub) -> None:
    config = json.loads((hub.folder / "config.json").read_text(encoding="utf-8"))
    text = json.dumps({**config, "num_hidden_layers": 3})
    (hub.folder / "config.json").write_text(text, encoding="utf-8")
    with pytest.raises(BrokenModel, match="does not fit this"):
        await Pc(tmp_path / "a").bring()


async def test_a_shard_missing_on_the_hub(tmp_path: Path, hub: FakeHub) -> None:
    (hub.folder / SHARDS[2]).unlink()
    with pytest.raises(BrokenModel, match=r"layers\.1\."):
        await Pc(tmp_path / "a").bring()
