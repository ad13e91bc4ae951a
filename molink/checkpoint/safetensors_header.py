"""Parses, checks and writes safetensors headers.

A file is an 8-byte little-endian length, a JSON header of that length, and the tensors' bytes at
offsets relative to the header's end.
"""

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path, PurePath
from typing import Any, Protocol

import msgspec

from molink.checkpoint.config_fields import refuse_irregular
from molink.errors import BrokenModel

#: The format allows three times as much; the header of 73 000 tensors takes 11 MB.
MAX_HEADER_BYTES = 32 << 20
#: Bytes per element; sub-byte types are deliberately absent.
DTYPE_BYTES: dict[str, int] = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E5M2": 1, "F8_E4M3": 1, "F8_E8M0": 1,
    "I16": 2, "U16": 2, "F16": 2, "BF16": 2,
    "I32": 4, "U32": 4, "F32": 4,
    "I64": 8, "U64": 8, "F64": 8, "C64": 8,
}  # fmt: skip
_MAX_DIMENSIONS = 8
_MAX_NAME = 512
#: Maximum bytes of a tensor's entry.
_MAX_ENTRY = 1024
_LENGTH_BYTES = struct.Struct("<Q")
#: Alignment of the tensors, in bytes.
_ALIGNMENT = 8


class TensorSpec(Protocol):
    """A tensor's type and shape. ``dtype`` is the safetensors name (``BF16``)."""

    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...


class SizedTensor(TensorSpec, Protocol):
    """A tensor of ``nbytes`` bytes."""

    @property
    def nbytes(self) -> int: ...


@dataclass(frozen=True, slots=True)
class TensorSpan:
    """A tensor's location: ``nbytes`` bytes at ``offset`` of ``file`` in the folder.

    ``key`` is the tensor's name in that file.
    """

    file: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    key: str


def read_header(path: Path) -> dict[str, TensorSpan]:
    """Read all tensors of a safetensors file.

    Raises:
        BrokenModel: the file is truncated or its header inconsistent.
    """
    try:
        refuse_irregular(path)
        size = path.stat().st_size
        with path.open("rb") as file:
            length = header_length(file.read(_LENGTH_BYTES.size), size, path)
            raw = file.read(length)
    except OSError as error:
        raise BrokenModel(f"{path}: can't be read: {error.strerror or error}") from error
    return parse_header(path, raw, size)


def parse_header(path: PurePath, raw: bytes, size: int) -> dict[str, TensorSpan]:
    """Parse the JSON header ``raw`` of a local or remote file of ``size`` bytes.

    Raises:
        BrokenModel: the header is inconsistent, or the file truncated.
    """
    try:
        # Entries stay undecoded until their length is checked.
        header = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
    except (ValueError, RecursionError) as error:
        raise BrokenModel(
            f"{path}: its safetensors header is not a JSON object: {error}"
        ) from error
    header.pop("__metadata__", None)
    for name in header:
        if len(name) > _MAX_NAME or not name.isprintable():
            raise BrokenModel(f"{path}: a tensor has the name {name[:80]!r}")
    base = _LENGTH_BYTES.size + len(raw)
    spans = {name: _parse_span(path, name, entry, base, size) for name, entry in header.items()}
    _refuse_overlap(path, spans)
    return spans


def encode_header(tensors: Mapping[str, SizedTensor]) -> bytes:
    """Encode length and header of a file that holds ``tensors`` one after another.

    Raises:
        BrokenModel: there are too many for one file.
    """
    entries: dict[str, object] = {}
    end = 0
    for name, tensor in tensors.items():
        offsets = [end, end + tensor.nbytes]
        entries[name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": offsets,
        }
        end += tensor.nbytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    if len(text) > MAX_HEADER_BYTES:
        raise BrokenModel(f"{len(tensors)} tensors are too many for one safetensors file")
    return _LENGTH_BYTES.pack(len(text)) + text


def header_length(prefix: bytes, size: int, path: PurePath) -> int:
    """Read the JSON header's length from the first bytes of a file of ``size`` bytes.

    Raises:
        BrokenModel: not a safetensors file.
    """
    if len(prefix) < _LENGTH_BYTES.size:
        raise BrokenModel(f"{path}: truncated: {size} bytes are not a safetensors file")
    (length,) = _LENGTH_BYTES.unpack(prefix)
    if length > MAX_HEADER_BYTES:
        raise BrokenModel(
            f"{path}: not a safetensors file: header of {length} bytes (at most {MAX_HEADER_BYTES})"
        )
    if _LENGTH_BYTES.size + length > size:
        raise BrokenModel(f"{path}: truncated within its header ({size} bytes)")
    return int(length)


def _parse_span(path: PurePath, name: str, said: msgspec.Raw, base: int, size: int) -> TensorSpan:
    where = f"{path}: tensor {name}"
    raw = bytes(said)
    if len(raw) > _MAX_ENTRY:
        raise BrokenModel(f"{where}: its entry has {len(raw)} bytes (at most {_MAX_ENTRY})")
    try:
        entry = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise BrokenModel(f"{where}: its entry is not valid JSON: {error}") from error
    if not isinstance(entry, dict):
        raise BrokenModel(f"{where}: its entry is not an object")
    dtype = entry.get("dtype")
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        raise BrokenModel(f"{where}: unknown dtype {dtype!r}")
    shape, offsets = (
        _parse_extents(entry, "shape", where),
        _parse_extents(entry, "data_offsets", where),
    )
    if len(offsets) != 2:
        raise BrokenModel(f"{where}: data_offsets {offsets} are not a pair")
    begin, end = offsets
    if end - begin != prod(shape) * DTYPE_BYTES[dtype]:
        raise BrokenModel(
            f"{where}: {end - begin} bytes don't fit its shape {list(shape)} of dtype {dtype}"
        )
    if base + end > size:
        raise BrokenModel(
            f"{where}: ends at byte {base + end}, but the file has {size}: it is truncated; "
            "fetch it again"
        )
    return TensorSpan(path.name, dtype, shape, base + begin, end - begin, name)


def _parse_extents(entry: dict[str, Any], field: str, where: str) -> tuple[int, ...]:
    value = entry.get(field)
    if isinstance(value, list) and len(value) <= _MAX_DIMENSIONS and all(map(_is_extent, value)):
        return tuple(value)
    raise BrokenModel(f"{where}: {field} {str(value)[:80]} is not a short list of sizes")


def _is_extent(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**53


def _refuse_overlap(path: PurePath, spans: dict[str, TensorSpan]) -> None:
    end, before = 0, ""
    filled = (item for item in spans.items() if item[1].nbytes)
    for name, span in sorted(filled, key=lambda item: item[1].offset):
        if span.offset < end:
            raise BrokenModel(f"{path}: tensors {before} and {name} overlap")
        end, before = span.offset + span.nbytes, name


#: Types of unquantized tensors.
FLOAT_DTYPES = ("F32", "BF16", "F16")
#: Maximum bytes of an nf4 quantization state; known ones have about 150.
MAX_STATE_BYTES = 4096


@dataclass(frozen=True, slots=True)
class TensorRequirement:
    """Required types and shape of a stored tensor; -1 allows any size up to MAX_STATE_BYTES."""

    dtypes: tuple[str, ...]
    shape: tuple[int, ...]

    def accepts_shape(self, shape: tuple[int, ...]) -> bool:
        """Whether ``shape`` meets the requirement."""
        return len(shape) == len(self.shape) and all(
            found == wanted if wanted >= 0 else 0 < found <= MAX_STATE_BYTES
            for found, wanted in zip(shape, self.shape, strict=True)
        )
