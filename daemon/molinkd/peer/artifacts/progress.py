"""How far work on many bytes is."""

import threading
from dataclasses import dataclass, field


@dataclass(slots=True)
class Progress:
    """Bytes that are done, of all; kept up to date while the work goes on, from any thread."""

    done: int = 0
    total: int = 0
    #: Of ``done``, what lay here before.
    existing: int = 0
    #: Who sends the bytes: the id of a peer, or ``hub``; empty if nobody does yet.
    source: str = ""
    #: Work of somebody else that has to be done first.
    prerequisite: "Progress | None" = field(default=None, repr=False, compare=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    def add_bytes(self, nbytes: int) -> None:
        """So many more are done."""
        with self._lock:
            self.done += nbytes

    def add_existing(self, nbytes: int) -> None:
        """So many lie here already."""
        with self._lock:
            self.done += nbytes
            self.existing += nbytes

    def set_source(self, source: str) -> None:
        """Who sends the bytes from now on."""
        self.source = source

    def merge_prerequisite(self) -> None:
        """What was to be done first is: from now on it counts as ours."""
        ahead, self.prerequisite = self.prerequisite, None
        if ahead is not None:
            self.add_bytes(ahead.done)
            self.total += ahead.done

    @property
    def totals(self) -> tuple[int, int]:
        """What is done, of all, with what has to be done first; the former never falls."""
        if self.prerequisite is not None:
            return self.prerequisite.done, self.prerequisite.total
        return self.done, self.total

    def __str__(self) -> str:
        return f"{self.done / 1e6:.0f} of {self.total / 1e6:.0f} MB"
