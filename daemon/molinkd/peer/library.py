"""Models of which this PC holds every file, and reading from them for other peers.

What a peer may read is decided when a model is added: plain files of its folder that are metadata
or safetensors. A request names one of them or is refused, so no path of a stranger's choosing is
ever opened.
"""

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from molink.checkpoint.folder import METADATA_FILES
from molink.errors import BrokenModel, ModelNotFound, RequestError
from molink.files import plain_name
from molink.wire.messages.transfer import FileEntry

PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*\Z")
MAX_FILES = 4096
#: How much of a file its digest samples: this many bytes at each of so many places.
_SAMPLE_BYTES = 4096
_SAMPLES = 64


@dataclass(frozen=True, slots=True)
class Holding:
    """One model: its folder and the files that may be read, by name."""

    folder: Path
    files: dict[str, FileEntry]

    @property
    def identity(self) -> str:
        """The same for two copies with the same content."""
        return listing_identity(self.files.values())


class Library:
    """The models that this peer serves to others."""

    def __init__(self) -> None:
        self._models: dict[str, Holding] = {}

    def add(self, name: str, folder: Path) -> Holding:
        """Serve the model in ``folder`` as ``name``. Reads samples of every file.

        Raises:
            BrokenModel: the folder can't be read, or holds more files than a model does.
        """
        holding = hold(folder)
        self._models[name] = holding
        return holding

    def get(self, name: str) -> Holding | None:
        """The model of that name, if it is here."""
        return self._models.get(name)

    @property
    def names(self) -> tuple[str, ...]:
        """All models here."""
        return tuple(sorted(self._models))

    def files(self, model: str) -> tuple[FileEntry, ...]:
        """The files of a model.

        Raises:
            ModelNotFound: it isn't here.
        """
        return tuple(self._holding(model).files.values())

    def read(self, model: str, file: str, offset: int, length: int) -> bytes:
        """Bytes of a file; blocks on the disk.

        Raises:
            ModelNotFound: the model isn't here.
            RequestError: no such file, or the range isn't inside it.
            BrokenModel: the file has changed since it was added.
        """
        holding = self._holding(model)
        entry = holding.files.get(file)
        if entry is None:
            raise RequestError(f"{model} has no file {file!r}", "file")
        if offset + length > entry.size:
            raise RequestError(f"{file} has {entry.size} bytes, no {length} at {offset}", "offset")
        try:
            with (holding.folder / entry.name).open("rb") as stream:
                stream.seek(offset)
                data = stream.read(length)
        except OSError as error:
            raise BrokenModel(f"{holding.folder / file}: can't be read: {error}") from error
        if len(data) != length:
            raise BrokenModel(f"{holding.folder / file} has become shorter since it was added")
        return data

    def _holding(self, model: str) -> Holding:
        holding = self._models.get(model)
        if holding is None:
            raise ModelNotFound(f"this peer doesn't hold {model!r}")
        return holding


def hold(folder: Path) -> Holding:
    """List the files of a model folder that others may read.

    Raises:
        BrokenModel: the folder can't be read, or holds more files than a model does.
    """
    try:
        found = sorted(path for path in folder.iterdir() if _wanted(path))
        if len(found) > MAX_FILES:
            raise BrokenModel(f"{folder} holds {len(found)} files; a model has fewer")
        files = {path.name: _entry(path) for path in found}
    except OSError as error:
        raise BrokenModel(f"{folder}: can't be read: {error}") from error
    return Holding(folder, files)


def listing_identity(files: Iterable[FileEntry]) -> str:
    """A short name for the content of a listing."""
    digest = hashlib.blake2b(digest_size=8)
    for entry in sorted(files, key=lambda entry: entry.name):
        digest.update(f"{entry.name}\0{entry.size}\0{entry.digest}\n".encode())
    return digest.hexdigest()


def folder_name(model: str, identity: str) -> str:
    """A name for the folder of a model that any file system takes.

    Names come from other peers: only plain characters are kept, and the identity tells apart what
    this makes equal.
    """
    return f"{plain_name(model, 'model')}-{identity}"


def _wanted(path: Path) -> bool:
    named = path.name in METADATA_FILES or path.suffix == ".safetensors"
    return named and PLAIN_NAME.match(path.name) is not None and path.is_file()


def _entry(path: Path) -> FileEntry:
    size = path.stat().st_size
    return FileEntry(name=path.name, size=size, digest=_digest(path, size))


def _digest(path: Path, size: int) -> str:
    """A hash of samples spread over the file: two trainings of a model differ everywhere."""
    digest = hashlib.blake2b(digest_size=16)
    step = max(_SAMPLE_BYTES, size // _SAMPLES)
    with path.open("rb") as file:
        for offset in range(0, size, step):
            file.seek(offset)
            digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()
