"""Peers with some of a model's files are sources of those files, but are not trusted."""

import asyncio
from collections.abc import Mapping
from pathlib import Path

import pytest

from molink.checkpoint.model_folder import ModelFolder
from molink.errors import ModelNotFound, Unavailable, WireError
from molink.swarm.artifacts.sources import ModelSources
from molinkd.peer.artifacts import sources as sources_module
from molinkd.peer.artifacts.model_repository import ModelRepository
from molinkd.peer.artifacts.model_store import ModelStore
from molinkd.peer.artifacts.partial_models import PartialModels
from molinkd.peer.artifacts.sources import Source
from tests.support.fake_sources import RepositorySource, connect_to
from tests.support.models import write_plain_model

LAYERS = 4
UP = "model.layers.{}.mlp.up_proj.weight"


class Pc(RepositorySource):
    """A PC with a store from which others read; ``entries_read`` records what they read."""

    def __init__(self, root: Path, peers: Mapping[str, Source] | None = None) -> None:
        super().__init__(ModelRepository())
        root.mkdir()
        self.connected: list[str] = []
        self.liars: dict[str, str] = {}
        self.entries_read: set[str] = set()
        self.changes = 0
        connect = connect_to(peers or {}, self.connected)
        own, bundled = self.library, ModelRepository()
        self.store = ModelStore(root, "me", own, connect, bundled, self.liars.__setitem__)
        self.shelf = PartialModels(root, self.library, self._changed)

    def _changed(self) -> None:
        self.changes += 1

    async def read_chunk(self, root: str, part: str, index: int) -> bytes:
        self.entries_read.add(part)
        return await super().read_chunk(root, part, index)


class Model:
    """A model that one PC provides, and PCs with parts of it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.places = folder.parent
        repository = ModelRepository()
        self.manifest = repository.add_model("m", write_plain_model(folder)).manifest
        self.root = self.manifest.root
        self.owner = RepositorySource(repository)

    async def pc(self, name: str, *layers: tuple[int, int], kind: type[Pc] = Pc) -> Pc:
        """A PC with the files of these layers."""
        pc = kind(self.places / name, {"owner": self.owner})
        for one in layers:
            await pc.store.fetch_stage("m", self.root, one, ModelSources(("owner",)))
        await pc.shelf.scan_store()
        return pc

    async def fetch(self, pc: Pc, layers: tuple[int, int], supply: ModelSources) -> None:
        folder = await pc.store.fetch_stage("m", self.root, layers, supply)
        here, there = ModelFolder.open(folder, layers), ModelFolder.open(self.folder)
        for name in here.stage_tensors(*layers):
            assert _bytes(here, folder, name) == _bytes(there, self.folder, name)


def _bytes(opened: ModelFolder, folder: Path, name: str) -> bytes:
    span = opened.tensors[name]
    with (folder / span.file).open("rb") as file:
        file.seek(span.offset)
        return file.read(span.nbytes)


@pytest.fixture
def model(tmp_path: Path) -> Model:
    return Model(tmp_path / "model")


async def test_a_stage_is_fetched_from_peers_with_its_layers(model: Model) -> None:
    first, last = await model.pc("first", (0, 2)), await model.pc("last", (2, LAYERS))
    late = Pc(model.places / "late", {"a": first, "b": last})
    await model.fetch(late, (1, 3), ModelSources((), ("a", "b")))
    assert UP.format(1) in first.entries_read
    assert UP.format(2) in last.entries_read
    assert {UP.format(2), UP.format(3)}.isdisjoint(first.entries_read)
    assert UP.format(1) not in last.entries_read
    assert late.liars == {}
    # It is a source of these files in turn.
    await late.shelf.scan_store()
    (parts,) = late.shelf.list_models()
    assert (parts.root, parts.layers) == (model.root, ((1, 3),))
    next_one = Pc(model.places / "next", {"c": late})
    await model.fetch(next_one, (1, 3), ModelSources((), ("c",)))


async def test_several_sources_are_read_concurrently(model: Model) -> None:
    peers = {name: await model.pc(name, (0, LAYERS)) for name in "abcd"}
    late = Pc(model.places / "late", peers)
    await model.fetch(late, (0, LAYERS), ModelSources(("a", "b"), ("c", "d")))
    assert late.connected == ["a", "b", "c"]
    assert all(peers[name].entries_read for name in "abc")


async def test_a_rate_limited_transfer_uses_one_source(model: Model) -> None:
    peers = {name: await model.pc(name, (0, LAYERS)) for name in "ab"}
    late = Pc(model.places / "late", peers)
    await late.store.fetch_stage(
        "m", model.root, (0, 2), ModelSources(("a", "b")), rate_limited=True
    )
    assert late.connected == ["a"]


async def test_unavailable_files_are_named(model: Model) -> None:
    first, last = await model.pc("first", (0, 1)), await model.pc("last", (3, LAYERS))
    late = Pc(model.places / "late", {"a": first, "b": last})
    supply = ModelSources((), ("a", "b"))
    with pytest.raises(Unavailable, match="no connected PC has the files of layers 2-3 of m"):
        await model.fetch(late, (0, LAYERS), supply)
    # Files that some peer had are here, and are not fetched again.
    first.entries_read.clear()
    await model.fetch(late, (0, 1), supply)
    assert first.entries_read == {"model.embed_tokens.weight"}
    # While a peer is offline, the error doesn't claim that no peer has the files.
    with pytest.raises(Unavailable, match="gone is offline"):
        await model.fetch(late, (0, LAYERS), ModelSources((), ("a", "b", "gone")))


# --- sources that send wrong data -----------------------------------------------------------------


class OverclaimingSource(Pc):
    """Claims to have all files."""

    async def read_parts(self, root: str) -> bytes:
        manifest = self.library.require_model(root).manifest
        return manifest.encode_bitfield({*manifest.files, *manifest.tensors})


class GarbledSource(Pc):
    """Sends a list of parts that is not valid for this model."""

    async def read_parts(self, root: str) -> bytes:
        return b"\xff" * 10_000


class ForgingSource(Pc):
    """Sends wrong bytes."""

    async def read_chunk(self, root: str, part: str, index: int) -> bytes:
        data = await super().read_chunk(root, part, index)
        return bytes([data[0] ^ 1]) + data[1:]


class TruncatingSource(Pc):
    """Sends too few bytes."""

    async def read_chunk(self, root: str, part: str, index: int) -> bytes:
        return (await super().read_chunk(root, part, index))[:-1]


@pytest.mark.parametrize(
    ("kind", "lied"),
    [
        (OverclaimingSource, False),
        (GarbledSource, False),
        (ForgingSource, True),
        (TruncatingSource, True),
    ],
)
async def test_a_misbehaving_source_costs_a_retry(model: Model, kind: type[Pc], lied: bool) -> None:
    false = await model.pc("false", (0, 2), kind=kind)
    honest = await model.pc("honest", (0, LAYERS))
    late = Pc(model.places / "late", {"f": false, "h": honest})
    await model.fetch(late, (1, LAYERS), ModelSources((), ("f", "h")))
    assert (list(late.liars) == ["f"]) is lied
    alone = Pc(model.places / "alone", {"f": false})
    with pytest.raises(Unavailable, match=r"f: |no PC that is here"):
        await model.fetch(alone, (1, LAYERS), ModelSources((), ("f",)))


async def test_a_source_that_never_lists_its_parts_does_not_block(model: Model) -> None:
    class Silent(Pc):
        async def read_parts(self, root: str) -> bytes:
            await asyncio.Event().wait()
            raise AssertionError

    silent, honest = await model.pc("s", (0, 2), kind=Silent), await model.pc("h", (0, LAYERS))
    late = Pc(model.places / "late", {"s": silent, "h": honest})
    await model.fetch(late, (0, 2), ModelSources(("h",), ("s",)))


async def test_a_hanging_source_times_out(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources_module, "MAX_CONNECTED", 2)

    class Hanging(Pc):
        async def read_chunk(self, root: str, part: str, index: int) -> bytes:
            await asyncio.sleep(0)
            raise Unavailable("no answer in 15 s")  # as the client raises after a timeout

    hanging, honest = await model.pc("s", (0, 2), kind=Hanging), await model.pc("h", (0, LAYERS))
    late = Pc(model.places / "late", {"s": hanging, "h": honest})
    await model.fetch(late, (0, 2), ModelSources((), ("s", "h")))
    assert late.liars == {}


def test_bitfields_belong_to_one_model(model: Model) -> None:
    manifest = model.manifest
    some = frozenset(list(manifest.tensors)[::3])
    assert manifest.decode_bitfield(manifest.encode_bitfield(some)) == some
    for wrong in (b"", manifest.encode_bitfield(some) + b"\0", manifest.encode_bitfield(some)[1:]):
        with pytest.raises(WireError):
            manifest.decode_bitfield(wrong)


# --- the store's content
# ---------------------------------------------------------------------------


async def test_offered_files_follow_the_disk(model: Model, tmp_path: Path) -> None:
    pc = await model.pc("pc", (1, 2))
    assert pc.changes == 1
    await pc.shelf.scan_store()
    assert pc.changes == 1  # no file is new
    assert await pc.read_chunk(model.root, UP.format(1), 0)
    with pytest.raises(ModelNotFound, match=r"does not have model\.layers\.3"):
        await pc.read_chunk(model.root, UP.format(3), 0)
    assert pc.library.model_names == ()
    await pc.store.fetch_stage("m", model.root, (3, LAYERS), ModelSources(("owner",)))
    (tmp_path / "pc" / "other-0123456789abcdef").mkdir()
    (tmp_path / "pc" / "other-0123456789abcdef" / "manifest.molink").write_bytes(b"x")
    await pc.shelf.scan_store()
    assert pc.shelf.list_models()[0].layers == ((1, 2), (3, LAYERS))
    (folder,) = (tmp_path / "pc").glob("m-*")
    (folder / "layer-0003.safetensors").write_bytes(b"short")
    await pc.shelf.scan_store()
    assert pc.shelf.list_models()[0].layers == ((1, 2),)
    with pytest.raises(ModelNotFound):
        await pc.read_chunk(model.root, UP.format(3), 0)
