"""A bounded transition log for the errors of stateful deciders (dask calls it a story)."""

from collections import deque


class Story:
    """The last transitions of a decider, oldest first.

    An entry is formatted only when it is read, which keeps logging cheap.
    """

    __slots__ = ("_entries",)

    def __init__(self, length: int = 128) -> None:
        self._entries: deque[tuple[float, str, tuple[object, ...]]] = deque(maxlen=length)

    def add_entry(self, now: float, what: str, *facts: object) -> None:
        """Log transition ``what`` at time ``now`` (seconds)."""
        self._entries.append((now, what, facts))

    def format_lines(self) -> tuple[str, ...]:
        """The log as text, one line per transition."""
        return tuple(
            f"{now:.6f} {what} {' '.join(map(str, facts))}".rstrip()
            for now, what, facts in self._entries
        )
