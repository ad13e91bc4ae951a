"""How far work on many bytes is."""

import threading
from dataclasses import dataclass, field


@dataclass(slots=True)
class Progress:
    """Bytes that are done, of all; kept up to date while the work goes on, from any thread."""

    done: int = 0
    total: int = 0
    #: Of ``done``, what lay here before.
    kept: int = 0
    #: Who sends the bytes: the id of a peer, or ``hub``; empty if nobody does yet.
    source: str = ""
    #: Work of somebody else that has to be done first.
    ahead: "Progress | None" = field(default=None, repr=False, compare=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    def add(self, nbytes: int) -> None:
        """So many more are done."""
        with self._lock:
            self.done += nbytes

    def keep(self, nbytes: int) -> None:
        """So many lie here already."""
        with self._lock:
            self.done += nbytes
            self.kept += nbytes

    def comes_from(self, source: str) -> None:
        """Who sends the bytes from now on."""
        self.source = source

    def begin(self) -> None:
        """What was to be done first is: from now on it counts as ours."""
        ahead, self.ahead = self.ahead, None
        if ahead is not None:
            self.add(ahead.done)
            self.total += ahead.done

    @property
    def shown(self) -> tuple[int, int]:
        """What is done, of all, with what has to be done first; the former never falls."""
        if self.ahead is not None:
            return self.ahead.done, self.ahead.total
        return self.done, self.total

    def __str__(self) -> str:
        return f"{self.done / 1e6:.0f} of {self.total / 1e6:.0f} MB"
