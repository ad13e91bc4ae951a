"""The manifest of a model: one root for the same content; inconsistent ones are refused."""

import hashlib

import msgspec
import pytest

from molink.checkpoint.manifest import (
    CHUNK_BYTES,
    DIGEST_BYTES,
    HashedEntry,
    Manifest,
    manifest_root,
)
from molink.errors import AlteredModel, BrokenModel

DATA = bytes(range(256)) * 1000


def digests(data: bytes) -> bytes:
    chunks = [data[i : i + CHUNK_BYTES] for i in range(0, len(data), CHUNK_BYTES)]
    return b"".join(hashlib.sha256(chunk).digest() for chunk in chunks)


FILE = HashedEntry("config.json", 2, digests(b"{}"))
TENSOR = HashedEntry("t", len(DATA), digests(DATA), "U8", (256, 1000))


def test_the_root_is_that_of_the_content() -> None:
    other = HashedEntry("s", 4, digests(b"abcd"), "F32", (1,))
    manifest = Manifest.build_hashed([FILE], [TENSOR, other])
    assert Manifest.build_hashed([FILE], [other, TENSOR]) == manifest
    assert Manifest.open(manifest.raw, manifest.root) == manifest
    changed = msgspec.structs.replace(other, digests=digests(b"abce"))
    roots = {
        manifest.root,
        Manifest.build_hashed([FILE], [TENSOR, changed]).root,
        Manifest.build_hashed([FILE], [TENSOR]).root,
        Manifest.build_hashed([], [TENSOR, other]).root,
        Manifest.build_hashed([FILE], [TENSOR, msgspec.structs.replace(other, dtype="I32")]).root,
    }
    assert len(roots) == 5
    assert manifest.find_entry("t") == TENSOR
    assert manifest.find_entry("config.json") == FILE
    assert manifest.find_entry("x") is None


def test_chunks() -> None:
    assert TENSOR.chunk_count == 2
    assert [TENSOR.chunk_length(index) for index in range(2)] == [
        CHUNK_BYTES,
        len(DATA) - CHUNK_BYTES,
    ]
    TENSOR.verify_chunk(0, DATA[:CHUNK_BYTES])
    TENSOR.verify_chunk(1, DATA[CHUNK_BYTES:])
    for index, data in ((1, DATA[:CHUNK_BYTES]), (0, DATA[: CHUNK_BYTES - 1]), (0, b"")):
        with pytest.raises(AlteredModel, match=f"chunk {index + 1} of 2 of t is not"):
            TENSOR.verify_chunk(index, data)
    assert HashedEntry("empty", 0, b"").chunk_count == 0


def test_another_manifest_is_refused() -> None:
    manifest = Manifest.build_hashed([FILE], [TENSOR])
    for raw in (b"", manifest.raw[:-1], manifest.raw + b"x"):
        with pytest.raises(AlteredModel, match="owner"):
            Manifest.open(raw, manifest.root)


@pytest.mark.parametrize(
    "part",
    [
        msgspec.structs.replace(TENSOR, digests=TENSOR.digests[DIGEST_BYTES:]),
        msgspec.structs.replace(TENSOR, nbytes=len(DATA) - 1),
        msgspec.structs.replace(TENSOR, shape=(256, 1001)),
        msgspec.structs.replace(TENSOR, dtype="X8"),
        msgspec.structs.replace(TENSOR, nbytes=2**50),
        msgspec.structs.replace(FILE, nbytes=2**50),
    ],
)
def test_inconsistent_input_is_refused(part: HashedEntry) -> None:
    with pytest.raises(BrokenModel, match="contradicts itself"):
        Manifest.build_hashed([], [part])


def test_two_parts_of_one_name() -> None:
    with pytest.raises(BrokenModel, match="the same name"):
        Manifest.build_hashed([FILE], [FILE])


@pytest.mark.parametrize(
    "content",
    [b"", [2, [], []], [1, []], [1, [["x", -1, b""]], []], [1, [["", 0, b""]], []], {"a": 1}],
)
def test_invalid_content_with_a_valid_root_is_refused(content: object) -> None:
    raw = msgspec.msgpack.encode(content)
    with pytest.raises(BrokenModel, match="can't be read"):
        Manifest.open(raw, manifest_root(raw))
