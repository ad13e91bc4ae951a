"""Replicating whole models in the background, and offering the replicas."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path

import pytest

from molink.checkpoint.model_folder import ModelFolder
from molink.errors import ModelNotFound
from molink.facts.model import LayerRange
from molink.swarm.artifacts import replication as copying
from molink.swarm.artifacts.sources import ModelSources
from molink.wire.messages.instructions import Route
from molinkd.peer.artifacts import model_store as store_module
from molinkd.peer.artifacts import replicator as replicator_module
from molinkd.peer.artifacts.model_repository import ModelRepository
from molinkd.peer.artifacts.model_store import ModelStore
from molinkd.peer.artifacts.replicator import Replicator
from molinkd.peer.artifacts.sources import Source
from tests.support.fake_sources import RepositorySource, connect_to
from tests.support.models import write_plain_model

LAYERS = 4


async def until(condition: Callable[[], object]) -> None:
    """Let others run until ``condition`` holds."""
    while True:
        if condition():
            return
        await asyncio.sleep(0)


class OfferedSource(RepositorySource):
    """A source; ``read_parts`` records the parts that were read, in order."""

    def __init__(self, library: ModelRepository) -> None:
        super().__init__(library)
        self.read_parts: list[str] = []
        self.at_once = self.most_at_once = 0
        #: No data is sent while it isn't set.
        self.gate = asyncio.Event()
        self.gate.set()

    async def read_chunk(self, root: str, part: str, index: int) -> bytes:
        self.read_parts.append(part)
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            await self.gate.wait()
            return await super().read_chunk(root, part, index)
        finally:
            self.at_once -= 1

    @property
    def layers(self) -> list[int]:
        """Layers that were read, in order."""
        layers = [
            int(part.split(".")[2]) for part in self.read_parts if part.startswith("model.layers")
        ]
        return list(dict.fromkeys(layers))


class Pc:
    """A PC with a store, a repository and a replicator."""

    def __init__(self, home: Path, peers: Mapping[str, Source], *, wanted: bool = True) -> None:
        home.mkdir(exist_ok=True)
        self.connected: list[str] = []
        self.library = ModelRepository()
        self.changed = asyncio.Event()
        self.layers: LayerRange = (0, 0)
        self.store = ModelStore(
            home,
            "me",
            self.library,
            connect_to(peers, self.connected),
            ModelRepository(),
            lambda *_: None,
        )
        self.replicator = Replicator(
            self.store, self.library, lambda: self.layers, self.changed.set, wanted=wanted
        )

    def serve(self, root: str, *sources: str, ready: bool = True) -> None:
        self.replicator.update_route(
            Route(
                pipeline="p1",
                epoch=1,
                model="m",
                is_ready=ready,
                scheduler=None,
                max_model_len=1,
                sources=sources,
                root=root,
            )
        )

    async def whole(self) -> None:
        while self.replicator.percent < 100:
            await self.changed.wait()
            self.changed.clear()


@pytest.fixture
def brought(tmp_path: Path) -> ModelRepository:
    repository = ModelRepository()
    repository.add_model("m", write_plain_model(tmp_path / "model"))
    return repository


@pytest.fixture
def root(brought: ModelRepository) -> str:
    model_files = brought.get_model("m")
    assert model_files is not None
    return model_files.manifest.root


@pytest.fixture
async def pcs(tmp_path: Path) -> AsyncIterator[Callable[..., Pc]]:
    made: list[Pc] = []

    def make(peers: Mapping[str, Source], home: str = "store", *, wanted: bool = True) -> Pc:
        made.append(Pc(tmp_path / home, peers, wanted=wanted))
        return made[-1]

    yield make
    for pc in made:
        await pc.replicator.close()


@pytest.fixture(autouse=True)
def no_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copying, "REST_FACTOR", 0.0)
    monkeypatch.setattr(copying, "FIRST_PAUSE", 0.0)


MakePc = Callable[..., Pc]


async def test_other_layers_are_fetched_chunk_by_chunk_nearest_first(
    pcs: MakePc, brought: ModelRepository, root: str
) -> None:
    partial_models = OfferedSource(brought)
    pc = pcs({"a": partial_models})
    await pc.store.fetch_stage("m", root, (2, 3), ModelSources(("a",)))
    partial_models.read_parts.clear()
    partial_models.most_at_once = 0
    pc.layers = (2, 3)
    partial_models.gate.clear()
    pc.serve(root, "a")
    await until(lambda: partial_models.read_parts)
    partial_models.gate.set()
    await pc.whole()
    assert partial_models.layers == [3, 1, 0]
    assert partial_models.most_at_once == 1
    folder = pc.library.require_model(root).folder
    ModelFolder.open(folder)
    # All files of a stage are there, so no peer is asked.
    pc.connected.clear()
    assert await pc.store.fetch_stage("m", root, (0, LAYERS), ModelSources()) == folder
    assert pc.connected == []


async def test_a_complete_replica_is_offered_also_after_a_restart(
    pcs: MakePc, brought: ModelRepository, root: str, tmp_path: Path
) -> None:
    first = pcs({"a": OfferedSource(brought)})
    assert first.library.model_names == ()
    first.serve(root, "a")
    await first.whole()
    assert first.library.model_names == ("m",)
    second = pcs({"b": OfferedSource(first.library)}, "other")
    second.serve(root, "a", "b")
    await second.whole()
    await first.replicator.close()
    with pytest.raises(ModelNotFound):
        first.library.require_model(root)
    (folder,) = (tmp_path / "store").iterdir()
    (folder / ".layer-0001.safetensors.copy").write_bytes(b"what a crash left")
    # This needs neither another peer nor a pipeline.
    again = pcs({})
    again.serve(root, "a", ready=False)
    await again.whole()
    assert again.connected == []
    assert not list(folder.glob(".*"))
    original = brought.require_model(root).manifest
    for part in (*original.files.values(), *original.tensors.values()):
        for index in range(part.chunk_count):
            part.verify_chunk(index, again.library.require_model(root).read_chunk(part.name, index))


async def test_replication_yields_to_urgent_transfers(
    pcs: MakePc, brought: ModelRepository, root: str
) -> None:
    partial_models = OfferedSource(brought)
    pc = pcs({"a": partial_models})
    await pc.store.fetch_metadata("m", root, ModelSources(("a",)))
    partial_models.read_parts.clear()
    pc.serve(root, "a", ready=False)
    # Its own stage is fetched meanwhile, and the replication waits for it.
    partial_models.gate.clear()
    stage = asyncio.create_task(pc.store.fetch_stage("m", root, (1, 2), ModelSources(("a",))))
    await until(lambda: partial_models.read_parts)
    pc.serve(root, "a")
    partial_models.gate.set()
    await stage
    assert partial_models.layers == [1]
    await pc.whole()
    assert partial_models.layers == [1, 0, 2, 3]


async def test_a_stage_does_not_wait_for_replication(
    pcs: MakePc, brought: ModelRepository, root: str
) -> None:
    slow, fast = OfferedSource(brought), OfferedSource(brought)
    pc = pcs({"slow": slow, "fast": fast})
    await pc.store.fetch_metadata("m", root, ModelSources(("fast",)))
    slow.gate.clear()
    pc.serve(root, "slow")
    await until(lambda: slow.read_parts)
    # A stage needs the same files as the replication in progress.
    folder = await pc.store.fetch_stage("m", root, (0, LAYERS), ModelSources(("fast",)))
    ModelFolder.open(folder)
    slow.gate.set()
    await pc.whole()
    assert slow.layers == [0]
    assert not list(folder.glob(".*"))


async def test_replication_waits_for_a_source(
    pcs: MakePc, brought: ModelRepository, root: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "molinkd.peer")
    pc = pcs({"a": OfferedSource(brought)})
    await pc.store.fetch_metadata("m", root, ModelSources(("a",)))
    pc.connected.clear()
    pc.serve(root, "gone")
    await until(lambda: len(pc.connected) >= 4)
    assert pc.replicator.percent == 0
    pc.serve(root, "gone", "a")
    await pc.whole()
    reported = [record.getMessage() for record in caplog.records if "gone" in record.getMessage()]
    assert reported == ["replication of m is incomplete and will be retried: gone: gone is offline"]


async def test_a_nearly_full_disk_gets_no_replica(
    pcs: MakePc, brought: ModelRepository, root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    partial_models = OfferedSource(brought)
    pc = pcs({"a": partial_models})
    await pc.store.fetch_stage("m", root, (1, 2), ModelSources(("a",)))
    refused = asyncio.Event()
    failed = copying.ReplicationSchedule.record_failure

    def note(self: copying.ReplicationSchedule, reason: str, now: float) -> bool:
        assert "a copy of the rest of the model would take" in reason
        refused.set()
        return failed(self, reason, now)

    monkeypatch.setattr(copying.ReplicationSchedule, "record_failure", note)
    monkeypatch.setattr(store_module, "has_disk_room", lambda *_: False)
    pc.layers = (1, 2)
    pc.serve(root, "a")
    await refused.wait()
    assert partial_models.layers == [1]
    assert 0 < pc.replicator.percent < 100


async def test_an_altered_replica_is_repaired(
    pcs: MakePc, brought: ModelRepository, root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replicator_module, "CHECK_INTERVAL_S", 0.0)
    pc = pcs({"a": OfferedSource(brought)})
    pc.serve(root, "a")
    await pc.whole()
    file = pc.library.require_model(root).folder / "layer-0002.safetensors"
    file.write_bytes(b"")
    await until(lambda: file.stat().st_size > 0)
    await pc.whole()
    ModelFolder.open(pc.library.require_model(root).folder)


async def test_another_model_replaces_the_first(
    pcs: MakePc, brought: ModelRepository, root: str, tmp_path: Path
) -> None:
    newer = brought.add_model("m", write_plain_model(tmp_path / "newer", seed=1)).manifest.root
    older = ModelRepository()
    older.add_model("m", tmp_path / "model")
    pc = pcs({"a": OfferedSource(brought), "b": OfferedSource(older)})
    pc.serve(root, "b")
    await pc.whole()
    pc.serve(newer, "a")
    assert pc.replicator.percent == 0
    await pc.whole()
    pc.library.require_model(newer)
    with pytest.raises(ModelNotFound):
        pc.library.require_model(root)


async def test_the_provider_replicates_nothing(
    pcs: MakePc, brought: ModelRepository, root: str, tmp_path: Path
) -> None:
    pc = pcs({"a": OfferedSource(brought)})
    pc.library.add_model("m", tmp_path / "model")
    pc.serve(root, "a")
    await pc.whole()
    assert pc.connected == []
    assert not list((tmp_path / "store").iterdir())


async def test_replication_can_be_disabled(
    pcs: MakePc, brought: ModelRepository, root: str
) -> None:
    pc = pcs({"a": OfferedSource(brought)}, wanted=False)
    pc.serve(root, "a")
    await asyncio.sleep(0)
    assert pc.connected == []
    assert pc.replicator.percent == 0


async def test_the_own_stage_s_model_is_replicated_first(
    pcs: MakePc, brought: ModelRepository, root: str, tmp_path: Path
) -> None:
    """Repeated routes do not restart a replication."""
    other = brought.add_model("n", write_plain_model(tmp_path / "other", seed=1)).manifest.root
    mine, partial_models = "1", OfferedSource(brought)
    pc = pcs({"a": partial_models})
    pc.replicator = Replicator(
        pc.store, pc.library, lambda: (2, 3), pc.changed.set, lambda one: one == mine, wanted=True
    )
    routes = {
        name: Route(
            pipeline=name,
            epoch=1,
            model=model,
            is_ready=True,
            scheduler=None,
            max_model_len=1,
            sources=("a",),
            root=of,
        )
        for name, model, of in (("2", "n", other), ("1", "m", root))
    }

    def serve(*names: str) -> None:
        for name in names:
            pc.replicator.update_route(routes[name])

    serve("2", "1", "2", "1")
    partial_models.gate.clear()
    await until(lambda: partial_models.read_parts)
    partial_models.gate.set()
    await until(lambda: pc.library.model_names)
    assert pc.library.model_names == ("m",), "the second one has its turn once the first is whole"
    assert partial_models.layers == [2, 3, 1, 0]
    serve("1", "2")
    await until(lambda: len(pc.library.model_names) == 2)
    assert pc.replicator.percent == 100
    for of in (root, other):
        ModelFolder.open(pc.library.require_model(of).folder)
    # A model that is no longer served is no longer offered, but its files stay.
    read = len(partial_models.read_parts)
    pc.replicator.remove_pipeline("2")
    assert pc.library.model_names == ("m",)
    serve("2")
    await until(lambda: len(pc.library.model_names) == 2)
    assert len(partial_models.read_parts) == read
    pc.replicator.remove_pipeline("1")
    pc.replicator.remove_pipeline("2")
    assert pc.library.model_names == ("n",)
    await pc.replicator.close()


async def test_existing_files_are_offered_immediately(
    pcs: MakePc, brought: ModelRepository, root: str, tmp_path: Path
) -> None:
    """After a restart a replica is offered while another model's replication waits for a peer."""
    other = brought.add_model("n", write_plain_model(tmp_path / "other", seed=1)).manifest.root
    first = pcs({"a": OfferedSource(brought)})
    first.serve(root, "a")
    await first.whole()
    await first.replicator.close()
    again = pcs({"a": OfferedSource(brought)})
    absent = Route(
        pipeline="p0",
        epoch=1,
        model="n",
        is_ready=False,
        scheduler=None,
        max_model_len=1,
        sources=("a",),
        root=other,
    )
    again.replicator = Replicator(
        again.store, again.library, lambda: (0, 1), again.changed.set, "p0".__eq__, wanted=True
    )
    again.replicator.update_route(absent)
    again.serve(root, ready=False)
    await until(lambda: again.library.model_names)
    assert again.library.model_names == ("m",)
    await again.replicator.close()


async def test_a_stuck_replica_does_not_block_others(
    pcs: MakePc, brought: ModelRepository, root: str
) -> None:
    pc = pcs({"a": OfferedSource(brought)})
    pc.replicator = Replicator(
        pc.store, pc.library, lambda: (0, 1), pc.changed.set, lambda one: one == "p2", wanted=True
    )
    missing = Route(
        pipeline="p2",
        epoch=1,
        model="n",
        is_ready=True,
        scheduler=None,
        max_model_len=1,
        sources=("gone",),
        root=f"{2:0>64}:1",
    )
    pc.replicator.update_route(missing)
    pc.serve(root, "a")
    await until(lambda: pc.library.model_names)
    assert pc.library.model_names == ("m",)
    assert pc.replicator.percent == 0  # the percentage of its own model
    await pc.replicator.close()
