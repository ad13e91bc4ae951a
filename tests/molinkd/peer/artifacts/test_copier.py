"""The whole model comes to this PC's disk, slowly, and others may then read it here."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path

import pytest

from molink.checkpoint.folder import ModelFolder
from molink.errors import ModelNotFound
from molink.facts.model import LayerRange
from molink.swarm.artifacts import copying
from molink.swarm.artifacts.supply import Supply
from molink.wire.messages.instructions import Route
from molinkd.peer.artifacts import copier as copier_module
from molinkd.peer.artifacts import store as store_module
from molinkd.peer.artifacts.library import Library
from molinkd.peer.artifacts.store import Store
from molinkd.peer.artifacts.suppliers import Source
from molinkd.peer.copies import Copies
from tests.support.models import write_plain_model
from tests.support.sources import LibrarySource, connect_to

LAYERS = 4


async def until(condition: Callable[[], object]) -> None:
    """Let others run until ``condition`` holds."""
    while True:
        if condition():
            return
        await asyncio.sleep(0)


class Shelf(LibrarySource):
    """A source; ``parts`` has what was read of it, in order."""

    def __init__(self, library: Library) -> None:
        super().__init__(library)
        self.parts: list[str] = []
        self.at_once = self.most_at_once = 0
        #: Nothing is sent while it isn't set.
        self.gate = asyncio.Event()
        self.gate.set()

    async def read(self, root: str, part: str, index: int) -> bytes:
        self.parts.append(part)
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            await self.gate.wait()
            return await super().read(root, part, index)
        finally:
            self.at_once -= 1

    @property
    def layers(self) -> list[int]:
        """The layers that were read, in order."""
        layers = [int(part.split(".")[2]) for part in self.parts if part.startswith("model.layers")]
        return list(dict.fromkeys(layers))


class Pc:
    """A PC with a store, a library and a copier."""

    def __init__(self, home: Path, peers: Mapping[str, Source], *, wanted: bool = True) -> None:
        home.mkdir(exist_ok=True)
        self.connected: list[str] = []
        self.library = Library()
        self.changed = asyncio.Event()
        self.layers: LayerRange = (0, 0)
        self.store = Store(
            home, "me", self.library, connect_to(peers, self.connected), Library(), lambda *_: None
        )
        self.copier = Copies(
            self.store, self.library, lambda: self.layers, self.changed.set, wanted=wanted
        )

    def serve(self, root: str, *sources: str, ready: bool = True) -> None:
        self.copier.serve(
            Route(
                pipeline="p1",
                epoch=1,
                model="m",
                ready=ready,
                head=None,
                context=1,
                sources=sources,
                root=root,
            )
        )

    async def whole(self) -> None:
        while self.copier.percent < 100:
            await self.changed.wait()
            self.changed.clear()


@pytest.fixture
def brought(tmp_path: Path) -> Library:
    library = Library()
    library.add("m", write_plain_model(tmp_path / "model"))
    return library


@pytest.fixture
def root(brought: Library) -> str:
    holding = brought.get("m")
    assert holding is not None
    return holding.manifest.root


@pytest.fixture
async def pcs(tmp_path: Path) -> AsyncIterator[Callable[..., Pc]]:
    made: list[Pc] = []

    def make(peers: Mapping[str, Source], home: str = "store", *, wanted: bool = True) -> Pc:
        made.append(Pc(tmp_path / home, peers, wanted=wanted))
        return made[-1]

    yield make
    for pc in made:
        await pc.copier.close()


@pytest.fixture(autouse=True)
def no_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copying, "REST", 0.0)
    monkeypatch.setattr(copying, "FIRST_PAUSE", 0.0)


MakePc = Callable[..., Pc]


async def test_the_other_layers_come_one_chunk_at_a_time_the_nearest_first(
    pcs: MakePc, brought: Library, root: str
) -> None:
    shelf = Shelf(brought)
    pc = pcs({"a": shelf})
    await pc.store.stage("m", root, (2, 3), Supply(("a",)))
    shelf.parts.clear()
    shelf.most_at_once = 0
    pc.layers = (2, 3)
    shelf.gate.clear()
    pc.serve(root, "a")
    await until(lambda: shelf.parts)
    shelf.gate.set()
    await pc.whole()
    assert shelf.layers == [3, 1, 0]
    assert shelf.most_at_once == 1
    folder = pc.library.held(root).folder
    ModelFolder.open(folder)
    # What a stage needs is there: nobody is asked.
    pc.connected.clear()
    assert await pc.store.stage("m", root, (0, LAYERS), Supply()) == folder
    assert pc.connected == []


async def test_a_whole_copy_is_a_source_for_others_and_after_a_restart_too(
    pcs: MakePc, brought: Library, root: str, tmp_path: Path
) -> None:
    first = pcs({"a": Shelf(brought)})
    assert first.library.names == ()
    first.serve(root, "a")
    await first.whole()
    assert first.library.names == ("m",)
    second = pcs({"b": Shelf(first.library)}, "other")
    second.serve(root, "a", "b")
    await second.whole()
    await first.copier.close()
    with pytest.raises(ModelNotFound):
        first.library.held(root)
    (folder,) = (tmp_path / "store").iterdir()
    (folder / ".layer-0001.safetensors.copy").write_bytes(b"what a crash left")
    # Nobody has to be there for it, nor a pipeline.
    again = pcs({})
    again.serve(root, "a", ready=False)
    await again.whole()
    assert again.connected == []
    assert not list(folder.glob(".*"))
    original = brought.held(root).manifest
    for part in (*original.files.values(), *original.tensors.values()):
        for index in range(part.chunks):
            part.check(index, again.library.held(root).read(part.name, index))


async def test_nothing_is_fetched_before_a_pipeline_serves_nor_while_somebody_waits(
    pcs: MakePc, brought: Library, root: str
) -> None:
    shelf = Shelf(brought)
    pc = pcs({"a": shelf})
    await pc.store.metadata("m", root, Supply(("a",)))
    shelf.parts.clear()
    pc.serve(root, "a", ready=False)
    # Its own stage comes meanwhile, and the copy waits for that as well.
    shelf.gate.clear()
    stage = asyncio.create_task(pc.store.stage("m", root, (1, 2), Supply(("a",))))
    await until(lambda: shelf.parts)
    pc.serve(root, "a")
    shelf.gate.set()
    await stage
    assert shelf.layers == [1]
    await pc.whole()
    assert shelf.layers == [1, 0, 2, 3]


async def test_a_stage_does_not_wait_for_the_copy(pcs: MakePc, brought: Library, root: str) -> None:
    slow, fast = Shelf(brought), Shelf(brought)
    pc = pcs({"slow": slow, "fast": fast})
    await pc.store.metadata("m", root, Supply(("fast",)))
    slow.gate.clear()
    pc.serve(root, "slow")
    await until(lambda: slow.parts)
    # The same files as those that the copy is at.
    folder = await pc.store.stage("m", root, (0, LAYERS), Supply(("fast",)))
    ModelFolder.open(folder)
    slow.gate.set()
    await pc.whole()
    assert slow.layers == [0]
    assert not list(folder.glob(".*"))


async def test_without_a_source_it_waits_for_one(
    pcs: MakePc, brought: Library, root: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "molinkd.peer")
    pc = pcs({"a": Shelf(brought)})
    await pc.store.metadata("m", root, Supply(("a",)))
    pc.connected.clear()
    pc.serve(root, "gone")
    await until(lambda: len(pc.connected) >= 4)
    assert pc.copier.percent == 0
    pc.serve(root, "gone", "a")
    await pc.whole()
    told = [record.getMessage() for record in caplog.records if "gone" in record.getMessage()]
    assert told == ["no whole copy of m here yet; it is tried again: gone: gone is not there"]


async def test_a_disk_with_little_room_gets_no_copy(
    pcs: MakePc, brought: Library, root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shelf = Shelf(brought)
    pc = pcs({"a": shelf})
    await pc.store.stage("m", root, (1, 2), Supply(("a",)))
    refused = asyncio.Event()
    failed = copying.CopyPace.failed

    def note(self: copying.CopyPace, reason: str, now: float) -> bool:
        assert "a copy of the rest of the model would take" in reason
        refused.set()
        return failed(self, reason, now)

    monkeypatch.setattr(copying.CopyPace, "failed", note)
    monkeypatch.setattr(store_module, "has_room", lambda *_: False)
    pc.layers = (1, 2)
    pc.serve(root, "a")
    await refused.wait()
    assert shelf.layers == [1]
    assert 0 < pc.copier.percent < 100


async def test_a_copy_that_was_altered_is_mended(
    pcs: MakePc, brought: Library, root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copier_module, "WATCH_S", 0.0)
    pc = pcs({"a": Shelf(brought)})
    pc.serve(root, "a")
    await pc.whole()
    file = pc.library.held(root).folder / "layer-0002.safetensors"
    file.write_bytes(b"")
    await until(lambda: file.stat().st_size > 0)
    await pc.whole()
    ModelFolder.open(pc.library.held(root).folder)


async def test_another_model_takes_its_place(
    pcs: MakePc, brought: Library, root: str, tmp_path: Path
) -> None:
    newer = brought.add("m", write_plain_model(tmp_path / "newer", seed=1)).manifest.root
    older = Library()
    older.add("m", tmp_path / "model")
    pc = pcs({"a": Shelf(brought), "b": Shelf(older)})
    pc.serve(root, "b")
    await pc.whole()
    pc.serve(newer, "a")
    assert pc.copier.percent == 0
    await pc.whole()
    pc.library.held(newer)
    with pytest.raises(ModelNotFound):
        pc.library.held(root)


async def test_who_brought_the_model_copies_nothing(
    pcs: MakePc, brought: Library, root: str, tmp_path: Path
) -> None:
    pc = pcs({"a": Shelf(brought)})
    pc.library.add("m", tmp_path / "model")
    pc.serve(root, "a")
    await pc.whole()
    assert pc.connected == []
    assert not list((tmp_path / "store").iterdir())


async def test_a_pc_may_do_without(pcs: MakePc, brought: Library, root: str) -> None:
    pc = pcs({"a": Shelf(brought)}, wanted=False)
    pc.serve(root, "a")
    await asyncio.sleep(0)
    assert pc.connected == []
    assert pc.copier.percent == 0


async def test_of_several_models_that_of_its_own_stage_is_copied_first(
    pcs: MakePc, brought: Library, root: str, tmp_path: Path
) -> None:
    """Routes of all come again and again; nothing is begun anew by that."""
    other = brought.add("n", write_plain_model(tmp_path / "other", seed=1)).manifest.root
    mine, shelf = "1", Shelf(brought)
    pc = pcs({"a": shelf})
    pc.copier = Copies(
        pc.store, pc.library, lambda: (2, 3), pc.changed.set, lambda one: one == mine, wanted=True
    )
    routes = {
        name: Route(
            pipeline=name,
            epoch=1,
            model=model,
            ready=True,
            head=None,
            context=1,
            sources=("a",),
            root=of,
        )
        for name, model, of in (("2", "n", other), ("1", "m", root))
    }

    def serve(*names: str) -> None:
        for name in names:
            pc.copier.serve(routes[name])

    serve("2", "1", "2", "1")
    shelf.gate.clear()
    await until(lambda: shelf.parts)
    shelf.gate.set()
    await until(lambda: pc.library.names)
    assert pc.library.names == ("m",), "the second one has its turn once the first is whole"
    assert shelf.layers == [2, 3, 1, 0]
    serve("1", "2")
    await until(lambda: len(pc.library.names) == 2)
    assert pc.copier.percent == 100
    for of in (root, other):
        ModelFolder.open(pc.library.held(of).folder)
    # One that isn't served any more is offered no more, and its files stay.
    read = len(shelf.parts)
    pc.copier.gone("2")
    assert pc.library.names == ("m",)
    serve("2")
    await until(lambda: len(pc.library.names) == 2)
    assert len(shelf.parts) == read
    pc.copier.gone("1")
    pc.copier.gone("2")
    assert pc.library.names == ("n",)
    await pc.copier.close()


async def test_what_is_here_is_offered_whatever_else_is_waited_for(
    pcs: MakePc, brought: Library, root: str, tmp_path: Path
) -> None:
    """After a restart a pipeline may need just this copy, while another model's waits for one."""
    other = brought.add("n", write_plain_model(tmp_path / "other", seed=1)).manifest.root
    first = pcs({"a": Shelf(brought)})
    first.serve(root, "a")
    await first.whole()
    await first.copier.close()
    again = pcs({"a": Shelf(brought)})
    absent = Route(
        pipeline="p0",
        epoch=1,
        model="n",
        ready=False,
        head=None,
        context=1,
        sources=("a",),
        root=other,
    )
    again.copier = Copies(
        again.store, again.library, lambda: (0, 1), again.changed.set, "p0".__eq__, wanted=True
    )
    again.copier.serve(absent)
    again.serve(root, ready=False)
    await until(lambda: again.library.names)
    assert again.library.names == ("m",)
    await again.copier.close()


async def test_a_copy_that_cannot_be_made_holds_no_other_up(
    pcs: MakePc, brought: Library, root: str
) -> None:
    pc = pcs({"a": Shelf(brought)})
    pc.copier = Copies(
        pc.store, pc.library, lambda: (0, 1), pc.changed.set, lambda one: one == "p2", wanted=True
    )
    missing = Route(
        pipeline="p2",
        epoch=1,
        model="n",
        ready=True,
        head=None,
        context=1,
        sources=("gone",),
        root=f"{2:0>64}:1",
    )
    pc.copier.serve(missing)
    pc.serve(root, "a")
    await until(lambda: pc.library.names)
    assert pc.library.names == ("m",)
    assert pc.copier.percent == 0  # that of its own model
    await pc.copier.close()
