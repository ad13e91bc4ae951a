"""Progress of work measured in bytes."""

import threading
from dataclasses import dataclass, field


@dataclass(slots=True)
class Progress:
    """Bytes done and in total; updated from any thread."""

    done: int = 0
    total: int = 0
    #: Bytes of ``done`` that existed before the transfer.
    existing: int = 0
    #: Current source: a peer id or ``hub``; empty before the first.
    source: str = ""
    #: Progress of another transfer that has to finish first.
    prerequisite: "Progress | None" = field(default=None, repr=False, compare=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    def add_bytes(self, nbytes: int) -> None:
        """Count ``nbytes`` as done."""
        with self._lock:
            self.done += nbytes

    def add_existing(self, nbytes: int) -> None:
        """Count ``nbytes`` as done before the transfer."""
        with self._lock:
            self.done += nbytes
            self.existing += nbytes

    def set_source(self, source: str) -> None:
        """Set the current source."""
        self.source = source

    def merge_prerequisite(self) -> None:
        """Count the finished prerequisite as part of this work."""
        ahead, self.prerequisite = self.prerequisite, None
        if ahead is not None:
            self.add_bytes(ahead.done)
            self.total += ahead.done

    @property
    def totals(self) -> tuple[int, int]:
        """Bytes done and in total, of the prerequisite first. The former never decreases."""
        if self.prerequisite is not None:
            return self.prerequisite.done, self.prerequisite.total
        return self.done, self.total

    def __str__(self) -> str:
        return f"{self.done / 1e6:.0f} of {self.total / 1e6:.0f} MB"
