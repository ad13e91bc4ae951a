"""Finds stop strings across token boundaries."""

from collections.abc import Sequence


class StopStringFinder:
    """Cuts a stream of text at the first stop string.

    Text is emitted as soon as no stop string can begin in it. The match does not depend on how text
    is split: it is the stop string that ends first, and the longest of those that end there. Cost
    is O(characters × stop strings), and near zero for text without a stop string's first character.
    """

    def __init__(self, stops: Sequence[str] = ()) -> None:
        self._stops = tuple(dict.fromkeys(stop for stop in stops if stop))
        self._failures = tuple(_failure_links(stop) for stop in self._stops)
        #: Matched prefix length of each stop string at the end of the text.
        self._states = [0] * len(self._stops)
        self._firsts = tuple({stop[0] for stop in self._stops})
        self._held = ""
        #: The stop string that was found; nothing is emitted after it.
        self.matched: str | None = None

    def push_text(self, text: str) -> str:
        """Append ``text``; return what can be emitted."""
        if not self._stops:
            return text
        if self.matched is not None:
            return ""
        if not self._held and not any(first in text for first in self._firsts):
            return text
        buffer = self._held + text
        for end, char in enumerate(text, start=len(self._held) + 1):
            self._advance_states(char)
            if self.matched is not None:
                self._held = ""
                return buffer[: end - len(self.matched)]
        keep = max(self._states)
        self._held = buffer[len(buffer) - keep :]
        return buffer[: len(buffer) - keep]

    def flush_text(self) -> str:
        """Return the held text at the end."""
        held, self._held = self._held, ""
        self._states = [0] * len(self._stops)
        return held

    def _advance_states(self, char: str) -> None:
        for index, stop in enumerate(self._stops):
            state = self._states[index]
            while state and stop[state] != char:
                state = self._failures[index][state - 1]
            if stop[state] == char:
                state += 1
            self._states[index] = state
            if state == len(stop) and len(stop) > len(self.matched or ""):
                self.matched = stop


def _failure_links(pattern: str) -> tuple[int, ...]:
    """Knuth–Morris–Pratt: length of the longest proper border of each prefix."""
    links = [0] * len(pattern)
    border = 0
    for index in range(1, len(pattern)):
        while border and pattern[border] != pattern[index]:
            border = links[border - 1]
        if pattern[border] == pattern[index]:
            border += 1
        links[index] = border
    return tuple(links)
