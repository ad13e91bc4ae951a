"""Fetching model files: only what is needed, whole files only, from whoever has them."""

import asyncio
import json
import os
import struct
import threading
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from molink.checkpoint.folder import ModelFolder
from molink.checkpoint.header import TensorSpan
from molink.checkpoint.layout import stage_tensors
from molink.errors import ModelError, MolinkError, Unavailable
from molink.swarm.fetch_plan import PIECE_BYTES, FilePiece, cut, plan_group
from molink.wire.messages.transfer import FileEntry
from molinkd.peer import store as store_module
from molinkd.peer.library import Library
from molinkd.peer.store import FetchProgress, Store

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 16,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 32,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "eos_token_id": 2,
}


def write_model(folder: Path, *, tied: bool = False, seed: int = 0) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(
        json.dumps({**CONFIG, "tie_word_embeddings": tied}), encoding="utf-8"
    )
    (folder / "tokenizer.json").write_text("{}", encoding="utf-8")
    (folder / "tokenizer_config.json").write_text('{"x": 1}', encoding="utf-8")
    write_weights(folder, seed)
    return folder


def write_weights(folder: Path, seed: int) -> None:
    """Two shards with bytes that depend on the tensor."""
    from molink.checkpoint.config import ModelConfig

    config = ModelConfig.load(folder)
    names = list(stage_tensors(config, 0, config.layers).items())
    half = len(names) // 2
    for number, part in enumerate((names[:half], names[half:])):
        header: dict[str, object] = {}
        body = b""
        for name, shape in part:
            size = 4
            for extent in shape:
                size *= extent
            offsets = [len(body), len(body) + size]
            header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": offsets}
            body += bytes((i * 7 + len(name) + seed) % 256 for i in range(size))
        text = json.dumps(header).encode()
        data = struct.pack("<Q", len(text)) + text + body
        (folder / f"model-{number}.safetensors").write_bytes(data)


class FakeSource:
    """A peer that answers from a library; counts what is read."""

    def __init__(self, library: Library, *, break_after: int | None = None) -> None:
        self.library = library
        self.read_bytes: Counter[str] = Counter()
        self.reads = 0
        self.at_once = 0
        self.max_at_once = 0
        self.break_after = break_after

    async def files(self, model: str) -> Sequence[FileEntry]:
        return self.library.files(model)

    async def read(self, model: str, piece: FilePiece) -> bytes:
        self.reads += 1
        if self.break_after is not None and self.reads > self.break_after:
            raise Unavailable("the connection broke")
        self.at_once += 1
        self.max_at_once = max(self.max_at_once, self.at_once)
        await asyncio.sleep(0)
        self.at_once -= 1
        self.read_bytes[piece.file] += piece.length
        return self.library.read(model, piece.file, piece.offset, piece.length)


def make_store(root: Path, peers: dict[str, FakeSource], own: Library | None = None) -> Store:
    @asynccontextmanager
    async def connect(peer: str) -> AsyncIterator[FakeSource]:
        if peer not in peers:
            raise Unavailable(f"{peer} is not there")
        yield peers[peer]

    root.mkdir(exist_ok=True)
    return Store(root, "me", own or Library(), connect, Library())


@pytest.fixture
def source(tmp_path: Path) -> FakeSource:
    library = Library()
    library.add("m", write_model(tmp_path / "model"))
    return FakeSource(library)


async def test_a_stage_fetches_its_layers_only(tmp_path: Path, source: FakeSource) -> None:
    store = make_store(tmp_path / "store", {"a": source})
    progress = FetchProgress()
    folder = await store.stage("m", (1, 3), ["a"], progress)
    assert sorted(p.name for p in folder.glob("*.safetensors")) == [
        "layer-0001.safetensors",
        "layer-0002.safetensors",
    ]
    opened = ModelFolder.open(folder, (1, 3))
    original = ModelFolder.open(tmp_path / "model")
    for name in opened.stage_tensors(1, 3):
        here, there = opened.tensors[name], original.tensors[name]
        assert _bytes(folder, here) == _bytes(tmp_path / "model", there)
    assert 0 < progress.done <= progress.total
    weights = sum(n for name, n in source.read_bytes.items() if name.endswith(".safetensors"))
    whole = sum(p.stat().st_size for p in (tmp_path / "model").glob("*.safetensors"))
    assert weights < 0.75 * whole
    assert source.max_at_once > 1


def _bytes(folder: Path, span: TensorSpan) -> bytes:
    with (folder / span.file).open("rb") as file:
        file.seek(span.offset)
        return file.read(span.nbytes)


@pytest.mark.parametrize("tied", [False, True])
async def test_the_ends_of_the_model(tmp_path: Path, tied: bool) -> None:
    library = Library()
    library.add("m", write_model(tmp_path / "model", tied=tied))
    store = make_store(tmp_path / "store", {"a": FakeSource(library)})
    first = await store.stage("m", (0, 2), ["a"])
    ModelFolder.open(first, (0, 2))
    last = await store.stage("m", (2, 4), ["a"])
    assert last == first
    ModelFolder.open(last, (2, 4))
    ModelFolder.open(last)


async def test_the_disk_is_never_waited_for_on_the_loop(
    tmp_path: Path, source: FakeSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: set[int] = set()
    fsync = os.fsync

    def noted(descriptor: int) -> None:
        threads.add(threading.get_ident())
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    await make_store(tmp_path / "store", {"a": source}).stage("m", (1, 2), ["a"])
    assert threads
    assert threading.get_ident() not in threads


async def test_what_is_here_is_not_fetched_again(tmp_path: Path, source: FakeSource) -> None:
    store = make_store(tmp_path / "store", {"a": source})
    await store.stage("m", (1, 3), ["a"])
    before = source.reads
    await store.stage("m", (1, 3), ["a"])
    assert source.reads == before


async def test_an_interrupted_transfer_is_taken_up_again(
    tmp_path: Path, source: FakeSource
) -> None:
    store = make_store(tmp_path / "store", {"a": source})
    source.break_after = 20
    with pytest.raises(Unavailable, match="broke"):
        await store.stage("m", (0, 4), ["a"])
    kept = sorted(p.name for p in (tmp_path / "store").rglob("*.safetensors"))
    assert kept
    assert not list((tmp_path / "store").rglob("*.part"))
    source.break_after = None
    source.read_bytes.clear()
    folder = await store.stage("m", (0, 4), ["a"])
    ModelFolder.open(folder)
    assert len(kept) < len(list(folder.glob("*.safetensors")))


async def test_the_next_source_is_tried(tmp_path: Path, source: FakeSource) -> None:
    broken = FakeSource(source.library, break_after=5)
    store = make_store(tmp_path / "store", {"a": broken, "b": source})
    folder = await store.stage("m", (0, 4), ["gone", "a", "b"])
    ModelFolder.open(folder)


async def test_no_source_says_what_each_answered(tmp_path: Path) -> None:
    store = make_store(tmp_path / "store", {"a": FakeSource(Library())})
    with pytest.raises(Unavailable, match=r"a: this peer doesn't hold.*b: b is not there"):
        await store.stage("m", (0, 4), ["a", "b"])
    with pytest.raises(Unavailable, match="no peer"):
        await store.metadata("m", ["me"])


async def test_metadata_only(tmp_path: Path, source: FakeSource) -> None:
    store = make_store(tmp_path / "store", {"a": source})
    folder = await store.metadata("m", ["a"])
    assert sorted(p.name for p in folder.iterdir()) == [
        "config.json",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8")) == {"x": 1}


async def test_a_copy_of_our_own_is_used_if_it_is_the_same(
    tmp_path: Path, source: FakeSource
) -> None:
    mine = Library()
    mine.add("m", write_model(tmp_path / "mine"))
    store = make_store(tmp_path / "store", {"a": source}, mine)
    assert await store.stage("m", (0, 4), ["a"]) == tmp_path / "mine"
    assert source.reads == 0
    other = Library()
    other.add("m", write_model(tmp_path / "other", seed=1))
    store = make_store(tmp_path / "store2", {"a": source}, other)
    assert await store.stage("m", (0, 1), ["a"]) != tmp_path / "other"


async def test_models_of_one_name_but_other_content_do_not_mix(tmp_path: Path) -> None:
    old, new = Library(), Library()
    old.add("m", write_model(tmp_path / "old", seed=0))
    new.add("m", write_model(tmp_path / "new", seed=1))
    root = tmp_path / "store"
    before = await make_store(root, {"a": FakeSource(old)}).stage("m", (0, 2), ["a"])
    after = await make_store(root, {"a": FakeSource(new)}).stage("m", (0, 2), ["a"])
    assert before != after


async def test_a_full_disk_is_said_before_anything_is_fetched(
    tmp_path: Path, source: FakeSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "RESERVE_BYTES", 1 << 62)
    store = make_store(tmp_path / "store", {"a": source})
    with pytest.raises(MolinkError, match="free"):
        await store.stage("m", (0, 4), ["a"])
    assert not list((tmp_path / "store").rglob("*.safetensors"))


async def test_a_hostile_name_stays_in_the_store(tmp_path: Path, source: FakeSource) -> None:
    source.library.add("../../evil", tmp_path / "model")
    store = make_store(tmp_path / "store", {"a": source})
    folder = await store.metadata("../../evil", ["a"])
    assert folder.parent == tmp_path / "store"


async def test_a_source_with_a_false_header_is_refused(tmp_path: Path, source: FakeSource) -> None:
    shard = tmp_path / "model" / "model-0.safetensors"
    data = bytearray(shard.read_bytes())
    data[:8] = struct.pack("<Q", 2**40)
    shard.write_bytes(data)
    store = make_store(tmp_path / "store", {"a": source})
    with pytest.raises((ModelError, Unavailable), match="header"):
        await store.stage("m", (0, 4), ["a"])


def test_cutting() -> None:
    pieces = list(cut("f", 5, 2 * PIECE_BYTES + 1, 100))
    assert [piece.length for piece in pieces] == [PIECE_BYTES, PIECE_BYTES, 1]
    assert [piece.offset for piece in pieces] == [5, 5 + PIECE_BYTES, 5 + 2 * PIECE_BYTES]
    assert [piece.target for piece in pieces] == [100, 100 + PIECE_BYTES, 100 + 2 * PIECE_BYTES]


# --- sources that lie ---


class Liar(FakeSource):
    """Claims other files, or other bytes, than it has."""

    def __init__(self, library: Library) -> None:
        super().__init__(library)
        self.claimed: dict[str, int] = {}
        self.data: dict[str, bytes] = {}
        self.version = 0

    async def files(self, model: str) -> Sequence[FileEntry]:
        held = {entry.name: entry.size for entry in self.library.files(model)}
        sizes = {**held, **{name: len(data) for name, data in self.data.items()}, **self.claimed}
        return [
            FileEntry(name=name, size=size, digest=str(self.version))
            for name, size in sizes.items()
        ]

    async def read(self, model: str, piece: FilePiece) -> bytes:
        if piece.file in self.data:
            self.reads += 1
            return self.data[piece.file][piece.offset : piece.offset + piece.length]
        return await super().read(model, piece)

    def weights(self, dtype: str, extent: int, element: int) -> None:
        """Have every tensor claim ``[extent]`` of ``dtype``."""
        from molink.checkpoint.config import ModelConfig

        folder = self.library.get("m").folder
        header: dict[str, object] = {}
        end = 0
        for name in stage_tensors(ModelConfig.load(folder), 0, 4):
            offsets = [end, end + extent * element]
            header[name] = {"dtype": dtype, "shape": [extent], "data_offsets": offsets}
            end += extent * element
        text = json.dumps(header).encode()
        self.data["model-0.safetensors"] = struct.pack("<Q", len(text)) + text
        self.claimed["model-0.safetensors"] = 8 + len(text) + end


@pytest.fixture
def liar(source: FakeSource) -> Liar:
    return Liar(source.library)


def left_behind(root: Path) -> list[str]:
    return sorted(path.name for path in root.rglob("*"))


@pytest.mark.parametrize(("dtype", "element"), [("U8", 1), ("F32", 4)])
async def test_sizes_follow_from_the_config(
    tmp_path: Path, liar: Liar, dtype: str, element: int
) -> None:
    (tmp_path / "model" / "model-1.safetensors").unlink()
    liar.library.add("m", tmp_path / "model")
    liar.weights(dtype, 2**45, element)
    store = make_store(tmp_path / "store", {"a": liar})
    # 2**45 bytes in pieces of 192 KiB: planning them would need tens of gigabytes.
    with pytest.raises(Unavailable, match=r"tensor .* is \w+ \[35184372088832\], not \["):
        await store.stage("m", (0, 4), ["a"])
    assert left_behind(tmp_path / "store") == []


def test_a_plan_of_a_huge_group_is_small() -> None:
    extent = 1 << 20
    span = TensorSpan("f", "F32", (extent, extent), 8, 4 * extent * extent)
    plan = plan_group("embed", {"t": (extent, extent)}, {"t": span})
    assert plan.nbytes > 2**42
    pieces = plan.pieces()
    first, second = next(pieces), next(pieces)
    assert (first.offset, first.target) == (8, len(plan.header))
    assert second.target == first.target + PIECE_BYTES


@pytest.mark.parametrize("field", ["vocab_size", "hidden_size", "intermediate_size"])
async def test_a_config_of_absurd_size(tmp_path: Path, liar: Liar, field: str) -> None:
    config = {**CONFIG, "head_dim": 4, field: 2**31 - 1}
    liar.data["config.json"] = json.dumps(config).encode()
    store = make_store(tmp_path / "store", {"a": liar})
    with pytest.raises(Unavailable, match=f"{field} has to be at most"):
        await store.stage("m", (0, 4), ["a"])
    assert left_behind(tmp_path / "store") == []


async def test_layers_that_the_model_has_not(tmp_path: Path, source: FakeSource) -> None:
    store = make_store(tmp_path / "store", {"a": source})
    with pytest.raises(Unavailable, match="has layers 0:4, not 2:2000000000"):
        await store.stage("m", (2, 2_000_000_000), ["a"])


@pytest.mark.parametrize(
    ("name", "size"),
    [("tokenizer.json", (64 << 20) + 1), ("config.json", (16 << 20) + 1)],
)
async def test_metadata_is_bounded(tmp_path: Path, liar: Liar, name: str, size: int) -> None:
    liar.claimed[name] = size
    store = make_store(tmp_path / "store", {"a": liar})
    with pytest.raises(Unavailable, match=f"{name} of m has {size} bytes"):
        await store.metadata("m", ["a"])
    assert liar.reads == 0
    assert left_behind(tmp_path / "store") == []


async def test_the_disk_is_checked_for_metadata_too(
    tmp_path: Path, source: FakeSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "RESERVE_BYTES", 1 << 62)
    store = make_store(tmp_path / "store", {"a": source})
    with pytest.raises(Unavailable, match="free"):
        await store.metadata("m", ["a"])
    assert source.reads == 0


async def test_too_many_files(tmp_path: Path, liar: Liar) -> None:
    liar.claimed |= {f"{number}.safetensors": 1 for number in range(5000)}
    store = make_store(tmp_path / "store", {"a": liar})
    with pytest.raises(Unavailable, match="lists 5005 files"):
        await store.metadata("m", ["a"])


async def test_headers_are_bounded_together(
    tmp_path: Path, liar: Liar, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = [
        struct.unpack("<Q", path.read_bytes()[:8])[0]
        for path in (tmp_path / "model").glob("*.safetensors")
    ]
    monkeypatch.setattr(store_module, "MAX_HEADER_BYTES", sum(lengths) - 1)
    store = make_store(tmp_path / "store", {"a": liar})
    with pytest.raises(Unavailable, match="no valid header"):
        await store.stage("m", (0, 4), ["a"])
    monkeypatch.setattr(store_module, "MAX_HEADER_BYTES", sum(lengths))
    ModelFolder.open(await store.stage("m", (0, 4), ["a"]))


async def test_a_short_answer_is_the_sources_fault(tmp_path: Path, liar: Liar) -> None:
    liar.data["model-0.safetensors"] = b"abc"
    liar.claimed["model-0.safetensors"] = 1000
    store = make_store(tmp_path / "store", {"a": liar})
    with pytest.raises(Unavailable, match="3 bytes came, not 8"):
        await store.stage("m", (0, 4), ["a"])


async def test_metadata_appears_whole_or_not_at_all(tmp_path: Path, source: FakeSource) -> None:
    source.break_after = 1
    store = make_store(tmp_path / "store", {"a": source})
    with pytest.raises(Unavailable, match="broke"):
        await store.metadata("m", ["a"])
    assert left_behind(tmp_path / "store") == []


async def test_a_source_that_keeps_lying_is_left_out(tmp_path: Path, liar: Liar) -> None:
    liar.data["config.json"] = b"{"
    store = make_store(tmp_path / "store", {"a": liar})
    for _ in range(2):
        with pytest.raises(Unavailable, match="not valid JSON"):
            await store.metadata("m", ["a"])
    assert left_behind(tmp_path / "store") == []
    reads = liar.reads
    with pytest.raises(Unavailable, match=r"left out for .* after 2 failures"):
        await store.metadata("m", ["a"])
    assert liar.reads == reads


async def test_a_source_that_keeps_changing_does_not_fill_the_disk(
    tmp_path: Path, liar: Liar, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each time it lets one group arrive, and then breaks off."""
    monkeypatch.setattr(store_module, "IN_FLIGHT", 1)
    store = make_store(tmp_path / "store", {"a": liar})
    used = await store.metadata("m", ["a"])
    for version in range(1, 9):
        liar.version, liar.break_after = version, liar.reads + 24
        with pytest.raises(Unavailable, match="broke"):
            await store.stage("m", (0, 4), ["a"])
    folders = list((tmp_path / "store").iterdir())
    assert used in folders
    assert len(folders) == 2 + store_module.MAX_OTHERS
    assert all(any(folder.glob("*.safetensors")) for folder in folders if folder != used)


async def test_what_a_crash_left_is_removed(tmp_path: Path, source: FakeSource) -> None:
    draft = tmp_path / "store" / ".m-0123456789abcdef.part"
    draft.mkdir(parents=True)
    (draft / "tokenizer.json").write_bytes(b"x")
    make_store(tmp_path / "store", {"a": source})
    assert left_behind(tmp_path / "store") == []


def quantized_spans(state_bytes: int) -> dict[str, TensorSpan]:
    """An nf4 weight ``[64, 64]`` as a source's header describes it."""
    name = "model.layers.0.mlp.up_proj.weight"
    parts = {
        name: ("U8", (2048, 1)),
        f"{name}.absmax": ("F32", (64,)),
        f"{name}.quant_map": ("F32", (16,)),
        f"{name}.quant_state.bitsandbytes__nf4": ("U8", (state_bytes,)),
    }
    return {
        name: TensorSpan("f", dtype, shape, 0, shape[0] * (4 if dtype == "F32" else 1))
        for name, (dtype, shape) in parts.items()
    }


def test_a_quantized_weight_is_fetched_with_what_belongs_to_it() -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    spans = quantized_spans(90)
    plan = plan_group("layer-0000", {name: (64, 64)}, spans, "nf4")
    assert plan.spans == tuple(spans.values())
    assert plan.nbytes == len(plan.header) + 2048 + 4 * 64 + 4 * 16 + 90
    with pytest.raises(MolinkError, match="is U8"):
        plan_group("layer-0000", {name: (64, 64)}, spans)
    del spans[f"{name}.absmax"]
    with pytest.raises(MolinkError, match=r"has no tensor .*absmax"):
        plan_group("layer-0000", {name: (64, 64)}, spans, "nf4")


def test_what_a_quantized_weight_takes_is_bounded() -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    with pytest.raises(MolinkError, match="quant_state"):
        plan_group("layer-0000", {name: (64, 64)}, quantized_spans(1 << 30), "nf4")
    with pytest.raises(MolinkError, match="up_proj"):
        plan_group("layer-0000", {name: (32, 64)}, quantized_spans(90), "nf4")
