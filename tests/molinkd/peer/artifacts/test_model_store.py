"""Fetching model files: only the needed ones, atomically, and verified."""

import asyncio
import json
import os
import shutil
import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from molink.checkpoint.adapted_folder import adapt_model
from molink.checkpoint.config import ModelConfig
from molink.checkpoint.low_bit import LowBitScheme
from molink.checkpoint.manifest import CHUNK_BYTES, MAX_MANIFEST_BYTES, HashedEntry, manifest_size
from molink.checkpoint.model_folder import ModelFolder
from molink.checkpoint.safetensors_header import TensorSpan
from molink.errors import BrokenModel, MolinkError, Unavailable
from molink.swarm.artifacts import rate_limit as rate_limit_module
from molink.swarm.artifacts.fetch_plan import group_tensors, plan_group
from molink.swarm.artifacts.sources import ModelSources
from molinkd.peer.artifacts import model_store as store_module
from molinkd.peer.artifacts import sources as sources_module
from molinkd.peer.artifacts.model_repository import ModelRepository
from molinkd.peer.artifacts.model_store import ModelStore
from molinkd.peer.artifacts.sources import Source
from molinkd.peer.artifacts.transfers import Progress
from tests.support import fake_sources as sources
from tests.support.adapters import write_adapter
from tests.support.fake_sources import RepositorySource, connect_to
from tests.support.models import PLAIN_CONFIG as CONFIG
from tests.support.models import write_modules
from tests.support.models import write_plain_model as write_model


class FakeSource(RepositorySource):
    """A peer that serves a repository; counts what is read."""

    def __init__(self, library: ModelRepository, *, break_after: int | None = None) -> None:
        super().__init__(library)
        self.read_bytes: Counter[str] = Counter()
        self.reads = 0
        self.at_once = 0
        self.max_at_once = 0
        self.break_after = break_after

    async def read_chunk(self, root: str, part: str, index: int) -> bytes:
        self.reads += 1
        if self.break_after is not None and self.reads > self.break_after:
            raise Unavailable("the connection broke")
        self.at_once += 1
        self.max_at_once = max(self.max_at_once, self.at_once)
        await asyncio.sleep(0)
        self.at_once -= 1
        data = await super().read_chunk(root, part, index)
        self.read_bytes[part] += len(data)
        return data


class Case:
    """A store, and what it was told of liars."""

    def __init__(
        self, root: Path, peers: Mapping[str, Source], own: ModelRepository | None = None
    ) -> None:
        root.mkdir(exist_ok=True)
        self.connected: list[str] = []
        self.liars: dict[str, str] = {}
        self.store = ModelStore(
            root,
            "me",
            own or ModelRepository(),
            connect_to(peers, self.connected),
            ModelRepository(),
            self.liars.__setitem__,
        )
        self.library = next(one.library for one in peers.values() if isinstance(one, FakeSource))

    @property
    def root(self) -> str:
        model_files = self.library.get_model("m")
        assert model_files is not None
        return model_files.manifest.root

    async def stage(
        self, layers: tuple[int, int], *sources: str, progress: Progress | None = None
    ) -> Path:
        return await self.store.fetch_stage(
            "m", self.root, layers, ModelSources(sources or ("a",)), progress
        )

    async def metadata(self, *sources: str) -> Path:
        return await self.store.fetch_metadata("m", self.root, ModelSources(sources or ("a",)))


@pytest.fixture
def source(tmp_path: Path) -> FakeSource:
    repository = ModelRepository()
    repository.add_model("m", write_model(tmp_path / "model"))
    return FakeSource(repository)


async def test_a_stage_fetches_its_layers_only(tmp_path: Path, source: FakeSource) -> None:
    progress = Progress()
    folder = await Case(tmp_path / "store", {"a": source}).stage((1, 3), progress=progress)
    assert sorted(p.name for p in folder.glob("*.safetensors")) == [
        "layer-0001.safetensors",
        "layer-0002.safetensors",
    ]
    opened = ModelFolder.open(folder, (1, 3))
    original = ModelFolder.open(tmp_path / "model")
    for name in opened.stage_tensors(1, 3):
        here, there = opened.tensors[name], original.tensors[name]
        assert _bytes(folder, here) == _bytes(tmp_path / "model", there)
    assert 0 < progress.done == progress.total
    assert (progress.source, progress.existing) == ("a", 0)
    weights = sum(n for name, n in source.read_bytes.items() if name.startswith("model."))
    whole = sum(p.stat().st_size for p in (tmp_path / "model").glob("*.safetensors"))
    assert weights < 0.75 * whole
    assert source.max_at_once > 1


def _bytes(folder: Path, span: TensorSpan) -> bytes:
    with (folder / span.file).open("rb") as file:
        file.seek(span.offset)
        return file.read(span.nbytes)


@pytest.mark.parametrize("tied", [False, True])
async def test_first_and_last_stage_fetch_embeddings(tmp_path: Path, tied: bool) -> None:
    repository = ModelRepository()
    repository.add_model("m", write_model(tmp_path / "model", tied=tied))
    case = Case(tmp_path / "store", {"a": FakeSource(repository)})
    first = await case.stage((0, 2))
    ModelFolder.open(first, (0, 2))
    last = await case.stage((2, 4))
    assert last == first
    ModelFolder.open(last, (2, 4))
    ModelFolder.open(last)


async def test_the_event_loop_does_not_wait_for_the_disk(
    tmp_path: Path, source: FakeSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: set[int] = set()
    fsync = os.fsync

    def noted(descriptor: int) -> None:
        threads.add(threading.get_ident())
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    await Case(tmp_path / "store", {"a": source}).stage((1, 2))
    assert threads
    assert threading.get_ident() not in threads


async def test_existing_files_are_not_fetched_again(tmp_path: Path, source: FakeSource) -> None:
    case = Case(tmp_path / "store", {"a": source})
    await case.stage((1, 3))
    before = source.reads
    progress = Progress()
    await case.stage((1, 3), progress=progress)
    await Case(tmp_path / "store", {"a": source}).stage((1, 3))  # nor by a new daemon
    assert source.reads == before
    assert 0 < progress.done == progress.total


async def test_an_interrupted_transfer_is_resumed(tmp_path: Path, source: FakeSource) -> None:
    case = Case(tmp_path / "store", {"a": source})
    source.break_after = 20
    with pytest.raises(Unavailable, match="broke"):
        await case.stage((0, 4))
    kept = sorted(p.name for p in (tmp_path / "store").rglob("*.safetensors"))
    assert kept
    assert not list((tmp_path / "store").rglob("*.part"))
    source.break_after = None
    source.read_bytes.clear()
    folder = await case.stage((0, 4))
    ModelFolder.open(folder)
    assert len(kept) < len(list(folder.glob("*.safetensors")))


async def test_the_next_source_continues_after_a_failure(
    tmp_path: Path, source: FakeSource
) -> None:
    broken = FakeSource(source.library, break_after=15)
    case = Case(tmp_path / "store", {"a": broken, "b": source})
    progress = Progress()
    folder = await case.stage((0, 4), "gone", "a", "b", progress=progress)
    ModelFolder.open(folder)
    assert not set(broken.read_bytes) & set(source.read_bytes)
    assert progress.done == progress.total
    assert case.liars == {}
    # Sources that failed are asked last from now on.
    case.connected.clear()
    shutil.rmtree(folder)
    await case.stage((0, 4), "gone", "a", "b")
    assert case.connected[0] == "b"


async def test_the_error_quotes_every_source(tmp_path: Path, source: FakeSource) -> None:
    case = Case(tmp_path / "store", {"x": source, "a": FakeSource(ModelRepository())})
    with pytest.raises(Unavailable, match=r"a: this peer does not have.*b: b is offline"):
        await case.stage((0, 4), "a", "b")
    with pytest.raises(Unavailable, match="no connected peer"):
        await case.metadata("me")


async def test_nothing_is_fetched_without_a_root(tmp_path: Path, source: FakeSource) -> None:
    case = Case(tmp_path / "store", {"a": source})
    with pytest.raises(Unavailable, match="m has no manifest"):
        await case.store.fetch_metadata("m", "", ModelSources(("a",)))
    assert case.connected == []


async def test_metadata_only(tmp_path: Path, source: FakeSource) -> None:
    folder = await Case(tmp_path / "store", {"a": source}).metadata()
    assert sorted(p.name for p in folder.iterdir()) == [
        "config.json",
        "manifest.molink",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8")) == {"x": 1}


async def test_an_embedding_model_stays_one(tmp_path: Path) -> None:
    repository = ModelRepository()
    model = write_model(tmp_path / "model")
    write_modules(model, ["Transformer", "Pooling"], {"1_Pooling": {"pooling_mode": "lasttoken"}})
    repository.add_model("m", model)
    case = Case(tmp_path / "store", {"a": FakeSource(repository)})
    assert not ModelConfig.load_folder(await case.metadata()).has_output_head
    last = ModelFolder.open(await case.stage((3, 4)), (3, 4))
    assert "lm_head.weight" not in last.tensors


async def test_prerequisite_metadata_counts_as_progress(tmp_path: Path, source: FakeSource) -> None:
    case = Case(tmp_path / "store", {"a": source})
    go_on = asyncio.Event()
    read = source.read_chunk

    async def slowly(root: str, part: str, index: int) -> bytes:
        if part == "tokenizer_config.json":
            waiting.set()
            await go_on.wait()
        return await read(root, part, index)

    waiting = asyncio.Event()
    source.read_chunk = slowly  # type: ignore[method-assign]
    progress, before = Progress(), manifest_size(case.root)
    async with asyncio.TaskGroup() as group:
        group.create_task(case.metadata())
        await waiting.wait()
        group.create_task(case.stage((1, 3), progress=progress))
        await asyncio.sleep(0)
        done, total = progress.totals
        assert before < done < total
        go_on.set()
    assert done < progress.done == progress.total
    assert progress.totals == (progress.done, progress.total)


async def test_an_identical_local_model_is_used(tmp_path: Path, source: FakeSource) -> None:
    mine = ModelRepository()
    mine.add_model("m", write_model(tmp_path / "mine"))
    case = Case(tmp_path / "store", {"a": source}, mine)
    assert await case.stage((0, 4)) == tmp_path / "mine"
    assert case.connected == []
    other = ModelRepository()
    other.add_model("m", write_model(tmp_path / "other", seed=1))
    case = Case(tmp_path / "store2", {"a": source}, other)
    assert await case.stage((0, 1)) != tmp_path / "other"


async def test_versions_of_one_name_do_not_mix(tmp_path: Path) -> None:
    old, new = ModelRepository(), ModelRepository()
    old.add_model("m", write_model(tmp_path / "old", seed=0))
    new.add_model("m", write_model(tmp_path / "new", seed=1))
    root = tmp_path / "store"
    before = await Case(root, {"a": FakeSource(old)}).stage((0, 2))
    after = await Case(root, {"a": FakeSource(new)}).stage((0, 2))
    assert before != after


async def test_a_full_disk_is_reported_before_fetching(
    tmp_path: Path, source: FakeSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("molink.checkpoint.disk_space.DISK_RESERVE_BYTES", 1 << 62)
    case = Case(tmp_path / "store", {"a": source})
    with pytest.raises(MolinkError, match="free"):
        await case.stage((0, 4))
    with pytest.raises(MolinkError, match="free"):
        await case.metadata()
    assert source.reads == 0
    assert left_behind(tmp_path / "store") == []


async def test_a_hostile_name_stays_in_the_store(tmp_path: Path, source: FakeSource) -> None:
    case = Case(tmp_path / "store", {"a": source})
    folder = await case.store.fetch_metadata("../../evil", case.root, ModelSources(("a",)))
    assert folder.parent == tmp_path / "store"


async def test_metadata_appears_atomically(tmp_path: Path, source: FakeSource) -> None:
    source.break_after = 1
    with pytest.raises(Unavailable, match="broke"):
        await Case(tmp_path / "store", {"a": source}).metadata()
    assert left_behind(tmp_path / "store") == []


async def test_leftovers_of_a_crash_are_removed(tmp_path: Path, source: FakeSource) -> None:
    draft = tmp_path / "store" / ".m-0123456789abcdef.part"
    draft.mkdir(parents=True)
    (draft / "tokenizer.json").write_bytes(b"x")
    Case(tmp_path / "store", {"a": source})
    assert left_behind(tmp_path / "store") == []


async def test_layers_out_of_range(tmp_path: Path, source: FakeSource) -> None:
    case = Case(tmp_path / "store", {"a": source})
    with pytest.raises(MolinkError, match="has layers 1-4, not 3-2000000000"):
        await case.stage((2, 2_000_000_000))


async def test_old_versions_are_pruned(tmp_path: Path) -> None:
    root = tmp_path / "store"
    sources = []
    for version in range(6):
        repository = ModelRepository()
        repository.add_model("m", write_model(tmp_path / f"m{version}", seed=version))
        sources.append(FakeSource(repository))
        await Case(root, {"a": sources[-1]}).stage((0, 1))
    assert len(list(root.iterdir())) == 1 + store_module.MAX_OLD_VERSIONS


async def test_other_adapters_leave_files_of_layers_as_they_are(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    cases, folders = [], []
    for seed in range(2):
        adapter = write_adapter(tmp_path / f"a{seed}", model, ("q_proj",), seed, layers=(1, 2))
        library = ModelRepository()
        library.add_model("m", adapt_model("m", model, {"poet": adapter}, tmp_path / "into"))
        source = FakeSource(library)
        cases.append(source)
        folders.append(await Case(tmp_path / "store", {"a": source}).stage((1, 3)))
    assert folders[0] != folders[1]
    names = [f"{kind}-000{layer}.safetensors" for kind in ("adapters", "layer") for layer in (1, 2)]
    for folder in folders:
        assert sorted(path.name for path in folder.glob("*.safetensors")) == names
        assert ModelFolder.open(folder, (1, 3)).config.adapters
    fetched = [{n for n in source.read_bytes if n.startswith("model.")} for source in cases]
    assert len(fetched[0]) > 4
    assert fetched[1] == {
        f"model.layers.{layer}.self_attn.q_proj.lora_{part}.1" for layer in (1, 2) for part in "AB"
    }
    # An altered file of the other model is not linked: the original is fetched.
    shutil.rmtree(folders[1])
    path = folders[0] / "layer-0001.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    await Case(tmp_path / "store", {"a": cases[1]}).stage((1, 3))
    again = folders[1] / "layer-0001.safetensors"
    assert again.read_bytes() != path.read_bytes()
    assert ModelFolder.open(folders[1], (1, 3))


# --- sources that send wrong data -----------------------------------------------------------------


class AlteringSource(FakeSource):
    """Has the right manifest and the right sizes, but other bytes in some parts."""

    def __init__(self, library: ModelRepository, *parts: str) -> None:
        super().__init__(library)
        self.read_parts = parts
        self.lies = 0

    async def read_chunk(self, root: str, part: str, index: int) -> bytes:
        data = await super().read_chunk(root, part, index)
        if self.read_parts and part not in self.read_parts:
            return data
        self.lies += 1
        return bytes([data[0] ^ 1]) + data[1:]


def left_behind(root: Path) -> list[str]:
    return sorted(path.name for path in root.rglob("*"))


def same_tensors(folder: Path, original: Path, layers: tuple[int, int]) -> None:
    here, there = ModelFolder.open(folder, layers), ModelFolder.open(original)
    for name in here.stage_tensors(*layers):
        assert _bytes(folder, here.tensors[name]) == _bytes(original, there.tensors[name])


TENSOR = "model.layers.2.mlp.up_proj.weight"


@pytest.mark.parametrize("part", [TENSOR, "tokenizer_config.json", "config.json"])
async def test_altered_bytes_are_detected_and_the_next_source_continues(
    tmp_path: Path, source: FakeSource, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources_module, "MAX_CONNECTED", 1)
    liar = AlteringSource(source.library, part)
    case = Case(tmp_path / "store", {"l": liar, "b": source})
    folder = await case.stage((1, 4), "l", "b")
    same_tensors(folder, tmp_path / "model", (1, 4))
    for name in ("config.json", "tokenizer_config.json"):
        assert (folder / name).read_bytes() == (tmp_path / "model" / name).read_bytes()
    assert liar.lies >= 1
    assert list(case.liars) == ["l"]
    assert part in case.liars["l"]
    # It is not asked again, even where there is no other source.
    shutil.rmtree(folder)
    case.connected.clear()
    with pytest.raises(Unavailable, match="l: excluded: chunk 1 of 1 of"):
        await case.stage((1, 4), "l")
    assert case.connected == []
    case.store.drop_peer("l")
    liar.read_parts = ("none",)
    await case.stage((1, 4), "l")


async def test_a_single_altering_source_yields_nothing(tmp_path: Path, source: FakeSource) -> None:
    case = Case(tmp_path / "store", {"l": AlteringSource(source.library)})
    with pytest.raises(Unavailable, match="is not what the model's owner has there"):
        await case.stage((0, 4), "l")
    assert left_behind(tmp_path / "store") == []
    assert list(case.liars) == ["l"]


class WrongManifest(FakeSource):
    """Serves another model's manifest, or one of any size, under the requested root."""

    def __init__(self, library: ModelRepository, size: int, raw: bytes) -> None:
        super().__init__(library)
        self.size, self.raw, self.asked = size, raw, 0

    async def read_manifest(self, root: str, offset: int) -> tuple[int, bytes]:
        self.asked += 1
        return self.size, self.raw[offset : offset + CHUNK_BYTES]


@pytest.mark.parametrize(
    ("size", "sent", "why"),
    [
        ("right", "other", "not the one that the model's owner made"),
        (MAX_MANIFEST_BYTES + 1, CHUNK_BYTES, "it sent 196608 of 67108865 at 0"),
        (2**53, CHUNK_BYTES, "it sent 196608 of"),
        (0, 0, "it sent 0 of 0 at 0"),
        ("right", 10, "it sent 10 of"),
        ("right", 0, "it sent 0 of"),
        ("right", CHUNK_BYTES, "it sent 196608 of"),
    ],
)
async def test_a_wrong_manifest(
    tmp_path: Path, source: FakeSource, size: int | str, sent: int | str, why: str
) -> None:
    case = Case(tmp_path / "store", {"a": source})
    due = manifest_size(case.root)
    other = ModelRepository().add_model("m", write_model(tmp_path / "other", seed=3)).manifest.raw
    assert len(other) == due
    raw = bytes(sent) if isinstance(sent, int) else other
    liar = WrongManifest(source.library, size if isinstance(size, int) else due, raw)
    case = Case(tmp_path / "store", {"l": liar, "b": source})
    folder = await case.stage((0, 2), "l", "b")
    same_tensors(folder, tmp_path / "model", (0, 2))
    assert why in case.liars["l"]
    assert liar.asked == 1


async def test_a_manifest_is_read_in_chunks(
    tmp_path: Path, source: FakeSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (sources_module, sources):
        monkeypatch.setattr(module, "CHUNK_BYTES", 100)
    case = Case(tmp_path / "store", {"a": source})
    folder = await case.stage((0, 1))
    assert (folder / "manifest.molink").read_bytes() == source.library.require_model(
        case.root
    ).manifest.raw


async def test_an_oversized_manifest_is_not_requested(tmp_path: Path, source: FakeSource) -> None:
    case = Case(tmp_path / "store", {"a": source})
    with pytest.raises(BrokenModel, match="too large"):
        await case.store.fetch_metadata(
            "m", f"{'0' * 64}:{MAX_MANIFEST_BYTES + 1}", ModelSources(("a",))
        )
    assert case.connected == []


async def test_a_slow_source_is_dropped(
    tmp_path: Path, source: FakeSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources_module, "TRIAL_S", 0.0)
    monkeypatch.setattr(sources_module, "MIN_SOURCE_RATE", 1e15)
    slow = FakeSource(source.library)
    case = Case(tmp_path / "store", {"s": slow, "b": source})
    folder = await case.stage((0, 4), "s", "b")
    same_tensors(folder, tmp_path / "model", (0, 4))
    assert slow.reads == 0  # another source was chosen once the manifest was there
    assert source.reads > 0
    assert case.liars == {}


# --- files that are altered on this PC ------------------------------------------------------------


def flip(path: Path, offset: int = -1) -> None:
    """Alter one byte, but neither size nor time."""
    found = path.stat()
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns))


@pytest.mark.parametrize(
    ("name", "offset"),
    [
        ("layer-0001.safetensors", -1),
        ("layer-0001.safetensors", 12),
        ("tokenizer_config.json", 5),
        ("manifest.molink", 40),
    ],
)
async def test_an_altered_file_is_detected_before_use(
    tmp_path: Path, source: FakeSource, name: str, offset: int
) -> None:
    folder = await Case(tmp_path / "store", {"a": source}).stage((0, 3))
    before = source.reads
    flip(folder / name, offset)
    case = Case(tmp_path / "store", {"a": source})
    progress = Progress()
    assert await case.stage((0, 3), progress=progress) == folder
    same_tensors(folder, tmp_path / "model", (0, 3))
    original = {"tokenizer_config.json": (tmp_path / "model" / name)}
    if name in original:
        assert (folder / name).read_bytes() == original[name].read_bytes()
    assert (folder / "manifest.molink").read_bytes() == source.library.require_model(
        case.root
    ).manifest.raw
    assert 0 < progress.done == progress.total
    fetched = source.reads - before
    assert fetched <= 12  # only that file


async def test_a_file_that_changes_while_the_daemon_runs(
    tmp_path: Path, source: FakeSource
) -> None:
    case = Case(tmp_path / "store", {"a": source})
    folder = await case.stage((0, 2))
    file = folder / "layer-0001.safetensors"
    with file.open("r+b") as stream:
        stream.truncate(100)
    await case.stage((0, 2))
    same_tensors(folder, tmp_path / "model", (0, 2))


# --- the config bounds the sizes that a manifest may claim ----------------------------------------


def test_sizes_follow_from_the_config(tmp_path: Path, source: FakeSource) -> None:
    config = ModelConfig.load_folder(tmp_path / "model")
    groups = group_tensors(config, 0, 4)
    tensors = source.library.add_model("m", tmp_path / "model").manifest.tensors
    huge = HashedEntry("model.norm.weight", 2**45, b"", "U8", (2**45,))
    with pytest.raises(MolinkError, match=r"tensor .* is U8 \[35184372088832\], not \["):
        plan_group("final", groups["final"], {**tensors, huge.name: huge})
    del tensors["model.norm.weight"]
    with pytest.raises(MolinkError, match=r"has no tensor model\.norm\.weight"):
        plan_group("final", groups["final"], tensors)


def test_a_plan_of_a_huge_group_is_small() -> None:
    extent = 1 << 20
    part = HashedEntry("t", 4 * extent * extent, b"", "F32", (extent, extent))
    plan = plan_group("embed", {"t": (extent, extent)}, {"t": part})
    assert plan.nbytes > 2**42
    runs = plan.chunk_runs()
    first, second = next(runs), next(runs)
    assert (first.index, first.offset) == (0, len(plan.header))
    assert (second.index, second.offset) == (1, first.offset + CHUNK_BYTES)


@pytest.mark.parametrize("field", ["vocab_size", "hidden_size", "intermediate_size"])
async def test_a_config_of_absurd_size(tmp_path: Path, source: FakeSource, field: str) -> None:
    config = {**CONFIG, "head_dim": 4, field: 2**31 - 1}
    (tmp_path / "model" / "config.json").write_text(json.dumps(config), encoding="utf-8")
    source.library.add_model("m", tmp_path / "model")
    case = Case(tmp_path / "store", {"a": source})
    with pytest.raises(MolinkError, match=f"{field} must be at most"):
        await case.stage((0, 4))
    assert left_behind(tmp_path / "store") == []


@pytest.mark.parametrize(
    ("name", "size"),
    [("tokenizer.json", (64 << 20) + 1), ("config.json", (16 << 20) + 1)],
)
async def test_metadata_is_bounded(
    tmp_path: Path, source: FakeSource, name: str, size: int
) -> None:
    with (tmp_path / "model" / name).open("r+b") as file:
        file.truncate(size)
    source.library.add_model("m", tmp_path / "model")
    case = Case(tmp_path / "store", {"a": source})
    with pytest.raises(MolinkError, match=f"{name} of m has {size} bytes"):
        await case.metadata()
    assert source.reads == 0
    assert left_behind(tmp_path / "store") == []


def quantized_parts(state_bytes: int) -> dict[str, HashedEntry]:
    """An nf4 weight ``[64, 64]`` as a manifest describes it."""
    name = "model.layers.0.mlp.up_proj.weight"
    parts = {
        name: ("U8", (2048, 1)),
        f"{name}.absmax": ("F32", (64,)),
        f"{name}.quant_map": ("F32", (16,)),
        f"{name}.quant_state.bitsandbytes__nf4": ("U8", (state_bytes,)),
    }
    return {
        name: HashedEntry(name, shape[0] * (4 if dtype == "F32" else 1), b"", dtype, shape)
        for name, (dtype, shape) in parts.items()
    }


def test_a_quantized_weight_is_fetched_with_its_scales() -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    parts = quantized_parts(90)
    plan = plan_group("layer-0000", {name: (64, 64)}, parts, "nf4")
    assert plan.parts == tuple(parts.values())
    assert plan.nbytes == len(plan.header) + 2048 + 4 * 64 + 4 * 16 + 90
    with pytest.raises(MolinkError, match="is U8"):
        plan_group("layer-0000", {name: (64, 64)}, parts)
    del parts[f"{name}.absmax"]
    with pytest.raises(MolinkError, match=r"has no tensor .*absmax"):
        plan_group("layer-0000", {name: (64, 64)}, parts, "nf4")


def test_a_low_bit_weight_is_fetched_with_its_tensors() -> None:
    module, scheme = "model.layers.0.mlp.up_proj", LowBitScheme("gptq", 4, (1, 32))
    wanted = {"qweight": ("I32", (8, 64)), "scales": ("F16", (2, 64)), "qzeros": ("I32", (2, 8))}
    shapes = {**wanted, "g_idx": ("I32", (64,)), "bias": ("F16", (64,))}
    parts = {
        f"{module}.{end}": HashedEntry(f"{module}.{end}", 0, b"", dtype, shape)
        for end, (dtype, shape) in shapes.items()
    }
    asked = {f"{module}.weight": (64, 64)}
    plan = plan_group("layer-0000", asked, parts, low_bit=scheme)
    assert [part.name for part in plan.parts] == [f"{module}.{end}" for end in wanted]
    with pytest.raises(MolinkError, match=r"has no tensor .*up_proj\.weight"):
        plan_group("layer-0000", asked, parts)
    with pytest.raises(MolinkError, match=r"qweight is I32 \[8, 64\], not \[16, 64\]"):
        plan_group("layer-0000", asked, parts, low_bit=replace(scheme, bits=8))


def test_tensors_of_a_quantized_weight_are_bounded() -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    with pytest.raises(MolinkError, match="quant_state"):
        plan_group("layer-0000", {name: (64, 64)}, quantized_parts(1 << 30), "nf4")
    with pytest.raises(MolinkError, match="up_proj"):
        plan_group("layer-0000", {name: (32, 64)}, quantized_parts(90), "nf4")


class SlicedSource(FakeSource):
    """Records the lengths of the slices that are read; sends too few bytes if it is ``short``."""

    def __init__(self, library: ModelRepository, *, short: bool = False) -> None:
        super().__init__(library)
        self.slices: list[int] = []
        self.short = short

    async def read_slice(self, root: str, part: str, index: int, begin: int, length: int) -> bytes:
        self.slices.append(length)
        data = await super().read_slice(root, part, index, begin, length)
        return data[1:] if self.short else data


async def test_a_rate_limited_stage_is_fetched_in_slices(
    tmp_path: Path, source: FakeSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rate_limit_module, "SLICE", 1000)
    monkeypatch.setattr(rate_limit_module, "MAX_SLICE", 1000)
    sliced = SlicedSource(source.library)
    short = SlicedSource(source.library, short=True)
    case = Case(tmp_path / "store", {"a": short, "b": sliced})
    folder = await case.store.fetch_stage(
        "m", case.root, (1, 3), ModelSources(("a", "b")), rate_limited=True
    )
    ModelFolder.open(folder, (1, 3))
    assert short.slices
    assert case.connected == ["a", "b"]
    assert case.liars == {}
    assert max(sliced.slices) == 1000
    assert len(sliced.slices) > 20
    # The rate limit is for new files of a stage that serves; other transfers have none.
    sliced.slices.clear()
    await case.store.fetch_stage("m", case.root, (0, 1), ModelSources(("b",)))
    assert sliced.slices == []
