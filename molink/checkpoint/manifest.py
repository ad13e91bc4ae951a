"""What a model consists of, as hashes: whoever knows its root can tell its bytes from any others.

The PC that brings a model makes the manifest of it: each metadata file and each tensor with its
size, and a SHA-256 of each of its chunks. Where a tensor lies is left out, so copies that keep the
same tensors in other files are the same model. The *root* is the SHA-256 of the manifest's bytes,
and how many these are: so a list of any other length isn't even read.

Of a model in shards that stay on the Hugging Face hub nobody has read all bytes: there the hub's
SHA-256 of each shard stands in place of the tensors' chunks (version 2). A shard is a part then,
and counts only once it is whole. Of tensors the manifest says in which shard they are; where in it
the shard itself says, so nobody can lie about that.
"""

import hashlib
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Annotated, BinaryIO, Literal

import msgspec

from molink.checkpoint.safetensors_header import DTYPE_BYTES, TensorSpec
from molink.errors import AlteredModel, BrokenModel, WireError
from molink.facts.model import HubRevision
from molink.facts.scalars import Count, Index
from molink.files import is_plain

#: Bytes of a chunk: what one message brings, so that each can be checked as it arrives.
CHUNK_BYTES = 192 * 1024
DIGEST_BYTES = hashlib.sha256().digest_size
#: Bytes that a manifest may have: those of a model of 400 GB.
MAX_MANIFEST_BYTES = 64 << 20
_MAX_ENTRIES = 1 << 18
_MAX_SHARDS = 4096
#: How the names of shards end.
SHARD_SUFFIX = ".safetensors"

EntryName = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
TensorShape = Annotated[tuple[Count, ...], msgspec.Meta(max_length=8)]


class ManifestEntry(msgspec.Struct, frozen=True, array_like=True):
    """What can be had from others, chunk by chunk."""

    name: EntryName
    nbytes: Count

    @property
    def chunk_count(self) -> int:
        """How many chunks it has."""
        return count_chunks(self.nbytes)

    def chunk_length(self, index: int) -> int:
        """Bytes of a chunk."""
        return min(CHUNK_BYTES, self.nbytes - index * CHUNK_BYTES)

    def verify_chunk(self, index: int, data: bytes) -> None:
        """Whether ``data`` can be that chunk.

        Raises:
            WireError: it is of another length.
        """
        if len(data) != self.chunk_length(index):
            raise WireError(f"chunk {index + 1} of {self.name} came as {len(data)} bytes")


class ShardEntry(ManifestEntry, frozen=True, array_like=True):
    """A file of weights on the hub, as a whole, with the SHA-256 that the hub names."""

    sha256: Annotated[bytes, msgspec.Meta(min_length=DIGEST_BYTES, max_length=DIGEST_BYTES)]


class PlacedTensor(msgspec.Struct, frozen=True, array_like=True):
    """A tensor of shard number ``shard``."""

    name: EntryName
    shard: Index
    dtype: str
    shape: TensorShape

    @property
    def nbytes(self) -> int:
        """Its size; negative if there is no such type."""
        return prod(self.shape) * DTYPE_BYTES.get(self.dtype, -1)


class HashedEntry(ManifestEntry, frozen=True, array_like=True):
    """A metadata file (``dtype`` is empty) or a tensor: its size and its chunks' digests in a row.

    ``dtype`` is safetensors' own name (``BF16``).
    """

    digests: bytes
    dtype: str = ""
    shape: TensorShape = ()

    def chunk_digest(self, index: int) -> bytes:
        """The SHA-256 of a chunk."""
        return self.digests[index * DIGEST_BYTES : (index + 1) * DIGEST_BYTES]

    def verify_chunk(self, index: int, data: bytes) -> None:
        """Whether ``data`` is that chunk.

        Raises:
            AlteredModel: it isn't.
        """
        if hashlib.sha256(data).digest() != self.chunk_digest(index):
            raise AlteredModel(
                f"chunk {index + 1} of {self.chunk_count} of {self.name} is not what the model's "
                "owner "
                "has there"
            )


_Files = Annotated[tuple[HashedEntry, ...], msgspec.Meta(max_length=64)]


class _Version(msgspec.Struct, frozen=True, array_like=True):
    version: int


class _HashedContent(msgspec.Struct, frozen=True, array_like=True):
    version: Literal[1]
    files: _Files
    tensors: Annotated[tuple[HashedEntry, ...], msgspec.Meta(max_length=_MAX_ENTRIES)]


class _ShardedContent(msgspec.Struct, frozen=True, array_like=True):
    version: Literal[2]
    files: _Files
    hub: Annotated[HubRevision, msgspec.Meta(min_length=1)]
    shards: Annotated[tuple[ShardEntry, ...], msgspec.Meta(min_length=1, max_length=_MAX_SHARDS)]
    tensors: Annotated[tuple[PlacedTensor, ...], msgspec.Meta(max_length=_MAX_ENTRIES)]


@dataclass(frozen=True, slots=True)
class Manifest:
    """The parts of a model by name. ``raw`` is what travels, and ``root`` names it.

    ``tensors`` have chunks of their own, or are ``placed`` in ``shards`` of the model at ``hub``
    (``OWNER/NAME@COMMIT``).
    """

    raw: bytes = field(repr=False)
    root: str
    files: dict[str, HashedEntry] = field(repr=False)
    tensors: dict[str, HashedEntry] = field(repr=False)
    shards: dict[str, ShardEntry] = field(default_factory=dict, repr=False)
    placed: dict[str, PlacedTensor] = field(default_factory=dict, repr=False)
    hub: str = ""

    @classmethod
    def build_hashed(
        cls, files: Iterable[HashedEntry], tensors: Iterable[HashedEntry]
    ) -> "Manifest":
        """Make the manifest of a model.

        Raises:
            BrokenModel: a name is there twice, or the model is larger than a manifest may say.
        """
        return cls._encode_content(_HashedContent(1, _sort_entries(files), _sort_entries(tensors)))

    @classmethod
    def build_sharded(
        cls,
        files: Iterable[HashedEntry],
        hub: str,
        shards: Iterable[ShardEntry],
        tensors: Mapping[str, tuple[str, TensorSpec]],
    ) -> "Manifest":
        """Make that of a model whose shards stay on the hub; of each tensor its shard and kind.

        Raises:
            BrokenModel: as :meth:`build_hashed` and :meth:`open`.
        """
        ordered = tuple(sorted(shards, key=lambda shard: shard.name))
        numbers = {shard.name: number for number, shard in enumerate(ordered)}
        placed = tuple(
            PlacedTensor(name, numbers[shard], kind.dtype, kind.shape)
            for name, (shard, kind) in sorted(tensors.items())
        )
        return cls._encode_content(_ShardedContent(2, _sort_entries(files), hub, ordered, placed))

    @classmethod
    def _encode_content(cls, content: _HashedContent | _ShardedContent) -> "Manifest":
        raw = msgspec.msgpack.encode(content)
        if len(raw) > MAX_MANIFEST_BYTES:
            raise BrokenModel(f"a model whose hashes take {len(raw)} bytes is too large to be sent")
        return cls.open(raw, manifest_root(raw))

    @classmethod
    def open(cls, raw: bytes, root: str) -> "Manifest":
        """Read a manifest that came from somewhere.

        Raises:
            AlteredModel: it isn't the one with that root.
            BrokenModel: it is, but its maker made it wrong, or a newer molink made it.
        """
        if manifest_root(raw) != root:
            raise AlteredModel("its list of hashes is not the one that the model's owner made")
        try:
            version = msgspec.msgpack.decode(raw, type=_Version).version
            if version > 2:
                raise BrokenModel(
                    f"the model's list of hashes is of version {version}, and this molink knows "
                    "1 and 2: update molink on this PC"
                )
            if version == 2:
                return cls._decode_sharded(
                    raw, root, msgspec.msgpack.decode(raw, type=_ShardedContent)
                )
            content = msgspec.msgpack.decode(raw, type=_HashedContent)
        except msgspec.MsgspecError as error:
            raise BrokenModel(f"the model's list of hashes can't be read: {error}") from error
        for entry in (*content.files, *content.tensors):
            _check_entry(entry)
        found = cls(raw, root, _index_entries(content.files), _index_entries(content.tensors))
        _refuse_duplicates(found, content)
        return found

    @classmethod
    def _decode_sharded(cls, raw: bytes, root: str, content: _ShardedContent) -> "Manifest":
        for entry in content.files:
            _check_entry(entry)
        _check_shards(content)
        shards = {shard.name: shard for shard in content.shards}
        placed = {tensor.name: tensor for tensor in content.tensors}
        found = cls(raw, root, _index_entries(content.files), {}, shards, placed, content.hub)
        _refuse_duplicates(found, content)
        return found

    @property
    def tensor_specs(self) -> Mapping[str, TensorSpec]:
        """What all tensors are."""
        return self.placed or self.tensors

    @property
    def entries(self) -> dict[str, ManifestEntry]:
        """All that can be had from others: files first."""
        return {**self.files, **self.tensors, **self.shards}

    @property
    def weight_bytes(self) -> int:
        """What all tensors take."""
        return sum(one.nbytes for one in (self.placed or self.tensors).values())

    def find_shards(self, tensors: Iterable[str]) -> list[ShardEntry]:
        """Where tensors of a model in shards lie; each shard once, in the manifest's order."""
        numbers = {self.placed[name].shard for name in tensors}
        return [shard for number, shard in enumerate(self.shards.values()) if number in numbers]

    @property
    def extra_bytes(self) -> int:
        """What is fetched beside weights."""
        return len(self.raw) + sum(entry.nbytes for entry in self.files.values())

    def encode_bitfield(self, held: Collection[str]) -> bytes:
        """Which parts somebody has: a bit for each, files first, in the manifest's order."""
        names = (*self.entries,)
        marks = bytearray(-(-len(names) // 8))
        for index, name in enumerate(names):
            if name in held:
                marks[index // 8] |= 1 << index % 8
        return bytes(marks)

    def decode_bitfield(self, marks: bytes) -> frozenset[str]:
        """The parts that :meth:`encode_bitfield` says somebody has.

        Raises:
            WireError: it is no such list of this model.
        """
        names = (*self.entries,)
        if len(marks) != -(-len(names) // 8):
            raise WireError(f"{len(marks)} bytes of marks are none of {len(names)} parts")
        return frozenset(
            name for index, name in enumerate(names) if marks[index // 8] >> index % 8 & 1
        )

    def find_entry(self, name: str) -> ManifestEntry | None:
        """The file, tensor or shard of that name."""
        return self.files.get(name) or self.tensors.get(name) or self.shards.get(name)


def manifest_root(raw: bytes) -> str:
    """The root of a manifest with these bytes."""
    return f"{hashlib.sha256(raw).hexdigest()}:{len(raw)}"


def manifest_size(root: str) -> int:
    """How long the manifest with that root is."""
    return int(root.rpartition(":")[2])


def count_chunks(nbytes: int) -> int:
    """How many chunks a part of ``nbytes`` has."""
    return -(-nbytes // CHUNK_BYTES)


def hash_chunks(file: BinaryIO, offset: int, nbytes: int) -> Iterator[bytes]:
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


def _sort_entries(entries: Iterable[HashedEntry]) -> tuple[HashedEntry, ...]:
    return tuple(sorted(entries, key=lambda entry: entry.name))


def _check_entry(entry: HashedEntry) -> None:
    size = prod(entry.shape) * DTYPE_BYTES.get(entry.dtype, -1) if entry.dtype else entry.nbytes
    if entry.nbytes != size or len(entry.digests) != DIGEST_BYTES * entry.chunk_count:
        raise BrokenModel(f"the model's list of hashes contradicts itself at {entry.name[:80]}")


def _index_entries(entries: Iterable[HashedEntry]) -> dict[str, HashedEntry]:
    return {entry.name: entry for entry in entries}


def _refuse_duplicates(found: Manifest, content: _HashedContent | _ShardedContent) -> None:
    tensors = found.placed or found.tensors
    shards = content.shards if isinstance(content, _ShardedContent) else ()
    said = len(content.files) + len(content.tensors) + len(shards)
    if len({*found.files, *tensors, *found.shards}) != said:
        raise BrokenModel("the model has two parts of one name")


def _check_shards(content: _ShardedContent) -> None:
    """Shards become files here, next to those of ``files``: on any file system."""
    names = {name.lower() for name in (shard.name for shard in content.shards)}
    if len(names) != len(content.shards):
        raise BrokenModel("the model has two shards whose names differ in case at most")
    taken = Counter[int]()
    for shard in content.shards:
        if not is_plain(shard.name) or not shard.name.endswith(SHARD_SUFFIX):
            raise BrokenModel(f"the model has a shard with the name {shard.name[:80]!r}")
    for tensor in content.tensors:
        if tensor.nbytes < 0 or tensor.shard >= len(content.shards):
            raise BrokenModel(
                f"the model's list of hashes contradicts itself at {tensor.name[:80]}"
            )
        taken[tensor.shard] += tensor.nbytes
    for number, shard in enumerate(content.shards):
        if taken[number] > shard.nbytes:
            raise BrokenModel(
                f"the model's tensors in {shard.name} take {taken[number]} bytes of {shard.nbytes}"
            )
