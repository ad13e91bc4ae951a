"""A shard of which only some has come: kept over failures and restarts, and hashed as it comes."""

import hashlib
import os
import threading
from collections.abc import Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import BinaryIO

from molink.checkpoint.manifest import Shard
from molink.files import patiently
from molink.swarm.artifacts.fetch_plan import Piece, cut
from molinkd.peer.artifacts.hashing import Stamp
from molinkd.peer.artifacts.library import stamp_of
from molinkd.peer.artifacts.stored import note

#: After so many pieces it is written down which are here: what comes later may come twice.
_NOTE_EVERY = 16
#: How the name of the note of the pieces that are here ends.
_PIECES = ".pieces"
#: With each that comes so many are hashed at most, where a gap has held up the hash.
_HASH_AT_ONCE = 4


#: What drafts of files that somebody waits for are called, and those of copies.
_KINDS = ("shard", "shard-copy")


def draft_bytes(paths: Iterable[Path]) -> int:
    """Bytes that the drafts of these shards take, but for copies."""
    drafts = [path.with_name(f".{path.name}.{_KINDS[0]}") for path in paths]
    return sum(draft.stat().st_size for draft in drafts if draft.is_file())


def remove_drafts(path: Path) -> None:
    """Remove what is left of drafts of a shard that is whole; what is in use may stay."""
    for kind in _KINDS:
        for end in ("", _PIECES):
            with suppress(OSError):
                path.with_name(f".{path.name}.{kind}{end}").unlink(missing_ok=True)


class ShardDraft:
    """The pieces of a shard that are here, in a file beside ``path``. Blocks on the disk.

    Pieces may come in any order and from several threads. Those from the first one on are hashed
    once they are without a gap.
    """

    def __init__(self, path: Path, shard: Shard, *, copy: bool = False) -> None:
        """``copy``: nobody waits for it, and a draft for somebody who does may be beside it."""
        self._path = path
        self._before = stamp_of(path)
        self._data = path.with_name(f".{path.name}.{_KINDS[copy]}")
        self._noted = self._data.with_name(f"{self._data.name}{_PIECES}")
        self._shard = shard
        self._pieces = tuple(cut(shard))
        self._lock = threading.Lock()
        self._file: BinaryIO | None = None
        self._closed = False
        self._unnoted = 0
        self._reset()
        self._have |= self._recall()

    def _reset(self) -> None:
        #: Numbers of pieces.
        self._have = set[int]()
        #: Who sent those that came in this run of the daemon.
        self._senders: dict[int, str] = {}
        self._hash = hashlib.sha256()
        self._hashed = 0

    @property
    def pieces(self) -> int:
        """How many there are."""
        return len(self._pieces)

    @property
    def nbytes(self) -> int:
        """Bytes that are here."""
        return sum(self._pieces[number].length for number in self._have)

    @property
    def whole(self) -> bool:
        """Whether all pieces are here, and hashed."""
        return self._hashed == len(self._pieces)

    @property
    def right(self) -> bool:
        """Whether the whole shard is what the hub says."""
        return self.whole and self._hash.digest() == self._shard.sha256

    def missing(self) -> list[Piece]:
        """The pieces that are still to come, in order."""
        return [piece for number, piece in enumerate(self._pieces) if number not in self._have]

    def write(self, piece: Piece, data: bytes, sender: str) -> None:
        """A piece has come; too late where the draft was closed."""
        number = piece.index // self._pieces[0].count
        with self._lock:
            if self._closed:
                return
            file = self._opened()
            file.seek(piece.target)
            file.write(data)
            self._have.add(number)
            self._senders[number] = sender
            for _ in range(_HASH_AT_ONCE):
                self._hash_next(data if self._hashed == number else None)
            self._unnoted += 1
            if self._unnoted >= _NOTE_EVERY:
                self._note()

    def hash_next(self) -> int:
        """Hash the next piece that is here; its bytes, or 0 if none is without a gap before it."""
        with self._lock:
            return self._hash_next()

    def sent(self) -> dict[int, tuple[str, bytes]]:
        """Who sent which piece, and the SHA-256 of it; only those that came in this run."""
        with self._lock:
            return {number: (who, self._digest(number)) for number, who in self._senders.items()}

    def differs(self, sent: dict[int, tuple[str, bytes]]) -> set[str]:
        """Who sent pieces, as :meth:`sent` had them, that are other ones now."""
        with self._lock:
            return {who for n, (who, digest) in sent.items() if digest != self._digest(n)}

    def close(self) -> None:
        """Keep what is here for another time."""
        with self._lock:
            self._closed = True
            if self._file is not None:
                self._note()
                self._file.close()
                self._file = None

    def finish(self) -> None:
        """It is whole and right: it becomes the file, unless another draft has meanwhile."""
        self.close()
        if stamp_of(self._path) == self._before:
            note(self._path.parent, self._path.name, Stamp.of(self._data))
            patiently(partial(self._data.replace, self._path))
        remove_drafts(self._path)

    def discard(self) -> None:
        """Throw away what is here."""
        with self._lock:
            if self._file is not None:
                self._file.close()
                self._file = None
            self._reset()
        for path in (self._noted, self._data):
            patiently(partial(path.unlink, missing_ok=True))

    def _hash_next(self, data: bytes | None = None) -> int:
        """``data`` is the next piece, if that is at hand."""
        if self._hashed not in self._have:
            return 0
        piece = self._pieces[self._hashed]
        self._hash.update(self._read(piece) if data is None else data)
        self._hashed += 1
        return piece.length

    # --- on disk ---

    def _opened(self) -> BinaryIO:
        if self._file is None:
            self._file = self._data.open("r+b" if self._data.is_file() else "w+b")
        return self._file

    def _read(self, piece: Piece) -> bytes:
        file = self._opened()
        file.seek(piece.target)
        return file.read(piece.length)

    def _digest(self, number: int) -> bytes:
        return hashlib.sha256(self._read(self._pieces[number])).digest()

    def _note(self) -> None:
        """First the bytes, then that they are here."""
        assert self._file is not None
        self._file.flush()
        os.fsync(self._file.fileno())
        marks = bytearray(-(-len(self._pieces) // 8))
        for number in self._have:
            marks[number // 8] |= 1 << number % 8
        draft = self._noted.with_name(f"{self._noted.name}.new")
        draft.write_bytes(marks)
        patiently(lambda: draft.replace(self._noted))
        self._unnoted = 0

    def _recall(self) -> set[int]:
        """What is here since an earlier time; nothing if that can't be told."""
        count = len(self._pieces)
        try:
            marks, size = self._noted.read_bytes(), self._data.stat().st_size
        except OSError:
            return set()
        if len(marks) != -(-count // 8):
            return set()
        found = {number for number in range(count) if marks[number // 8] >> number % 8 & 1}
        return {n for n in found if self._pieces[n].target + self._pieces[n].length <= size}
