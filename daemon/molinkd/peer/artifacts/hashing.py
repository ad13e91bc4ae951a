"""Hashes large files on all cores, and caches the digests while a file is unchanged."""

import asyncio
import hashlib
import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec

from molink.checkpoint.manifest import CHUNK_BYTES, DIGEST_BYTES, count_chunks, hash_chunks
from molink.errors import Unavailable
from molink.files import retry_while_busy
from molink.wire.sockets.secrets import private_folder
from molinkd.peer.artifacts.transfers import Progress

log = logging.getLogger(__name__)

#: Bytes per thread and task.
_SPLIT_BYTES = 64 * CHUNK_BYTES
#: More threads only add seeks.
_MAX_THREADS = 8
#: Maximum number of files in the cache.
_MAX_CACHED_FILES = 256

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ByteRange:
    """``nbytes`` bytes at ``offset`` of a file."""

    path: Path
    offset: int
    nbytes: int


class FileStamp(msgspec.Struct, frozen=True):
    """Size, modification time and inode, which change when the file does."""

    size: int
    mtime_ns: int
    inode: int

    @classmethod
    def of_path(cls, path: Path) -> "FileStamp":
        """The stamp of a file; raises ``OSError``."""
        found = path.stat()
        return cls(found.st_size, found.st_mtime_ns, found.st_ino)


class _CachedDigests(msgspec.Struct, frozen=True):
    path: str
    stamp: FileStamp
    digests: dict[str, bytes]


class _CachedPath(msgspec.Struct, frozen=True):
    """The path alone of a :class:`_CachedDigests`."""

    path: str


class Hasher:
    """Hashes parts of files, with an optional cache in ``folder``. Blocks."""

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder

    def hash_parts(
        self,
        path: Path,
        parts: Mapping[str, ByteRange],
        progress: Progress,
        stop: threading.Event,
    ) -> dict[str, bytes]:
        """Chunk digests of each of the ``parts`` of one file.

        Raises:
            OSError: The file can't be read.
            BrokenModel: The file became shorter.
            Unavailable: ``stop`` was set.
        """
        stamp = FileStamp.of_path(path)
        known = self._load_digests(path, stamp)
        sizes = {name: DIGEST_BYTES * count_chunks(part.nbytes) for name, part in parts.items()}
        if known is not None and {name: len(one) for name, one in known.items()} == sizes:
            progress.add_bytes(sum(part.nbytes for part in parts.values()))
            return known
        found = dict(zip(parts, hash_ranges([*parts.values()], progress, stop), strict=True))
        if FileStamp.of_path(path) == stamp:
            try:
                self._save_digests(_CachedDigests(str(path), stamp, found))
            except OSError as error:
                log.warning("can't cache the hashes of %s: %s", path, error)
        return found

    def cached_paths(self) -> Iterator[Path]:
        """Paths of all cached files, whether or not they still exist."""
        if self._folder is None or not self._folder.is_dir():
            return
        for file in self._folder.iterdir():
            try:
                yield Path(msgspec.msgpack.decode(file.read_bytes(), type=_CachedPath).path)
            except (OSError, msgspec.MsgspecError):
                continue

    def _cache_file(self, path: str) -> Path | None:
        if self._folder is None:
            return None
        return self._folder / f"{hashlib.sha256(path.encode('utf-8', 'replace')).hexdigest()[:32]}"

    def _load_digests(self, path: Path, stamp: FileStamp) -> dict[str, bytes] | None:
        file = self._cache_file(str(path))
        try:
            if file is None:
                return None
            found = msgspec.msgpack.decode(file.read_bytes(), type=_CachedDigests)
        except (OSError, msgspec.MsgspecError):
            return None
        return found.digests if (found.path, found.stamp) == (str(path), stamp) else None

    def _save_digests(self, found: _CachedDigests) -> None:
        file = self._cache_file(found.path)
        if file is None:
            return
        folder = private_folder(file.parent)
        draft = file.with_suffix(".part")
        draft.write_bytes(msgspec.msgpack.encode(found))
        retry_while_busy(lambda: draft.replace(file))
        others = sorted(folder.iterdir(), key=lambda one: one.stat().st_mtime, reverse=True)
        for old in others[_MAX_CACHED_FILES:]:
            old.unlink(missing_ok=True)


def hash_ranges(
    stretches: Sequence[ByteRange], progress: Progress, stop: threading.Event
) -> list[bytes]:
    """Concatenated chunk digests of each range, hashed in parallel.

    Raises:
        OSError: A file can't be read.
        BrokenModel: A file became shorter.
        Unavailable: ``stop`` was set.
    """
    runs = [(number, run) for number, one in enumerate(stretches) for run in _split_range(one)]
    results = [bytearray() for _ in stretches]

    def work(run: ByteRange) -> bytes:
        if stop.is_set():
            raise Unavailable("hashing was cancelled")
        with run.path.open("rb") as file:
            found = b"".join(hash_chunks(file, run.offset, run.nbytes))
        progress.add_bytes(run.nbytes)
        return found

    with ThreadPoolExecutor(min(_MAX_THREADS, os.cpu_count() or 1), "hash") as pool:
        try:
            for (number, _), found in zip(runs, pool.map(work, [r for _, r in runs]), strict=True):
                results[number] += found
        except BaseException:
            stop.set()  # queued tasks fail immediately
            raise
    return [bytes(one) for one in results]


async def run_in_thread(act: Callable[[threading.Event], T]) -> T:
    """Run ``act(stop)`` in a thread; cancellation sets ``stop`` and does not wait."""
    stop = threading.Event()
    try:
        return await asyncio.to_thread(act, stop)
    finally:
        stop.set()


def _split_range(whole: ByteRange) -> Iterator[ByteRange]:
    for done in range(0, whole.nbytes, _SPLIT_BYTES):
        length = min(_SPLIT_BYTES, whole.nbytes - done)
        yield ByteRange(whole.path, whole.offset + done, length)
