"""Parses calls in a JSON list after a marker: Granite 3 and Phi-4-mini.

Granite writes ``<|tool_call|>[{"name": …, "arguments": {…}}]``; Phi-4-mini writes the same, or uses
``functools`` as the marker. ``<|/tool_call|>`` may follow the list.
"""

from typing import Literal

from molink.text.tool_calls.base import AnswerPart, AnswerPartBuilder, MarkerFinder
from molink.text.tool_calls.call_reader import CallListReader

OPEN, CLOSE = "<|tool_call|>", "<|/tool_call|>"
MARKERS = frozenset({OPEN, CLOSE})
#: Phi-4-mini's marker, including the bracket, since the word alone may be text.
FUNCTOOLS = "functools["
#: Maximum white space characters between marker and list.
_MAX_GAP = 64


class ListedCallParser:
    """Implements :class:`molink.text.tool_calls.base.AnswerParser`."""

    is_reasoning = False

    def __init__(self, names: frozenset[str], *markers: str) -> None:
        """Calls follow one of ``markers``."""
        self._names = names
        self._parts = AnswerPartBuilder()
        self._finder = MarkerFinder((*markers, CLOSE))
        self._calls = CallListReader(names, "")
        #: ``head`` follows a marker.
        self._state: Literal["outside", "head", "calls"] = "outside"
        #: The marker and white space; text if no call follows.
        self._held = ""
        self._awaits_close = False

    def parse_delta(self, text: str) -> list[AnswerPart]:
        pos = 0
        while pos < len(text):
            match self._state:
                case "outside":
                    pos = self._read_content(text, pos)
                case "head":
                    pos = self._read_opening(text, pos)
                case "calls":
                    pos = self._calls.parse_text(text, pos, self._parts)
                    if self._calls.is_done:
                        self._awaits_close |= self._calls.has_calls
                        self._state = "outside"
        return self._parts.drain_parts()

    def finish_parsing(self) -> list[AnswerPart]:
        if self._state == "head":
            self._parts.add_text(self._held)
        elif self._state == "calls":
            self._calls.finish_parsing(self._parts)
        self._parts.add_text(self._finder.flush_text())
        return self._parts.finish_parts()

    def _read_content(self, text: str, pos: int) -> int:
        before, marker, pos = self._finder.find_marker(text, pos)
        self._parts.add_text(before)
        if marker == CLOSE:
            if not self._awaits_close:
                self._parts.add_text(marker)
            self._awaits_close = False
        elif marker is not None:
            self._held, self._state = marker, "head"
            if marker.endswith("["):
                self._expect_call()
        return pos

    def _read_opening(self, text: str, pos: int) -> int:
        char = text[pos]
        if char == "{":
            self._expect_call()
            return pos
        if (not char.isspace() and char != "[") or len(self._held) >= _MAX_GAP:
            self._parts.add_text(self._held)
            self._state = "outside"
            return pos
        self._held += char
        if char == "[":
            self._expect_call()
        return pos + 1

    def _expect_call(self) -> None:
        self._calls, self._state = CallListReader(self._names, self._held), "calls"
