"""Manifest of a model: hashes that verify all of its bytes.

The PC that loads a model first builds the manifest: each metadata file and tensor with its size and
a SHA-256 per chunk. Tensor locations are left out, so copies with other file layouts are the same
model. The *root* is the SHA-256 and the length of the manifest's bytes.

For shards that stay on the Hugging Face hub, the hub's SHA-256 of each shard replaces chunk hashes
(version 2). Such a shard can be verified only when it is complete. The manifest maps tensors to
shards; the offsets come from the verified shard itself.
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

#: Bytes of a chunk: the payload of one message, verified on arrival.
CHUNK_BYTES = 192 * 1024
DIGEST_BYTES = hashlib.sha256().digest_size
#: Maximum size of a manifest, enough for a model of 400 GB.
MAX_MANIFEST_BYTES = 64 << 20
_MAX_ENTRIES = 1 << 18
_MAX_SHARDS = 4096
SHARD_SUFFIX = ".safetensors"

EntryName = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
TensorShape = Annotated[tuple[Count, ...], msgspec.Meta(max_length=8)]


class ManifestEntry(msgspec.Struct, frozen=True, array_like=True):
    """A part of a model that is transferred chunk by chunk."""

    name: EntryName
    nbytes: Count

    @property
    def chunk_count(self) -> int:
        """Number of chunks."""
        return count_chunks(self.nbytes)

    def chunk_length(self, index: int) -> int:
        """Bytes of a chunk."""
        return min(CHUNK_BYTES, self.nbytes - index * CHUNK_BYTES)

    def verify_chunk(self, index: int, data: bytes) -> None:
        """Check a chunk's length.

        Raises:
            WireError: wrong length.
        """
        if len(data) != self.chunk_length(index):
            raise WireError(f"chunk {index + 1} of {self.name} came as {len(data)} bytes")


class ShardEntry(ManifestEntry, frozen=True, array_like=True):
    """A weight file on the hub, with the hub's SHA-256."""

    sha256: Annotated[bytes, msgspec.Meta(min_length=DIGEST_BYTES, max_length=DIGEST_BYTES)]


class PlacedTensor(msgspec.Struct, frozen=True, array_like=True):
    """A tensor in the shard of index ``shard``."""

    name: EntryName
    shard: Index
    dtype: str
    shape: TensorShape

    @property
    def nbytes(self) -> int:
        """Size in bytes; negative for an unknown dtype."""
        return prod(self.shape) * DTYPE_BYTES.get(self.dtype, -1)


class HashedEntry(ManifestEntry, frozen=True, array_like=True):
    """A metadata file (empty ``dtype``) or a tensor, with its concatenated chunk digests.

    ``dtype`` is the safetensors name (``BF16``).
    """

    digests: bytes
    dtype: str = ""
    shape: TensorShape = ()

    def chunk_digest(self, index: int) -> bytes:
        """SHA-256 of a chunk."""
        return self.digests[index * DIGEST_BYTES : (index + 1) * DIGEST_BYTES]

    def verify_chunk(self, index: int, data: bytes) -> None:
        """Verify a chunk.

        Raises:
            AlteredModel: the hash differs.
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
    """The entries of a model by name. ``raw`` is the encoded manifest, identified by ``root``.

    ``tensors`` are transferred one by one, or are ``placed`` in ``shards`` of the model at ``hub``
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
        """Build a manifest with chunk hashes.

        Raises:
            BrokenModel: duplicate names, or the manifest becomes too large.
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
        """Build the manifest of a model whose shards stay on the hub.

        ``tensors`` maps names to shard and spec. Raises as :meth:`build_hashed` and :meth:`open`.
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
            raise BrokenModel(f"a model whose hashes take {len(raw)} bytes is too large")
        return cls.open(raw, manifest_root(raw))

    @classmethod
    def open(cls, raw: bytes, root: str) -> "Manifest":
        """Decode a received manifest.

        Raises:
            AlteredModel: its root differs.
            BrokenModel: it is invalid, or made by a newer molink.
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
        """Type and shape of all tensors."""
        return self.placed or self.tensors

    @property
    def entries(self) -> dict[str, ManifestEntry]:
        """All entries, files first."""
        return {**self.files, **self.tensors, **self.shards}

    @property
    def weight_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(one.nbytes for one in (self.placed or self.tensors).values())

    def find_shards(self, tensors: Iterable[str]) -> list[ShardEntry]:
        """Shards that hold ``tensors``, in the manifest's order."""
        numbers = {self.placed[name].shard for name in tensors}
        return [shard for number, shard in enumerate(self.shards.values()) if number in numbers]

    @property
    def extra_bytes(self) -> int:
        """Count the bytes to transfer besides weights."""
        return len(self.raw) + sum(entry.nbytes for entry in self.files.values())

    def encode_bitfield(self, held: Collection[str]) -> bytes:
        """Encode the held entries as a bitfield, in the manifest's order."""
        names = (*self.entries,)
        marks = bytearray(-(-len(names) // 8))
        for index, name in enumerate(names):
            if name in held:
                marks[index // 8] |= 1 << index % 8
        return bytes(marks)

    def decode_bitfield(self, marks: bytes) -> frozenset[str]:
        """Decode a bitfield to the names of held entries.

        Raises:
            WireError: wrong length.
        """
        names = (*self.entries,)
        if len(marks) != -(-len(names) // 8):
            raise WireError(f"a bitfield of {len(marks)} bytes does not fit {len(names)} entries")
        return frozenset(
            name for index, name in enumerate(names) if marks[index // 8] >> index % 8 & 1
        )

    def find_entry(self, name: str) -> ManifestEntry | None:
        """Return the file, tensor or shard of that name."""
        return self.files.get(name) or self.tensors.get(name) or self.shards.get(name)


def manifest_root(raw: bytes) -> str:
    """Root of a manifest with these bytes."""
    return f"{hashlib.sha256(raw).hexdigest()}:{len(raw)}"


def manifest_size(root: str) -> int:
    """Length of the manifest with that root."""
    return int(root.rpartition(":")[2])


def count_chunks(nbytes: int) -> int:
    """Number of chunks in ``nbytes``."""
    return -(-nbytes // CHUNK_BYTES)


def hash_chunks(file: BinaryIO, offset: int, nbytes: int) -> Iterator[bytes]:
    """Hash ``nbytes`` bytes at ``offset``, chunk by chunk.

    Raises:
        BrokenModel: the file ends early.
    """
    file.seek(offset)
    for done in range(0, nbytes, CHUNK_BYTES):
        data = file.read(min(CHUNK_BYTES, nbytes - done))
        if len(data) != min(CHUNK_BYTES, nbytes - done):
            raise BrokenModel(f"{file.name}: it was truncated while it was read")
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
        raise BrokenModel("the model has two files or tensors of the same name")


def _check_shards(content: _ShardedContent) -> None:
    """Check that shards can be stored next to ``files`` under their names on any file system."""
    names = {name.lower() for name in (shard.name for shard in content.shards)}
    if len(names) != len(content.shards):
        raise BrokenModel("the model has two shards whose names differ only in case")
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
