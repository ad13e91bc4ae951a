"""Parses the header of GGUF files, and of models split by llama.cpp's ``gguf-split``.

Files are untrusted: every length is checked against the file's size before it is used, and the
header's memory is bounded. Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md

Of a split model, ``name-00001-of-00003.gguf`` has the metadata; the others only state their part
number (``split.*``). They are found by name, in the folder of the given file.
"""

import mmap
import re
import struct
import sys
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, Final

from molink.errors import BrokenModel, UnsupportedModel
from molink.gguf.ggml_types import TYPES_BY_NUMBER, GgmlType
from molink.gguf.metadata import GgufMetadata, MetadataValue

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
#: Maximum bytes of metadata and tensor names; large vocabularies take 20 MB.
MAX_HEADER_BYTES = 128 << 20
_MAX_KEYS = 1 << 14
#: Maximum tensors of a model.
MAX_TENSORS = 1 << 18
#: Maximum entries of a list; the largest known has half a million merges.
_MAX_LIST_ENTRIES = 1 << 22
_MAX_NAME = 256
_MAX_DIMENSIONS = 4
_MAX_ALIGNMENT = 1 << 16
#: Struct codes by GGUF type number.
_NUMBER_CODES: Final = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip
_STRING, _LIST = 8, 9


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A tensor at ``offset`` of file number ``split``; ``shape`` has rows first."""

    name: str
    ggml_type: GgmlType
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    split: int = 0


@dataclass(frozen=True, slots=True)
class GgufFile:
    """A parsed GGUF file, or all files of a split model with the first one's ``path``."""

    path: Path
    metadata: GgufMetadata
    tensors: dict[str, GgufTensor]
    split_paths: tuple[Path, ...]


def read_gguf(path: Path, split: int = 0) -> GgufFile:
    """Parse a GGUF file, which has number ``split`` among those of a model. Blocking.

    Raises:
        BrokenModel: it is truncated, inconsistent, or not a GGUF file.
        UnsupportedModel: a version or element type is not implemented.
    """
    try:
        if not path.is_file():
            raise BrokenModel(f"{path} is not a regular file; fetch it again")
        with path.open("rb") as file:
            size = file.seek(0, 2)
            if size < 24:
                raise BrokenModel(f"{path}: truncated: {size} bytes are not a GGUF file")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _parse_gguf(path, data, size, split)
    except OSError as error:
        raise BrokenModel(f"{path}: can't be read: {error.strerror or error}") from error


def _parse_gguf(path: Path, data: mmap.mmap, size: int, split: int) -> GgufFile:
    read = _HeaderReader(path, data, min(size, MAX_HEADER_BYTES), size)
    _check_version(path, read)
    tensors, keys = (
        read.read_count("tensors", MAX_TENSORS),
        read.read_count("metadata keys", _MAX_KEYS),
    )
    values: dict[str, MetadataValue] = {}
    for _ in range(keys):
        read.where = "its metadata"
        name = read.read_string(_MAX_NAME)
        read.where = f"metadata {name!r}"
        if name in values:
            raise BrokenModel(f"{path}: {read.where} appears twice")
        values[name] = read.read_value()
    metadata = GgufMetadata(values, str(path))
    found = [_read_tensor(read) for _ in range(tensors)]
    alignment = metadata.get_integer("general.alignment", 32, _MAX_ALIGNMENT)
    if alignment & (alignment - 1):
        raise BrokenModel(f"{path}: general.alignment {alignment} is not a power of two")
    base = -(-read.at // alignment) * alignment
    placed = _place_tensors(path, found, base, alignment, size)
    numbered = {name: replace(tensor, split=split) for name, tensor in placed.items()}
    return GgufFile(path, metadata, numbered, (path,))


def _check_version(path: Path, read: "_HeaderReader") -> None:
    magic = read.read_bytes(4)
    if magic == b"vers":
        raise BrokenModel(f"{path} is a git-lfs pointer, not the file itself: run `git lfs pull`")
    if magic != _MAGIC:
        raise BrokenModel(f"{path} is not a GGUF file: it doesn't begin with 'GGUF'")
    (version,) = read.read_numbers("I")
    if version in _VERSIONS:
        return
    if int.from_bytes(version.to_bytes(4, "little"), "big") in _VERSIONS:
        raise UnsupportedModel(f"{path}: big-endian GGUF files are not supported")
    raise UnsupportedModel(f"{path}: GGUF version {version} is not supported (2 and 3 are)")


class _HeaderReader:
    """Reads a header sequentially; ``where`` names the current part in errors."""

    def __init__(self, path: Path, data: mmap.mmap, end: int, size: int) -> None:
        self._path, self._data, self._end, self._size = path, data, end, size
        self.at = 0
        self.where = "its header"

    def read_bytes(self, nbytes: int) -> bytes:
        """Read bytes."""
        begin = self._advance(nbytes)
        return self._data[begin : self.at]

    def read_numbers(self, code: str, count: int = 1) -> tuple[Any, ...]:
        """Read numbers of a struct code."""
        form = f"<{count}{code}"
        return struct.unpack_from(form, self._data, self._advance(struct.calcsize(form)))

    def read_count(self, what: str, maximum: int) -> int:
        """Read the number of following items."""
        (count,) = self.read_numbers("Q")
        if count > maximum:
            raise BrokenModel(f"{self._path}: it claims {count} {what} (at most {maximum})")
        return int(count)

    def read_string(self, maximum: int = MAX_HEADER_BYTES) -> str:
        """Read a string of at most ``maximum`` bytes."""
        (length,) = self.read_numbers("Q")
        if length > maximum:
            raise BrokenModel(
                f"{self._path}: {self.where}: a text of {length} bytes (at most {maximum})"
            )
        try:
            return self.read_bytes(length).decode("utf-8")
        except UnicodeDecodeError as error:
            raise BrokenModel(f"{self._path}: {self.where}: a text is not UTF-8: {error}") from None

    def read_value(self) -> MetadataValue:
        """Read a type number and a value of that type."""
        (number,) = self.read_numbers("I")
        if number != _LIST:
            return self._read_scalar(number)
        (inner,) = self.read_numbers("I")
        (length,) = self.read_numbers("Q")
        if length > _MAX_LIST_ENTRIES:
            raise BrokenModel(
                f"{self._path}: {self.where}: a list of {length} entries (at most "
                f"{_MAX_LIST_ENTRIES})"
            )
        if inner == _STRING:
            self._check_end(8 * length)
            return [self.read_string() for _ in range(length)]
        # Arrays keep the file's element size, to save memory; booleans become numbers.
        numbers: array[Any] = array(self._number_code(inner).replace("?", "B"))
        numbers.frombytes(self.read_bytes(length * numbers.itemsize))
        if sys.byteorder == "big":
            numbers.byteswap()
        return numbers

    def _read_scalar(self, number: int) -> MetadataValue:
        if number == _STRING:
            return self.read_string()
        value: MetadataValue = self.read_numbers(self._number_code(number))[0]
        return value

    def _number_code(self, number: int) -> str:
        if number not in _NUMBER_CODES:
            kind = "lists in lists" if number == _LIST else f"type {number}"
            raise BrokenModel(f"{self._path}: {self.where}: {kind} is not supported")
        return _NUMBER_CODES[number]

    def _advance(self, nbytes: int) -> int:
        self._check_end(nbytes)
        begin, self.at = self.at, self.at + nbytes
        return begin

    def _check_end(self, nbytes: int) -> None:
        if nbytes <= self._end - self.at:
            return
        if self._end < self._size:
            raise BrokenModel(f"{self._path}: its header has over {MAX_HEADER_BYTES} bytes")
        raise BrokenModel(
            f"{self._path}: truncated in {self.where}: it wants {nbytes} bytes at {self.at}, but "
            f"the file has {self._size}; fetch it again"
        )


def _read_tensor(read: _HeaderReader) -> GgufTensor:
    """Read an entry; its offset is still relative to the tensor data."""
    read.where = "its list of tensors"
    name = read.read_string(_MAX_NAME)
    if not name.isprintable():
        raise BrokenModel(f"{read._path}: a tensor has the name {name!r}")
    read.where = f"tensor {name}"
    where = f"{read._path}: {read.where}"
    (dimensions,) = read.read_numbers("I")
    if not 0 < dimensions <= _MAX_DIMENSIONS:
        raise BrokenModel(f"{where}: {dimensions} dimensions (at most {_MAX_DIMENSIONS})")
    shape = tuple(reversed(read.read_numbers("Q", dimensions)))
    (number,) = read.read_numbers("I")
    (offset,) = read.read_numbers("Q")
    kind = TYPES_BY_NUMBER.get(number)
    if kind is None:
        known = ", ".join(each.name.upper() for each in TYPES_BY_NUMBER.values())
        raise UnsupportedModel(
            f"{where}: its element type {_type_name(number)} is not supported; take a file whose "
            f"weights are {known}"
        )
    row = kind.row_bytes(shape[-1])
    if row is None or not all(shape):
        raise BrokenModel(f"{where}: shape {list(shape)} doesn't consist of blocks of {kind.name}")
    return GgufTensor(name, kind, shape, offset, prod(shape[:-1]) * row)


def _type_name(number: int) -> str:
    from gguf import GGMLQuantizationType

    try:
        return f"{number} ({GGMLQuantizationType(number).name})"
    except ValueError:
        return str(number)


def _place_tensors(
    path: Path, found: list[GgufTensor], base: int, alignment: int, size: int
) -> dict[str, GgufTensor]:
    placed: dict[str, GgufTensor] = {}
    end, before = base, ""
    for tensor in sorted(found, key=lambda each: each.offset):
        where = f"{path}: tensor {tensor.name}"
        offset = base + tensor.offset
        if tensor.name in placed:
            raise BrokenModel(f"{where} appears twice")
        if tensor.offset % alignment:
            raise BrokenModel(f"{where}: offset {tensor.offset} is not a multiple of {alignment}")
        if offset + tensor.nbytes > size:
            raise BrokenModel(
                f"{where}: ends at byte {offset + tensor.nbytes}, but the file has {size}: it is "
                "truncated; fetch it again"
            )
        if offset < end:
            raise BrokenModel(f"{path}: tensors {before} and {tensor.name} overlap")
        end, before = offset + tensor.nbytes, tensor.name
        placed[tensor.name] = GgufTensor(
            tensor.name, tensor.ggml_type, tensor.shape, offset, tensor.nbytes
        )
    return placed


_SPLIT_PATTERN = re.compile(r"(.+)-(\d{5})-of-(\d{5})(\.gguf)", re.IGNORECASE)
#: Marks the names of vision towers' files, which may end with a type; the best comes first.
_MMPROJ_PATTERN = re.compile(r"[-._]?mmproj[-._]?", re.IGNORECASE)
_KINDS = ("bf16", "f16", "f32", "q8_0")
_KIND_PATTERN = re.compile(rf"(?:^|[-._])({'|'.join(_KINDS)})$", re.IGNORECASE)
_NUMBER, _COUNT, _TENSORS = "split.no", "split.count", "split.tensors.count"


def model_name(file: str) -> str:
    """Model name of a GGUF file: its name without split number and suffix."""
    match = _SPLIT_PATTERN.fullmatch(file)
    return match[1] if match else Path(file).stem


def split_names(file: str) -> tuple[str, ...]:
    """Names of all files of a model, derived from one of them."""
    match = _SPLIT_PATTERN.fullmatch(file)
    if match is None or not 0 < int(match[2]) <= int(match[3]):
        return (file,)
    count = int(match[3])
    return tuple(f"{match[1]}-{i:05}-of-{count:05}{match[4]}" for i in range(1, count + 1))


def find_first_splits(names: Iterable[str]) -> list[str]:
    """Return each model's first file among GGUF files ``names``, without ``mmproj`` (vision)."""
    models = [name for name in names if not _is_mmproj(name)]
    return [*dict.fromkeys(split_names(name)[0] for name in sorted(models))]


def find_mmproj(model: str, names: Iterable[str]) -> str | None:
    """Return the name of the vision tower's file of the GGUF file ``model`` among ``names``.

    It lies in the same folder and has the model's name or none (``mmproj-F16.gguf``), unless the
    folder has no other model. Of several, bf16 comes before f16, f32 and 8 bits.
    """
    folder, _, file = model.rpartition("/")
    ggufs = [name for name in names if name.lower().endswith(".gguf")]
    beside = [name for name in ggufs if name.rpartition("/")[0] == folder]
    is_only = len(find_first_splits(beside)) == 1
    found = []
    for name in filter(_is_mmproj, beside):
        stem = _MMPROJ_PATTERN.sub("-", Path(name).stem).strip("-")
        kind = _KIND_PATTERN.search(stem)
        of = stem[: kind.start()] if kind else stem
        is_own = of not in ("", "model") and file.lower().startswith(of.lower())
        if is_own or is_only or of in ("", "model"):
            found.append((not is_own, _KINDS.index(kind[1].lower()) if kind else 0, name))
    return min(found)[2] if found else None


def _is_mmproj(name: str) -> bool:
    return _MMPROJ_PATTERN.search(name.rpartition("/")[2]) is not None


def find_splits(path: Path) -> tuple[Path, ...]:
    """Paths of all files of the model that ``path`` belongs to.

    Raises:
        BrokenModel: a file is missing.
    """
    found = tuple(path.with_name(name) for name in split_names(path.name))
    missing = [part for part in found if not part.exists()]
    if len(found) > 1 and missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise BrokenModel(
            f"{path.name} is one of {len(found)} parts of a model, but {missing[0].name}{more} "
            f"isn't in its folder {path.parent}: put all parts into one folder"
        )
    return found


def read_split_gguf(path: Path) -> GgufFile:
    """Parse all files of the model that ``path`` belongs to. Blocking.

    Raises:
        BrokenModel: a file is missing, broken, or of another model.
        UnsupportedModel: a version or element type is not implemented.
    """
    paths = find_splits(path)
    files = [read_gguf(part, index) for index, part in enumerate(paths)]
    first, count = files[0], len(files)
    for index, file in enumerate(files):
        _check_split(file, index, count)
        _refuse_other_model(first, file)
    if count == 1:
        return first
    tensors: dict[str, GgufTensor] = {}
    for file in files:
        for tensor in file.tensors.values():
            if tensor.name in tensors:
                other = paths[tensors[tensor.name].split].name
                raise BrokenModel(f"{file.path}: tensor {tensor.name} is in {other} too")
            tensors[tensor.name] = tensor
    wanted = first.metadata.get_integer(_TENSORS, maximum=MAX_TENSORS)
    if len(tensors) != wanted:
        raise BrokenModel(
            f"{first.path}: metadata {_TENSORS} is {wanted}, but its {count} parts have "
            f"{len(tensors)} tensors: one of them belongs to another model"
        )
    return GgufFile(first.path, first.metadata, tensors, paths)


def _check_split(file: GgufFile, index: int, count: int) -> None:
    """Check that a file's split number matches its name."""
    said = file.metadata.get_index(_COUNT) or 1
    number = file.metadata.get_index(_NUMBER) or 0
    if (said, number) == (count, index):
        return
    if count == 1:
        raise BrokenModel(
            f"{file.path} is part {number + 1} of {said} of a model, but its name doesn't say so: "
            f"the parts are found by names such as NAME-{number + 1:05}-of-{said:05}.gguf"
        )
    raise BrokenModel(
        f"{file.path} says that it is part {number + 1} of {said} ({_NUMBER}, {_COUNT}), unlike "
        "its name"
    )


def _refuse_other_model(first: GgufFile, file: GgufFile) -> None:
    """Check that repeated metadata are equal."""
    if file is first:
        return
    other = file.metadata.find_difference(first.metadata, besides=_NUMBER)
    if other is not None:
        raise BrokenModel(
            f"{file.path} belongs to another model than {first.path.name}: their metadata {other} "
            "differ"
        )
