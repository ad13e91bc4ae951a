"""Layout of a fetched model on disk: manifest, metadata, and one file per group of tensors."""

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
from molink.checkpoint.config_fields import MAX_JSON_BYTES
from molink.checkpoint.manifest import HashedEntry, Manifest, ShardEntry, manifest_root
from molink.checkpoint.model_folder import METADATA_FILES, REQUIRED_FILES
from molink.errors import AlteredModel, BrokenModel, ModelError, MolinkError, Unavailable
from molink.facts.layer_range import format_ranges
from molink.facts.model import LayerRange
from molink.files import resolve_inside, retry_while_busy
from molink.swarm.artifacts.fetch_plan import GroupPlan, plan_files, split_part
from molink.swarm.artifacts.replication import to_ranges
from molinkd.peer.artifacts.hashing import ByteRange, FileStamp, hash_ranges
from molinkd.peer.artifacts.model_repository import ModelFiles, file_stamp
from molinkd.peer.artifacts.transfers import Progress

log = logging.getLogger(__name__)

#: Maximum sizes of ``tokenizer.json`` and of each other metadata file, in bytes.
MAX_TOKENIZER_BYTES = MAX_JSON_BYTES
MAX_METADATA_BYTES = 16 << 20
#: Bytes per read when hashing a shard.
_READ_BYTES = 4 << 20
#: Suffix of replication's partial files.
REPLICA_SUFFIX = "copy"
#: File name of the manifest.
MANIFEST_FILE = "manifest.molink"
#: File name of the list of verified shards.
VERIFIED_SHARDS_FILE = ".shards"


def read_stored_manifest(folder: Path, root: str) -> Manifest | None:
    """The manifest of a stored model; ``None`` if it is missing or altered."""
    try:
        return Manifest.open((folder / MANIFEST_FILE).read_bytes(), root)
    except FileNotFoundError:
        return None
    except (OSError, AlteredModel) as error:
        log.warning("%s: %s: fetching it again", folder / MANIFEST_FILE, error)
        return None


def load_verified_shards(folder: Path) -> dict[str, FileStamp]:
    """Stamps of verified shards by name; only these are offered to peers."""
    try:
        return msgspec.json.decode(
            (folder / VERIFIED_SHARDS_FILE).read_bytes(), type=dict[str, FileStamp]
        )
    except (OSError, msgspec.MsgspecError):
        return {}


def record_verified_shard(folder: Path, shard: str, stamp: FileStamp) -> None:
    """Record a verified shard; raises ``OSError``."""
    draft = folder / f"{VERIFIED_SHARDS_FILE}.new"
    draft.write_bytes(msgspec.json.encode({**load_verified_shards(folder), shard: stamp}))
    retry_while_busy(lambda: draft.replace(folder / VERIFIED_SHARDS_FILE))


def metadata_parts(model: str, manifest: Manifest) -> list[HashedEntry]:
    """All files of a model except weights."""
    missing = [name for name in REQUIRED_FILES if name not in manifest.files]
    if missing:
        raise BrokenModel(f"the provider of {model} has no {missing[0]}")
    parts = [manifest.files[name] for name in METADATA_FILES if name in manifest.files]
    for part in parts:
        maximum = MAX_TOKENIZER_BYTES if part.name == "tokenizer.json" else MAX_METADATA_BYTES
        if part.nbytes > maximum:
            raise BrokenModel(
                f"{part.name} of {model} has {part.nbytes} bytes, more than {maximum}"
            )
    return parts


def altered_parts(
    folder: Path, manifest: Manifest, parts: Iterable[HashedEntry]
) -> list[HashedEntry]:
    """Stored metadata files that are missing or altered; restores the manifest's own file."""
    if not _has_root(folder / MANIFEST_FILE, manifest.root):
        (folder / MANIFEST_FILE).write_bytes(manifest.raw)
    found = []
    for part in parts:
        try:
            data = (folder / part.name).read_bytes()
            if len(data) != part.nbytes:
                raise AlteredModel("it has a different size")
            for run in split_part(part):
                part.verify_chunk(run.index, data[run.offset : run.offset + run.nbytes])
        except (OSError, AlteredModel):
            found.append(part)
    return found


def _has_root(path: Path, root: str) -> bool:
    try:
        return manifest_root(path.read_bytes()) == root
    except OSError:
        return False


def group_plans(folder: Path, manifest: Manifest, layers: LayerRange) -> list[GroupPlan]:
    """Files of a stage of ``layers``, one per group of tensors."""
    return plan_files(ModelConfig.load_folder(folder), manifest, *layers)


def all_plans(folder: Path, manifest: Manifest) -> list[tuple[int, GroupPlan]]:
    """All weight files, each with the first layer that needs it."""
    found: dict[str, tuple[int, GroupPlan]] = {}
    for layer, plans in enumerate(plans_by_layer(folder, manifest)):
        for plan in plans:
            found.setdefault(plan.file, (layer, plan))
    return [*found.values()]


def plans_by_layer(folder: Path, manifest: Manifest) -> list[list[GroupPlan]]:
    """For each layer, the files of a one-layer stage."""
    config = ModelConfig.load_folder(folder)
    return [plan_files(config, manifest, layer, layer + 1) for layer in range(config.layers)]


def missing_files_text(model: str, files: Iterable[str]) -> str:
    """The error message for missing files."""
    names = [file.partition(".")[0] for file in files]
    of_layers = [name for name in names if name.startswith(("layer-", "adapters-"))]
    layers = {int(name.rpartition("-")[2]) for name in of_layers}
    texts = [f"layers {format_ranges(to_ranges(layers))}"] if layers else []
    texts += [name for name in names if name not in of_layers]
    return (
        f"no connected PC has the files of {' and '.join(texts)} of {model}. Start a PC that "
        f"has them, or provide {model} again (`molink run`)"
    )


def remove_replica_partials(folder: Path) -> None:
    """Remove partial files of replication that a crash left."""
    for draft in folder.glob(f".*.{REPLICA_SUFFIX}"):
        draft.unlink(missing_ok=True)


def stored_files(
    model: str, folder: Path, manifest: Manifest, plans: Iterable[GroupPlan]
) -> ModelFiles:
    """A stored model's files, ready to be offered.

    Raises:
        OSError: A file has disappeared.
    """
    places = {
        part.name: ByteRange(folder / part.name, 0, part.nbytes)
        for part in metadata_parts(model, manifest)
    }
    for plan in plans:
        for part, offset in plan.part_offsets():
            places[part.name] = ByteRange(folder / plan.file, offset, part.nbytes)
    stamps = {path: FileStamp.of_path(path) for path in {place.path for place in places.values()}}
    return ModelFiles(folder, manifest, places, stamps)


def link_known_files(
    folder: Path, manifest: Manifest, plans: Iterable[GroupPlan], versions: Iterable[Path]
) -> None:
    """Link files that other stored ``versions`` of a model have with the same hashes. Blocks.

    Versions with other adapters share all weights. The caller verifies the files; where a file
    system has no hard links, they are fetched.
    """
    missing = [plan for plan in plans if not (folder / plan.file).exists()]
    for version in versions if missing and not manifest.shards else ():
        try:
            raw = (version / MANIFEST_FILE).read_bytes()
            known = Manifest.open(raw, manifest_root(raw)).tensors
            for plan in missing:
                same = all(known.get(part.name) == part for part in plan.parts)
                if same and not (folder / plan.file).exists():
                    (folder / plan.file).hardlink_to(version / plan.file)
        except (OSError, MolinkError) as error:
            log.info("can't reuse files of %s: %s", version, error)


def verify_file(path: Path, plan: GroupPlan, progress: Progress, stop: threading.Event) -> None:
    """Verify a stored file against ``plan``; counts its bytes in ``progress``.

    Raises:
        OSError: It can't be read.
        AlteredModel: It differs.
        BrokenModel: It became shorter meanwhile.
        Unavailable: ``stop`` was set.
    """
    if path.stat().st_size != plan.nbytes:
        raise AlteredModel("it has a different size")
    if plan.shard is not None:
        _verify_shard(path, plan.shard, progress, stop)
        return
    with path.open("rb") as file:
        if file.read(len(plan.header)) != plan.header:
            raise AlteredModel("it has a different header")
    places = [ByteRange(path, offset, part.nbytes) for part, offset in plan.part_offsets()]
    for part, found in zip(plan.parts, hash_ranges(places, Progress(), stop), strict=True):
        if isinstance(part, HashedEntry) and found != part.digests:
            raise AlteredModel(f"tensor {part.name} was altered")
    progress.add_existing(plan.nbytes)


def _verify_shard(path: Path, shard: ShardEntry, progress: Progress, stop: threading.Event) -> None:
    """Hash a shard, reporting progress so that the coordinator does not consider it stalled."""
    found, kept = hashlib.sha256(), 0
    with path.open("rb") as file:
        while data := file.read(_READ_BYTES):
            if stop.is_set():
                raise Unavailable("hashing was cancelled")
            found.update(data)
            progress.add_existing(len(data))
            kept += len(data)
    if found.digest() != shard.sha256:
        progress.total += kept  # the whole shard is fetched again
        raise AlteredModel("it has a wrong SHA-256")


@asynccontextmanager
async def create_file(folder: Path, name: str, suffix: str = "part") -> AsyncIterator[BinaryIO]:
    """A file that gets its final name once it is complete; blocking calls run in threads.

    Of two files with different suffixes, the first to complete wins.

    Raises:
        ModelError: It is outside of ``folder``, or can't be written.
    """
    path = folder / name
    try:
        path = resolve_inside(folder, path)
        path.parent.mkdir(exist_ok=True)
    except OSError as error:
        raise ModelError(f"can't write {path}: {error}") from error
    draft = path.with_name(f".{path.name}.{suffix}")
    before = file_stamp(path)

    def finish() -> None:
        file.flush()
        os.fsync(file.fileno())

    def replace() -> None:
        if file_stamp(path) == before:
            draft.replace(path)

    try:
        with draft.open("wb") as file:
            yield file
            await asyncio.to_thread(finish)
        await asyncio.to_thread(retry_while_busy, replace)
    except OSError as error:
        raise ModelError(f"can't write {path}: {error}") from error
    finally:
        retry_while_busy(lambda: draft.unlink(missing_ok=True))
