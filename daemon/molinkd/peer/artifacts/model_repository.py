"""Models that this PC holds, or some files of, and reading from them for other peers.

What a peer may read is decided when a model is added: the metadata files and tensors of its folder.
A request names one of them or is refused, so no path of a stranger's choosing is ever opened, and a
link that leads out of the folder is refused. Each chunk is checked before it is sent: what has
changed since is passed on to nobody.
"""

import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from molink.checkpoint.config_fields import refuse_irregular
from molink.checkpoint.manifest import CHUNK_BYTES, HashedEntry, Manifest, ManifestEntry, ShardEntry
from molink.checkpoint.model_folder import METADATA_FILES, scan_tensors
from molink.checkpoint.safetensors_header import TensorSpan
from molink.errors import AlteredModel, BrokenModel, ModelNotFound, RequestError
from molink.files import make_plain_name
from molinkd.peer.artifacts.hashing import ByteRange, FileStamp, Hasher
from molinkd.peer.artifacts.progress import Progress

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """One model: its folder, what it consists of, and where each part that is here lies."""

    folder: Path
    manifest: Manifest
    ranges: dict[str, ByteRange] = field(repr=False)
    #: What the files looked like when they were hashed.
    stamps: dict[Path, FileStamp] = field(repr=False)

    def find_changed(self) -> list[Path]:
        """Files that aren't as they were when they were hashed. Blocks on the disk."""
        return [path for path, stamp in self.stamps.items() if file_stamp(path) != stamp]

    def verify_files(self) -> None:
        """Whether the files still hold the model. Blocks; reads only those that were touched.

        Raises:
            BrokenModel: they don't; names the file.
        """
        for path in self.find_changed():
            stamp = file_stamp(path)
            for name, place in self.ranges.items():
                if place.path == path:
                    part = self.manifest.find_entry(name)
                    assert part is not None
                    for index in range(part.chunk_count):
                        self._read_verified(part, place, index)
            if stamp is not None:
                self.stamps[path] = stamp

    def read_chunk(self, name: str, index: int) -> bytes:
        """A chunk of a part; blocks on the disk.

        Raises:
            RequestError: there is no such chunk.
            ModelNotFound: the part isn't here.
            BrokenModel: the file has changed since it was added.
        """
        part, place = self.manifest.find_entry(name), self.ranges.get(name)
        if part is None:
            raise RequestError(f"the model has no part {name!r}", "part")
        if place is None:
            raise ModelNotFound(f"this peer doesn't hold {name} of that model")
        if not 0 <= index < part.chunk_count:
            raise RequestError(f"{name} has {part.chunk_count} chunks, no number {index}", "index")
        return self._read_verified(part, place, index)

    def _read_verified(self, part: ManifestEntry, place: ByteRange, index: int) -> bytes:
        if isinstance(part, ShardEntry) and self.stamps.get(place.path) != file_stamp(place.path):
            raise BrokenModel(changed_text(place.path))  # a chunk of it shows nothing
        try:
            with place.path.open("rb") as stream:
                stream.seek(place.offset + index * CHUNK_BYTES)
                data = stream.read(part.chunk_length(index))
        except OSError as error:
            raise BrokenModel(f"{place.path}: can't be read: {error}") from error
        try:
            part.verify_chunk(index, data)
        except AlteredModel as error:
            raise BrokenModel(changed_text(place.path)) from error
        return data


class ModelRepository:
    """The models that this peer serves to others."""

    def __init__(self, hasher: Hasher | None = None) -> None:
        self._hasher = hasher or Hasher()
        self._models: dict[str, ModelFiles] = {}
        #: Copies in the store that are whole, by root; with their models' names.
        self._replicas: dict[str, tuple[str, ModelFiles]] = {}
        #: What lies in the store, by root: a part of a model as well as all of it.
        self._partial_models: Mapping[str, ModelFiles] = {}

    def add_model(
        self,
        name: str,
        folder: Path,
        progress: Progress | None = None,
        stop: threading.Event | None = None,
    ) -> ModelFiles:
        """Serve the model in ``folder`` as ``name``. Hashes every file that isn't known yet.

        Raises:
            BrokenModel: the folder can't be read, or has a link that leads out of it.
            Unavailable: ``stop`` was set meanwhile.
        """
        model_files = _scan_folder(
            folder, self._hasher, progress or Progress(), stop or threading.Event()
        )
        self._models[name] = model_files
        return model_files

    def add_replica(self, name: str, copy: ModelFiles) -> None:
        """Let others read a copy of ``name`` that came from peers."""
        self._replicas[copy.manifest.root] = name, copy

    def remove_replica(self, root: str) -> None:
        """That copy isn't whole any more."""
        self._replicas.pop(root, None)

    def set_partial_models(self, parts: Mapping[str, ModelFiles]) -> None:
        """Let others read what there is of models in the store: this, and no more of others."""
        self._partial_models = parts

    def add_partial_model(self, part: ModelFiles) -> None:
        """Let others read this too, which was laid into the store now."""
        self._partial_models = {**self._partial_models, part.manifest.root: part}

    def get_model(self, name: str) -> ModelFiles | None:
        """The model of that name, if this PC has brought it."""
        return self._models.get(name)

    def find_by_root(self, root: str) -> ModelFiles | None:
        """The model with that root, if this PC has brought it."""
        return next((one for one in self._models.values() if one.manifest.root == root), None)

    @property
    def model_names(self) -> tuple[str, ...]:
        """All models of which every file is here."""
        return tuple(sorted({*self._models, *(name for name, _ in self._replicas.values())}))

    def require_model(self, root: str) -> ModelFiles:
        """The model with that root, a copy too, or as much of it as is here.

        Raises:
            ModelNotFound: it isn't here.
        """
        model_files = self.find_by_root(root)
        if model_files is None and root in self._replicas:
            return self._replicas[root][1]
        model_files = model_files or self._partial_models.get(root)
        if model_files is None:
            raise ModelNotFound("this peer doesn't hold that model, or another version of it")
        return model_files


def changed_text(path: Path) -> str:
    """What to tell of a file that has changed."""
    return (
        f"{path} has changed since molink read it. Start molink anew on that PC to serve the model "
        "as it is now, or put the old file back"
    )


def folder_name(model: str, root: str) -> str:
    """A name for the folder of a model that any file system takes.

    Names come from other peers: only plain characters are kept, and the root tells apart what this
    makes equal.
    """
    return f"{make_plain_name(model, 'model')}-{root[:16]}"


def make_change_watcher(
    repository: ModelRepository, tell: Callable[[str], None]
) -> Callable[[], None]:
    """A function that tells of each file once that it has changed. It blocks on the disk."""
    told: set[Path] = set()

    def look() -> None:
        for name in repository.model_names:
            model_files = repository.get_model(name)
            for path in model_files.find_changed() if model_files is not None else ():
                if path not in told:
                    told.add(path)
                    tell(changed_text(path))

    return look


def _scan_folder(
    folder: Path, hasher: Hasher, progress: Progress, stop: threading.Event
) -> ModelFiles:
    try:
        metadata = {name: folder / name for name in METADATA_FILES if (folder / name).exists()}
        tensors = scan_tensors(folder)
        paths = {*metadata.values(), *(folder / span.file for span in tensors.values())}
        for path in paths:
            refuse_irregular(path)
            _refuse_stray_link(path, folder)
        stamps = {path: FileStamp.of_path(path) for path in paths}
        places = {name: ByteRange(path, 0, stamps[path].size) for name, path in metadata.items()}
        progress.total = sum(place.nbytes for place in places.values())
        progress.total += sum(span.nbytes for span in tensors.values())
        files = []
        for name, place in places.items():
            digests = hasher.hash_parts(place.path, {name: place}, progress, stop)
            files.append(HashedEntry(name, place.nbytes, digests[name]))
        parts = []
        for path in sorted(paths - {*metadata.values()}):
            inside = {name: span for name, span in tensors.items() if folder / span.file == path}
            here = {name: ByteRange(path, s.offset, s.nbytes) for name, s in inside.items()}
            digests = hasher.hash_parts(path, here, progress, stop)
            parts += [_tensor_part(name, span, digests[name]) for name, span in inside.items()]
            places |= here
    except OSError as error:
        raise BrokenModel(f"{folder}: can't be read: {error}") from error
    return ModelFiles(folder, Manifest.build_hashed(files, parts), places, stamps)


def _tensor_part(name: str, span: TensorSpan, digests: bytes) -> HashedEntry:
    return HashedEntry(name, span.nbytes, digests, span.dtype, span.shape)


def _refuse_stray_link(path: Path, folder: Path) -> None:
    """Files that lie elsewhere aren't passed on, but for the blobs of a snapshot of the hub."""
    target, home = path.resolve(strict=True), folder.resolve()
    if target.is_relative_to(home):
        return
    if home.parent.name == "snapshots" and target.is_relative_to(home.parent.parent / "blobs"):
        return
    raise BrokenModel(
        f"{path} is a link to {target}, outside of the model's folder: molink passes on no files "
        "from elsewhere. Copy the file into the folder, or remove the link"
    )


def file_stamp(path: Path) -> FileStamp | None:
    """What a file looks like; ``None`` if it can't be had."""
    try:
        return FileStamp.of_path(path)
    except OSError:
        return None
