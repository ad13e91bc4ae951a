"""What a model consists of, as hashes: whoever knows its root can tell its bytes from any others.

The PC that brings a model makes the manifest of it: each metadata file and each tensor with its
size, and a SHA-256 of each of its chunks. Where a tensor lies is left out, so copies that keep the
same tensors in other files are the same model. The *root* is the SHA-256 of the manifest's bytes,
and how many these are: so a list of any other length isn't even read.
"""

import hashlib
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from math import prod
from typing import Annotated, BinaryIO, Literal

import msgspec

from molink.checkpoint.header import DTYPE_BYTES
from molink.errors import AlteredModel, BrokenModel, WireError
from molink.facts.scalars import Count

#: Bytes of a chunk: what one message brings, so that each can be checked as it arrives.
CHUNK_BYTES = 192 * 1024
DIGEST_BYTES = hashlib.sha256().digest_size
#: Bytes that a manifest may have: those of a model of 400 GB.
MAX_MANIFEST_BYTES = 64 << 20
_MAX_PARTS = 1 << 18

Name = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]


class Part(msgspec.Struct, frozen=True, array_like=True):
    """A metadata file (``dtype`` is empty) or a tensor: its size and its chunks' digests in a row.

    ``dtype`` is safetensors' own name (``BF16``).
    """

    name: Name
    nbytes: Count
    digests: bytes
    dtype: str = ""
    shape: Annotated[tuple[Count, ...], msgspec.Meta(max_length=8)] = ()

    @property
    def chunks(self) -> int:
        """How many chunks it has."""
        return chunk_count(self.nbytes)

    def length(self, index: int) -> int:
        """Bytes of a chunk."""
        return min(CHUNK_BYTES, self.nbytes - index * CHUNK_BYTES)

    def digest(self, index: int) -> bytes:
        """The SHA-256 of a chunk."""
        return self.digests[index * DIGEST_BYTES : (index + 1) * DIGEST_BYTES]

    def check(self, index: int, data: bytes) -> None:
        """Whether ``data`` is that chunk.

        Raises:
            AlteredModel: it isn't.
        """
        if hashlib.sha256(data).digest() != self.digest(index):
            raise AlteredModel(
                f"chunk {index + 1} of {self.chunks} of {self.name} is not what the model's owner "
                "has there"
            )


class _Content(msgspec.Struct, frozen=True, array_like=True):
    version: Literal[1]
    files: Annotated[tuple[Part, ...], msgspec.Meta(max_length=64)]
    tensors: Annotated[tuple[Part, ...], msgspec.Meta(max_length=_MAX_PARTS)]


@dataclass(frozen=True, slots=True)
class Manifest:
    """The parts of a model by name. ``raw`` is what travels, and ``root`` names it."""

    raw: bytes = field(repr=False)
    root: str
    files: dict[str, Part] = field(repr=False)
    tensors: dict[str, Part] = field(repr=False)

    @classmethod
    def of(cls, files: Iterable[Part], tensors: Iterable[Part]) -> "Manifest":
        """Make the manifest of a model.

        Raises:
            BrokenModel: a name is there twice, or the model is larger than a manifest may say.
        """
        content = _Content(1, _in_order(files), _in_order(tensors))
        raw = msgspec.msgpack.encode(content)
        if len(raw) > MAX_MANIFEST_BYTES:
            raise BrokenModel(f"a model whose hashes take {len(raw)} bytes is too large to be sent")
        return cls.open(raw, root_of(raw))

    @classmethod
    def open(cls, raw: bytes, root: str) -> "Manifest":
        """Read a manifest that came from somewhere.

        Raises:
            AlteredModel: it isn't the one with that root.
            BrokenModel: it is, but its maker made it wrong.
        """
        if root_of(raw) != root:
            raise AlteredModel("its list of hashes is not the one that the model's owner made")
        try:
            content = msgspec.msgpack.decode(raw, type=_Content)
        except msgspec.MsgspecError as error:
            raise BrokenModel(f"the model's list of hashes can't be read: {error}") from error
        for part in (*content.files, *content.tensors):
            _check_part(part)
        files = {part.name: part for part in content.files}
        tensors = {part.name: part for part in content.tensors}
        if len(files | tensors) != len(content.files) + len(content.tensors):
            raise BrokenModel("the model has two parts of one name")
        return cls(raw, root, files, tensors)

    @property
    def extra_bytes(self) -> int:
        """What is fetched beside weights."""
        return len(self.raw) + sum(part.nbytes for part in self.files.values())

    def marks(self, held: Collection[str]) -> bytes:
        """Which parts somebody has: a bit for each, files first, in the manifest's order."""
        names = (*self.files, *self.tensors)
        marks = bytearray(-(-len(names) // 8))
        for index, name in enumerate(names):
            if name in held:
                marks[index // 8] |= 1 << index % 8
        return bytes(marks)

    def marked(self, marks: bytes) -> frozenset[str]:
        """The parts that :meth:`marks` says somebody has.

        Raises:
            WireError: it is no such list of this model.
        """
        names = (*self.files, *self.tensors)
        if len(marks) != -(-len(names) // 8):
            raise WireError(f"{len(marks)} bytes of marks are none of {len(names)} parts")
        return frozenset(
            name for index, name in enumerate(names) if marks[index // 8] >> index % 8 & 1
        )

    def part(self, name: str) -> Part | None:
        """The file or tensor of that name."""
        return self.files.get(name) or self.tensors.get(name)


def root_of(raw: bytes) -> str:
    """The root of a manifest with these bytes."""
    return f"{hashlib.sha256(raw).hexdigest()}:{len(raw)}"


def manifest_bytes(root: str) -> int:
    """How long the manifest with that root is."""
    return int(root.rpartition(":")[2])


def chunk_count(nbytes: int) -> int:
    """How many chunks a part of ``nbytes`` has."""
    return -(-nbytes // CHUNK_BYTES)


def chunk_digests(file: BinaryIO, offset: int, nbytes: int) -> Iterator[bytes]:
    """The digests of ``nbytes`` bytes at ``offset``, chunk by chunk; of a part's start only.

    Raises:
        BrokenModel: the file ends before.
    """
    file.seek(offset)
    for done in range(0, nbytes, CHUNK_BYTES):
        data = file.read(min(CHUNK_BYTES, nbytes - done))
        if len(data) != min(CHUNK_BYTES, nbytes - done):
            raise BrokenModel(f"{file.name}: it became shorter while it was read")
        yield hashlib.sha256(data).digest()


def _in_order(parts: Iterable[Part]) -> tuple[Part, ...]:
    return tuple(sorted(parts, key=lambda part: part.name))


def _check_part(part: Part) -> None:
    size = prod(part.shape) * DTYPE_BYTES.get(part.dtype, -1) if part.dtype else part.nbytes
    if part.nbytes != size or len(part.digests) != DIGEST_BYTES * part.chunks:
        raise BrokenModel(f"the model's list of hashes contradicts itself at {part.name[:80]}")
