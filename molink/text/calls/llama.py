"""Calls of Llama 3.1 and later: ``{"name": …, "parameters": {…}}``, alone or behind a tag.

The answer *is* the call, or calls with ``;`` between them. Behind ``<|python_tag|>`` there may be a
program instead: that comes out as text.
"""

from typing import Literal

from molink.text.calls.base import MarkerFinder, Part, Parts
from molink.text.calls.call_reader import CallReader

TAG = "<|python_tag|>"
MARKERS = frozenset({TAG})


class LlamaParser:
    """Implements :class:`molink.text.calls.base.AnswerParser`."""

    thinking = False

    def __init__(self, names: frozenset[str]) -> None:
        self._names = names
        self._parts = Parts()
        self._finder = MarkerFinder((TAG,))
        self._reader = CallReader(names)
        #: Where a call may begin without its tag: first, and after another one.
        self._state: Literal["first", "after", "outside", "call"] = "first"
        #: What was in front of the call that is being read: text, should it be none.
        self._opening = ""

    def push(self, text: str) -> list[Part]:
        """See :class:`AnswerParser`."""
        pos = 0
        while pos < len(text):
            if self._state == "call":
                pos = self._reader.push(text, pos, self._parts)
                self._settle()
            elif self._state == "outside":
                before, marker, pos = self._finder.push(text, pos)
                self._parts.text(before)
                if marker is not None:
                    self._begin(marker)
            else:
                pos = self._between(text, pos)
        return self._parts.take()

    def finish(self) -> list[Part]:
        """See :class:`AnswerParser`."""
        if self._state == "call" and self._reader.state == "head":
            self._parts.text(self._opening + self._reader.held)
        self._parts.text(self._finder.flush())
        return self._parts.finish()

    def _between(self, text: str, pos: int) -> int:
        char = text[pos]
        if char.isspace():
            self._parts.text(char)
        elif char == ";" and self._state == "after":
            self._begin(char)
        elif char == "{":
            self._begin("")
            return pos
        else:
            self._state = "outside"
            return pos
        return pos + 1

    def _begin(self, opening: str) -> None:
        self._reader, self._opening, self._state = CallReader(self._names), opening, "call"

    def _settle(self) -> None:
        if self._reader.state == "done":
            self._state = "after"
        elif self._reader.state == "broken":
            self._parts.text(self._opening + self._reader.held)
            self._state = "outside"
