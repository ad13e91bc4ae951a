"""Model files that this PC offers to other peers.

A model's readable parts are fixed when it is added: the metadata files and tensors of its folder. A
request names one of them, so a peer can't choose a path, and links out of the folder are rejected.
Each chunk is verified before it is sent, so changed files are never passed on.
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
from molinkd.peer.artifacts.transfers import Progress

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """One model's folder, its manifest, and the location of each part on disk."""

    folder: Path
    manifest: Manifest
    ranges: dict[str, ByteRange] = field(repr=False)
    #: Stamps of the files at hashing time.
    stamps: dict[Path, FileStamp] = field(repr=False)

    def find_changed(self) -> list[Path]:
        """Files whose stamp has changed since hashing. Blocks."""
        return [path for path, stamp in self.stamps.items() if file_stamp(path) != stamp]

    def verify_files(self) -> None:
        """Verify the files whose stamp has changed. Blocks.

        Raises:
            BrokenModel: A file has changed.
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
        """A verified chunk of the part ``name``. Blocks.

        Raises:
            RequestError: There is no such chunk.
            ModelNotFound: This PC does not have the part.
            BrokenModel: The file has changed since it was added.
        """
        part, place = self.manifest.find_entry(name), self.ranges.get(name)
        if part is None:
            raise RequestError(f"the model has no part {name!r}", "part")
        if place is None:
            raise ModelNotFound(f"this peer does not have {name} of that model")
        if not 0 <= index < part.chunk_count:
            raise RequestError(f"{name} has {part.chunk_count} chunks, no number {index}", "index")
        return self._read_verified(part, place, index)

    def _read_verified(self, part: ManifestEntry, place: ByteRange, index: int) -> bytes:
        if isinstance(part, ShardEntry) and self.stamps.get(place.path) != file_stamp(place.path):
            raise BrokenModel(changed_text(place.path))  # a shard's chunks have no digests
        try:
            with place.path.open("rb") as stream:
                stream.seek(place.offset + index * CHUNK_BYTES)
                data = stream.read(part.chunk_length(index))
        except OSError as error:
            raise BrokenModel(f"{place.path}: can't read it: {error}") from error
        try:
            part.verify_chunk(index, data)
        except AlteredModel as error:
            raise BrokenModel(changed_text(place.path)) from error
        return data


class ModelRepository:
    """The models that this peer offers to others."""

    def __init__(self, hasher: Hasher | None = None) -> None:
        self._hasher = hasher or Hasher()
        self._models: dict[str, ModelFiles] = {}
        #: Complete replicas in the store, by root: model name and files.
        self._replicas: dict[str, tuple[str, ModelFiles]] = {}
        #: Everything in the store, by root, complete or not.
        self._partial_models: Mapping[str, ModelFiles] = {}

    def add_model(
        self,
        name: str,
        folder: Path,
        progress: Progress | None = None,
        stop: threading.Event | None = None,
    ) -> ModelFiles:
        """Offer the model in ``folder`` as ``name``. Hashes files that are not in the cache.

        Raises:
            BrokenModel: The folder can't be read, or contains a link out of it.
            Unavailable: ``stop`` was set.
        """
        model_files = _scan_folder(
            folder, self._hasher, progress or Progress(), stop or threading.Event()
        )
        self._models[name] = model_files
        return model_files

    def add_replica(self, name: str, copy: ModelFiles) -> None:
        """Offer a complete replica of ``name``."""
        self._replicas[copy.manifest.root] = name, copy

    def remove_replica(self, root: str) -> None:
        """Withdraw a replica that is no longer complete."""
        self._replicas.pop(root, None)

    def set_partial_models(self, parts: Mapping[str, ModelFiles]) -> None:
        """Replace the offered contents of the store."""
        self._partial_models = parts

    def add_partial_model(self, part: ModelFiles) -> None:
        """Offer one more model of the store."""
        self._partial_models = {**self._partial_models, part.manifest.root: part}

    def get_model(self, name: str) -> ModelFiles | None:
        """The model ``name``, if this PC provides it."""
        return self._models.get(name)

    def find_by_root(self, root: str) -> ModelFiles | None:
        """The model with that manifest root, if this PC provides it."""
        return next((one for one in self._models.values() if one.manifest.root == root), None)

    @property
    def model_names(self) -> tuple[str, ...]:
        """Models of which this PC has all files."""
        return tuple(sorted({*self._models, *(name for name, _ in self._replicas.values())}))

    def require_model(self, root: str) -> ModelFiles:
        """The files of the model with that root: provided, replicated or partial.

        Raises:
            ModelNotFound: This PC has none.
        """
        model_files = self.find_by_root(root)
        if model_files is None and root in self._replicas:
            return self._replicas[root][1]
        model_files = model_files or self._partial_models.get(root)
        if model_files is None:
            raise ModelNotFound("this peer does not have that version of the model")
        return model_files


def changed_text(path: Path) -> str:
    """The error message for a changed file."""
    return (
        f"{path} has changed since molink read it. Restart molink on that PC to serve the model "
        "as it is now, or restore the old file"
    )


def folder_name(model: str, root: str) -> str:
    """A folder name for a model that every file system accepts.

    Names come from other peers, so only plain characters are kept; the root keeps names unique.
    """
    return f"{make_plain_name(model, 'model')}-{root[:16]}"


def make_change_watcher(
    repository: ModelRepository, report: Callable[[str], None]
) -> Callable[[], None]:
    """A function that reports each changed file once. It blocks."""
    reported: set[Path] = set()

    def look() -> None:
        for name in repository.model_names:
            model_files = repository.get_model(name)
            for path in model_files.find_changed() if model_files is not None else ():
                if path not in reported:
                    reported.add(path)
                    report(changed_text(path))

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
        raise BrokenModel(f"{folder}: can't read it: {error}") from error
    return ModelFiles(folder, Manifest.build_hashed(files, parts), places, stamps)


def _tensor_part(name: str, span: TensorSpan, digests: bytes) -> HashedEntry:
    return HashedEntry(name, span.nbytes, digests, span.dtype, span.shape)


def _refuse_stray_link(path: Path, folder: Path) -> None:
    """Reject links out of the model's folder, except to the blobs of a hub snapshot."""
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
    """The stamp of a file; ``None`` if it can't be read."""
    try:
        return FileStamp.of_path(path)
    except OSError:
        return None
