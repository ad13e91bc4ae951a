"""A bounded log of transitions, for the errors of stateful deciders."""

from collections import deque


class Story:
    """The last transitions of a decider, oldest first.

    An entry is a word and its facts; it becomes text only when somebody reads it, so that logging
    costs next to nothing.
    """

    def __init__(self, length: int = 128) -> None:
        self._entries: deque[tuple[float, str, tuple[object, ...]]] = deque(maxlen=length)

    def add_entry(self, now: float, what: str, *facts: object) -> None:
        """Note that ``what`` happened at ``now`` (seconds)."""
        self._entries.append((now, what, facts))

    def format_lines(self) -> tuple[str, ...]:
        """The story as text, a line per transition."""
        return tuple(
            f"{now:.6f} {what} {' '.join(map(str, facts))}".rstrip()
            for now, what, facts in self._entries
        )
