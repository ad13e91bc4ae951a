"""Hashes of files of many gigabytes: on all cores, and only once while a file stays as it is."""

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

from molink.checkpoint.manifest import CHUNK_BYTES, DIGEST_BYTES, chunk_count, chunk_digests
from molink.errors import Unavailable
from molink.files import patiently
from molink.wire.sockets.secrets import private_folder
from molinkd.peer.artifacts.progress import Progress

log = logging.getLogger(__name__)

#: Bytes that one thread hashes at a time.
_RUN_BYTES = 64 * CHUNK_BYTES
#: More threads than this only make a disk slower.
_MAX_THREADS = 8
#: Files whose hashes are remembered.
_MAX_REMEMBERED = 256

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Stretch:
    """``nbytes`` bytes at ``offset`` of a file."""

    path: Path
    offset: int
    nbytes: int


class Stamp(msgspec.Struct, frozen=True):
    """What changes whenever a file does."""

    size: int
    mtime_ns: int
    inode: int

    @classmethod
    def of(cls, path: Path) -> "Stamp":
        """That of a file; raises ``OSError``."""
        found = path.stat()
        return cls(found.st_size, found.st_mtime_ns, found.st_ino)


class _Remembered(msgspec.Struct, frozen=True):
    path: str
    stamp: Stamp
    digests: dict[str, bytes]


class _Named(msgspec.Struct, frozen=True):
    """What :class:`_Remembered` says of its file, without its hashes."""

    path: str


class Hasher:
    """Hashes parts of files; remembers them in ``folder`` if there is one. Blocks."""

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder

    def digests(
        self,
        path: Path,
        parts: Mapping[str, Stretch],
        progress: Progress,
        stop: threading.Event,
    ) -> dict[str, bytes]:
        """The chunks' digests of each of the ``parts`` of one file.

        Raises:
            OSError: it can't be read.
            BrokenModel: it became shorter.
            Unavailable: ``stop`` was set.
        """
        stamp = Stamp.of(path)
        known = self._recall(path, stamp)
        sizes = {name: DIGEST_BYTES * chunk_count(part.nbytes) for name, part in parts.items()}
        if known is not None and {name: len(one) for name, one in known.items()} == sizes:
            progress.add(sum(part.nbytes for part in parts.values()))
            return known
        found = dict(zip(parts, hash_stretches([*parts.values()], progress, stop), strict=True))
        if Stamp.of(path) == stamp:
            try:
                self._remember(_Remembered(str(path), stamp, found))
            except OSError as error:
                log.warning("the hashes of %s can't be kept, only computed again: %s", path, error)
        return found

    def known(self) -> Iterator[Path]:
        """The files whose hashes are remembered, whether they are still there or not."""
        if self._folder is None or not self._folder.is_dir():
            return
        for file in self._folder.iterdir():
            try:
                yield Path(msgspec.msgpack.decode(file.read_bytes(), type=_Named).path)
            except (OSError, msgspec.MsgspecError):
                continue

    def _file(self, path: str) -> Path | None:
        if self._folder is None:
            return None
        return self._folder / f"{hashlib.sha256(path.encode('utf-8', 'replace')).hexdigest()[:32]}"

    def _recall(self, path: Path, stamp: Stamp) -> dict[str, bytes] | None:
        file = self._file(str(path))
        try:
            if file is None:
                return None
            found = msgspec.msgpack.decode(file.read_bytes(), type=_Remembered)
        except (OSError, msgspec.MsgspecError):
            return None
        return found.digests if (found.path, found.stamp) == (str(path), stamp) else None

    def _remember(self, found: _Remembered) -> None:
        file = self._file(found.path)
        if file is None:
            return
        folder = private_folder(file.parent)
        draft = file.with_suffix(".part")
        draft.write_bytes(msgspec.msgpack.encode(found))
        patiently(lambda: draft.replace(file))
        others = sorted(folder.iterdir(), key=lambda one: one.stat().st_mtime, reverse=True)
        for old in others[_MAX_REMEMBERED:]:
            old.unlink(missing_ok=True)


def hash_stretches(
    stretches: Sequence[Stretch], progress: Progress, stop: threading.Event
) -> list[bytes]:
    """The chunks' digests of each stretch, in a row; several are hashed at once.

    Raises:
        OSError: a file can't be read.
        BrokenModel: one became shorter.
        Unavailable: ``stop`` was set.
    """
    runs = [(number, run) for number, one in enumerate(stretches) for run in _runs(one)]
    results = [bytearray() for _ in stretches]

    def work(run: Stretch) -> bytes:
        if stop.is_set():
            raise Unavailable("hashing was ended")
        with run.path.open("rb") as file:
            found = b"".join(chunk_digests(file, run.offset, run.nbytes))
        progress.add(run.nbytes)
        return found

    with ThreadPoolExecutor(min(_MAX_THREADS, os.cpu_count() or 1), "hash") as pool:
        try:
            for (number, _), found in zip(runs, pool.map(work, [r for _, r in runs]), strict=True):
                results[number] += found
        except BaseException:
            stop.set()  # what waits in the pool ends at once
            raise
    return [bytes(one) for one in results]


async def in_thread(act: Callable[[threading.Event], T]) -> T:
    """``act(stop)`` in a thread; cancelled, it is asked to end rather than waited for."""
    stop = threading.Event()
    try:
        return await asyncio.to_thread(act, stop)
    finally:
        stop.set()


def _runs(whole: Stretch) -> Iterator[Stretch]:
    for done in range(0, whole.nbytes, _RUN_BYTES):
        length = min(_RUN_BYTES, whole.nbytes - done)
        yield Stretch(whole.path, whole.offset + done, length)
