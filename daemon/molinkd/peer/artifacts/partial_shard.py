"""A partly fetched shard that survives failures and restarts; hashed as it arrives."""

import hashlib
import os
import threading
from collections.abc import Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import BinaryIO

from molink.checkpoint.manifest import ShardEntry
from molink.files import resolve_inside, retry_while_busy
from molink.swarm.artifacts.fetch_plan import ChunkRun, split_part
from molinkd.peer.artifacts.hashing import FileStamp
from molinkd.peer.artifacts.model_repository import file_stamp
from molinkd.peer.artifacts.stored_model import record_verified_shard

#: Runs between two updates of the index file; later runs are fetched again after a crash.
_INDEX_INTERVAL = 16
#: Suffix of the index file, a bitmap of the runs that are present.
_INDEX_SUFFIX = ".pieces"
#: Maximum number of runs hashed per write, once a gap has closed.
_MAX_HASHES_PER_WRITE = 4


#: Suffixes of partial files: of urgent transfers, and of replication.
_SUFFIXES = ("shard", "shard-copy")


def partial_bytes(paths: Iterable[Path]) -> int:
    """Bytes on disk of the partial files of these shards, without replication's."""
    drafts = [path.with_name(f".{path.name}.{_SUFFIXES[0]}") for path in paths]
    return sum(draft.stat().st_size for draft in drafts if draft.is_file())


def remove_partials(path: Path) -> None:
    """Remove partial files of a complete shard, except those in use."""
    for kind in _SUFFIXES:
        for end in ("", _INDEX_SUFFIX):
            with suppress(OSError):
                path.with_name(f".{path.name}.{kind}{end}").unlink(missing_ok=True)


class PartialShard:
    """The runs of a shard that have arrived, in a file next to its place in ``folder``. Blocks.

    Runs arrive in any order from several threads. The contiguous prefix is hashed incrementally.
    """

    def __init__(self, folder: Path, shard: ShardEntry, *, copy: bool = False) -> None:
        """``copy`` selects replication's file, which may coexist with an urgent transfer's.

        Raises:
            OSError: The shard's name leads out of ``folder``.
        """
        self._path = path = resolve_inside(folder, folder / shard.name)
        self._initial_stamp = file_stamp(path)
        self._data_path = path.with_name(f".{path.name}.{_SUFFIXES[copy]}")
        self._index_path = self._data_path.with_name(f"{self._data_path.name}{_INDEX_SUFFIX}")
        self._shard = shard
        self._runs = tuple(split_part(shard))
        self._lock = threading.Lock()
        self._file: BinaryIO | None = None
        self._is_closed = False
        self._num_unsaved = 0
        self._clear()
        self._present |= self._load_index()

    def _clear(self) -> None:
        #: Numbers of the runs that are present.
        self._present = set[int]()
        #: Sender of each run received since the daemon started.
        self._senders: dict[int, str] = {}
        self._hash = hashlib.sha256()
        self._num_hashed = 0

    @property
    def num_runs(self) -> int:
        """Number of runs of the whole shard."""
        return len(self._runs)

    @property
    def nbytes(self) -> int:
        """Bytes present."""
        return sum(self._runs[number].nbytes for number in self._present)

    @property
    def is_complete(self) -> bool:
        """Whether all runs are present and hashed."""
        return self._num_hashed == len(self._runs)

    @property
    def is_valid(self) -> bool:
        """Whether the complete shard has the hub's SHA-256."""
        return self.is_complete and self._hash.digest() == self._shard.sha256

    def missing_runs(self) -> list[ChunkRun]:
        """The missing runs, in order."""
        return [run for number, run in enumerate(self._runs) if number not in self._present]

    def write_run(self, run: ChunkRun, data: bytes, sender: str) -> None:
        """Store a run; ignored after :meth:`close`."""
        number = run.index // self._runs[0].count
        with self._lock:
            if self._is_closed:
                return
            file = self._open_file()
            file.seek(run.offset)
            file.write(data)
            self._present.add(number)
            self._senders[number] = sender
            for _ in range(_MAX_HASHES_PER_WRITE):
                self._update_hash(data if self._num_hashed == number else None)
            self._num_unsaved += 1
            if self._num_unsaved >= _INDEX_INTERVAL:
                self._save_index()

    def hash_next(self) -> int:
        """Hash the next contiguous run; returns its length in bytes, or 0 if it is missing."""
        with self._lock:
            return self._update_hash()

    def sender_digests(self) -> dict[int, tuple[str, bytes]]:
        """Sender and SHA-256 of each run received since the daemon started."""
        with self._lock:
            return {number: (who, self._digest(number)) for number, who in self._senders.items()}

    def find_altered(self, sent: dict[int, tuple[str, bytes]]) -> set[str]:
        """Senders in ``sent`` whose runs differ from the current contents."""
        with self._lock:
            return {who for n, (who, digest) in sent.items() if digest != self._digest(n)}

    def close(self) -> None:
        """Keep the present runs for later."""
        with self._lock:
            self._is_closed = True
            if self._file is not None:
                self._save_index()
                self._file.close()
                self._file = None

    def commit_shard(self) -> None:
        """Rename the valid partial file to its final name, unless another transfer was first."""
        self.close()
        if file_stamp(self._path) == self._initial_stamp:
            record_verified_shard(
                self._path.parent, self._path.name, FileStamp.of_path(self._data_path)
            )
            retry_while_busy(partial(self._data_path.replace, self._path))
        remove_partials(self._path)

    def discard_runs(self) -> None:
        """Delete all runs."""
        with self._lock:
            if self._file is not None:
                self._file.close()
                self._file = None
            self._clear()
        for path in (self._index_path, self._data_path):
            retry_while_busy(partial(path.unlink, missing_ok=True))

    def _update_hash(self, data: bytes | None = None) -> int:
        """Hash the next run, from ``data`` if given."""
        if self._num_hashed not in self._present:
            return 0
        run = self._runs[self._num_hashed]
        self._hash.update(self._read_run(run) if data is None else data)
        self._num_hashed += 1
        return run.nbytes

    # --- on disk ---

    def _open_file(self) -> BinaryIO:
        if self._file is None:
            self._file = self._data_path.open("r+b" if self._data_path.is_file() else "w+b")
        return self._file

    def _read_run(self, run: ChunkRun) -> bytes:
        file = self._open_file()
        file.seek(run.offset)
        return file.read(run.nbytes)

    def _digest(self, number: int) -> bytes:
        return hashlib.sha256(self._read_run(self._runs[number])).digest()

    def _save_index(self) -> None:
        """Flush the data before the index that claims it is present."""
        assert self._file is not None
        self._file.flush()
        os.fsync(self._file.fileno())
        marks = bytearray(-(-len(self._runs) // 8))
        for number in self._present:
            marks[number // 8] |= 1 << number % 8
        draft = self._index_path.with_name(f"{self._index_path.name}.new")
        draft.write_bytes(marks)
        retry_while_busy(lambda: draft.replace(self._index_path))
        self._num_unsaved = 0

    def _load_index(self) -> set[int]:
        """Numbers of the runs present since an earlier run of the daemon; empty if unknown."""
        count = len(self._runs)
        try:
            marks, size = self._index_path.read_bytes(), self._data_path.stat().st_size
        except OSError:
            return set()
        if len(marks) != -(-count // 8):
            return set()
        found = {number for number in range(count) if marks[number // 8] >> number % 8 & 1}
        return {n for n in found if self._runs[n].offset + self._runs[n].nbytes <= size}
