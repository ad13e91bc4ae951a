"""Hashes of large files are cached, and don't depend on how the files are split."""

import hashlib
import os
import threading
from pathlib import Path

import pytest

from molink.checkpoint.manifest import CHUNK_BYTES
from molink.errors import BrokenModel
from molinkd.peer.artifacts import hashing as module
from molinkd.peer.artifacts.hashing import ByteRange, Hasher, hash_ranges
from molinkd.peer.artifacts.transfers import Progress


def expected(data: bytes) -> bytes:
    return b"".join(
        hashlib.sha256(data[begin : begin + CHUNK_BYTES]).digest()
        for begin in range(0, len(data), CHUNK_BYTES)
    )


@pytest.fixture
def data() -> bytes:
    return os.urandom(3 * CHUNK_BYTES + 17)


def test_many_ranges_in_several_tasks(
    tmp_path: Path, data: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_SPLIT_BYTES", CHUNK_BYTES)
    path = tmp_path / "f"
    path.write_bytes(data)
    ranges = [(0, len(data)), (5, 0), (1, CHUNK_BYTES), (9, 2 * CHUNK_BYTES + 1)]
    progress = Progress()
    found = hash_ranges(
        [ByteRange(path, offset, nbytes) for offset, nbytes in ranges], progress, threading.Event()
    )
    assert found == [expected(data[offset : offset + nbytes]) for offset, nbytes in ranges]
    assert progress.done == sum(nbytes for _, nbytes in ranges)


def test_a_truncated_file(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "f").write_bytes(data)
    with pytest.raises(BrokenModel, match="truncated"):
        hash_ranges([ByteRange(tmp_path / "f", 0, len(data) + 1)], Progress(), threading.Event())


def test_an_unchanged_file_is_hashed_once(
    tmp_path: Path, data: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashed: list[int] = []

    def counted(*arguments: object) -> list[bytes]:
        hashed.append(1)
        return hash_ranges(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "hash_ranges", counted)
    path = tmp_path / "f"
    path.write_bytes(data)

    def digests(**parts: ByteRange) -> dict[str, bytes]:
        progress = Progress()
        found = Hasher(tmp_path / "memory").hash_parts(path, parts, progress, threading.Event())
        assert progress.done == sum(part.nbytes for part in parts.values())
        return found

    whole = ByteRange(path, 0, len(data))
    for _ in range(2):
        assert digests(a=whole) == {"a": expected(data)}
    assert len(hashed) == 1
    digests(a=whole, b=whole)
    assert len(hashed) == 2
    (memory,) = (tmp_path / "memory").iterdir()
    memory.write_bytes(b"nonsense")
    digests(a=whole)
    assert len(hashed) == 3
    path.write_bytes(data[::-1])
    os.utime(path, ns=(1, 1))
    assert digests(a=whole) == {"a": expected(data[::-1])}
    assert len(hashed) == 4


def test_an_unwritable_cache_is_ignored(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "f"
    path.write_bytes(data)
    (tmp_path / "memory").write_bytes(b"no folder")
    part = ByteRange(path, 0, len(data))
    hasher = Hasher(tmp_path / "memory")
    assert hasher.hash_parts(path, {"a": part}, Progress(), threading.Event())["a"] == expected(
        data
    )
