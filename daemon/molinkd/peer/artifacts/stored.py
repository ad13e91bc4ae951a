"""A model that was fetched, on disk: its manifest, its metadata, and a file for each group."""

import asyncio
import hashlib
import logging
import os
import threading
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import BinaryIO

import msgspec

from molink.checkpoint.config import ModelConfig
from molink.checkpoint.fields import MAX_JSON_BYTES
from molink.checkpoint.folder import METADATA_FILES, REQUIRED_FILES
from molink.checkpoint.manifest import Manifest, Part, Shard, root_of
from molink.errors import AlteredModel, BrokenModel, ModelError, Unavailable
from molink.facts.model import LayerRange
from molink.files import patiently
from molink.swarm.artifacts.copying import ranges
from molink.swarm.artifacts.fetch_plan import GroupPlan, cut, plan_files
from molink.swarm.controller.holdings import range_text
from molinkd.peer.artifacts.hashing import Stamp, Stretch, hash_stretches
from molinkd.peer.artifacts.library import Holding, stamp_of
from molinkd.peer.artifacts.progress import Progress

log = logging.getLogger(__name__)

#: Bounds of ``tokenizer.json`` and of each other metadata file.
MAX_TOKENIZER_BYTES = MAX_JSON_BYTES
MAX_METADATA_BYTES = 16 << 20
#: Of a shard so much is read at a time.
_READ_BYTES = 4 << 20
#: What sets a draft of a copy apart from one that somebody waits for.
COPY = "copy"
#: The manifest of a stored model, in its folder.
MANIFEST_FILE = "manifest.molink"
#: Which of its shards were found to be right, beside it.
NOTED_FILE = ".shards"


def stored_manifest(folder: Path, root: str) -> Manifest | None:
    """That of a stored model; ``None`` if it isn't here, or was altered."""
    try:
        return Manifest.open((folder / MANIFEST_FILE).read_bytes(), root)
    except FileNotFoundError:
        return None
    except (OSError, AlteredModel) as error:
        log.warning("%s: %s: fetching it again", folder / MANIFEST_FILE, error)
        return None


def noted(folder: Path) -> dict[str, Stamp]:
    """What shards looked like when they were found to be right; others aren't passed on."""
    try:
        return msgspec.json.decode((folder / NOTED_FILE).read_bytes(), type=dict[str, Stamp])
    except (OSError, msgspec.MsgspecError):
        return {}


def note(folder: Path, shard: str, stamp: Stamp) -> None:
    """A shard with that stamp is right; raises ``OSError``."""
    draft = folder / f"{NOTED_FILE}.new"
    draft.write_bytes(msgspec.json.encode({**noted(folder), shard: stamp}))
    patiently(lambda: draft.replace(folder / NOTED_FILE))


def metadata_parts(model: str, manifest: Manifest) -> list[Part]:
    """What is to be had of a model beside weights."""
    missing = [name for name in REQUIRED_FILES if name not in manifest.files]
    if missing:
        raise BrokenModel(f"the model's owner has no {missing[0]} of {model}")
    parts = [manifest.files[name] for name in METADATA_FILES if name in manifest.files]
    for part in parts:
        maximum = MAX_TOKENIZER_BYTES if part.name == "tokenizer.json" else MAX_METADATA_BYTES
        if part.nbytes > maximum:
            raise BrokenModel(
                f"{part.name} of {model} has {part.nbytes} bytes, more than {maximum}"
            )
    return parts


def altered_parts(folder: Path, manifest: Manifest, parts: Iterable[Part]) -> list[Part]:
    """Stored metadata that is missing or isn't as it was fetched; mends the manifest's own file."""
    if not _is_same(folder / MANIFEST_FILE, manifest.root):
        (folder / MANIFEST_FILE).write_bytes(manifest.raw)
    found = []
    for part in parts:
        try:
            data = (folder / part.name).read_bytes()
            if len(data) != part.nbytes:
                raise AlteredModel("it has another size")
            for piece in cut(part):
                part.check(piece.index, data[piece.target : piece.target + piece.length])
        except (OSError, AlteredModel):
            found.append(part)
    return found


def _is_same(path: Path, root: str) -> bool:
    try:
        return root_of(path.read_bytes()) == root
    except OSError:
        return False


def group_plans(folder: Path, manifest: Manifest, layers: LayerRange) -> list[GroupPlan]:
    """The files that a stage of ``layers`` consists of, one for each group."""
    return plan_files(ModelConfig.load(folder), manifest, *layers)


def all_plans(folder: Path, manifest: Manifest) -> list[tuple[int, GroupPlan]]:
    """The files that the model consists of, each with the first layer whose stage needs it."""
    found: dict[str, tuple[int, GroupPlan]] = {}
    for layer, plans in enumerate(plans_by_layer(folder, manifest)):
        for plan in plans:
            found.setdefault(plan.file, (layer, plan))
    return [*found.values()]


def plans_by_layer(folder: Path, manifest: Manifest) -> list[list[GroupPlan]]:
    """For each layer the files that a stage with that layer alone needs."""
    config = ModelConfig.load(folder)
    return [plan_files(config, manifest, layer, layer + 1) for layer in range(config.layers)]


def nobody_has(model: str, files: Iterable[str]) -> str:
    """Which files are missing and what mends that, for a person."""
    names = [file.partition(".")[0] for file in files]
    layers = {int(name.rpartition("-")[2]) for name in names if name.startswith("layer-")}
    texts = [f"layers {range_text(ranges(layers))}"] if layers else []
    texts += [name for name in names if not name.startswith("layer-")]
    return (
        f"no PC that is here has the files of {' and '.join(texts)} of {model}. Start a PC that "
        f"has them, or bring {model} again (`molink run`)"
    )


def remove_drafts(folder: Path) -> None:
    """Remove what copies left that a crash broke off."""
    for draft in folder.glob(f".*.{COPY}"):
        draft.unlink(missing_ok=True)


def holding_of(model: str, folder: Path, manifest: Manifest, plans: Iterable[GroupPlan]) -> Holding:
    """A stored model that is whole, as others may read it.

    Raises:
        OSError: a file is not there any more.
    """
    places = {
        part.name: Stretch(folder / part.name, 0, part.nbytes)
        for part in metadata_parts(model, manifest)
    }
    for plan in plans:
        for part, offset in plan.offsets():
            places[part.name] = Stretch(folder / plan.file, offset, part.nbytes)
    stamps = {path: Stamp.of(path) for path in {place.path for place in places.values()}}
    return Holding(folder, manifest, places, stamps)


def check_file(path: Path, plan: GroupPlan, progress: Progress, stop: threading.Event) -> None:
    """Whether a stored file is what ``plan`` says; ``progress`` keeps its bytes then.

    Raises:
        OSError: it can't be read.
        AlteredModel: it isn't.
        BrokenModel: it became shorter meanwhile.
        Unavailable: ``stop`` was set.
    """
    if path.stat().st_size != plan.nbytes:
        raise AlteredModel("it has another size")
    if plan.shard is not None:
        _check_shard(path, plan.shard, progress, stop)
        return
    with path.open("rb") as file:
        if file.read(len(plan.header)) != plan.header:
            raise AlteredModel("it has another header")
    places = [Stretch(path, offset, part.nbytes) for part, offset in plan.offsets()]
    for part, found in zip(plan.parts, hash_stretches(places, Progress(), stop), strict=True):
        if isinstance(part, Part) and found != part.digests:
            raise AlteredModel(f"tensor {part.name} has other bytes")
    progress.keep(plan.nbytes)


def _check_shard(path: Path, shard: Shard, progress: Progress, stop: threading.Event) -> None:
    """As it is read it is progress: those who wait for it leave who stands still."""
    found, kept = hashlib.sha256(), 0
    with path.open("rb") as file:
        while data := file.read(_READ_BYTES):
            if stop.is_set():
                raise Unavailable("hashing was ended")
            found.update(data)
            progress.keep(len(data))
            kept += len(data)
    if found.digest() != shard.sha256:
        progress.total += kept  # all of it comes once more
        raise AlteredModel("it has another SHA-256 than the hub says")


@asynccontextmanager
async def new_file(path: Path, kind: str = "part") -> AsyncIterator[BinaryIO]:
    """A file that appears under its name once it is whole; disks are waited for in threads.

    Of two of different ``kind`` for the same place the one that is whole first stays.
    """
    draft = path.with_name(f".{path.name}.{kind}")
    before = stamp_of(path)

    def finish() -> None:
        file.flush()
        os.fsync(file.fileno())

    def replace() -> None:
        if stamp_of(path) == before:
            draft.replace(path)

    try:
        with draft.open("wb") as file:
            yield file
            await asyncio.to_thread(finish)
        await asyncio.to_thread(patiently, replace)
    except OSError as error:
        raise ModelError(f"can't write {path}: {error}") from error
    finally:
        patiently(lambda: draft.unlink(missing_ok=True))
