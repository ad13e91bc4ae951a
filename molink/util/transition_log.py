"""A bounded log of a decider's transitions, for its errors (dask calls it a story)."""

from collections import deque


class TransitionLog:
    """The last transitions of a decider, oldest first.

    An entry is formatted only when it is read, which keeps logging cheap.
    """

    __slots__ = ("_decimals", "_entries")

    def __init__(self, length: int = 128, decimals: int = 6) -> None:
        """``decimals`` is the number of decimals of times in the text."""
        self._decimals = decimals
        self._entries: deque[tuple[float, str, tuple[object, ...]]] = deque(maxlen=length)

    def add_entry(self, now: float, what: str, *facts: object) -> None:
        """Log transition ``what`` at time ``now`` (seconds)."""
        self._entries.append((now, what, facts))

    def format_lines(self) -> tuple[str, ...]:
        """Return the log as text, one line per transition."""
        return tuple(
            f"{now:.{self._decimals}f} {what} {' '.join(map(str, facts))}".rstrip()
            for now, what, facts in self._entries
        )
