"""Parses calls in a JSON list behind a marker: Granite 3 and Phi-4-mini.

Granite writes ``<|tool_call|>[{"name": …, "arguments": {…}}]``; Phi-4-mini the same, or with
``functools`` as the marker. ``<|/tool_call|>`` may follow the list.
"""

from typing import Literal

from molink.text.tool_calls.base import AnswerPart, AnswerPartBuilder, MarkerFinder
from molink.text.tool_calls.call_reader import ToolCallReader

OPEN, CLOSE = "<|tool_call|>", "<|/tool_call|>"
MARKERS = frozenset({OPEN, CLOSE})
#: Phi-4-mini's marker, with the bracket, since it is a word too.
FUNCTOOLS = "functools["
#: Maximum characters, white space, between marker and list.
_MAX_GAP = 64


class ListedCallParser:
    """Implements :class:`molink.text.tool_calls.base.AnswerParser`."""

    is_reasoning = False

    def __init__(self, names: frozenset[str], *markers: str) -> None:
        """Calls follow one of ``markers``."""
        self._names = names
        self._parts = AnswerPartBuilder()
        self._finder = MarkerFinder((*markers, CLOSE))
        self._reader = ToolCallReader(names)
        #: ``head`` follows a marker, ``between`` a call.
        self._state: Literal["outside", "head", "call", "between"] = "outside"
        #: Text to emit if no call follows.
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
                case "call":
                    pos = self._reader.parse_text(text, pos, self._parts)
                    self._settle_call()
                case "between":
                    pos = self._read_separator(text, pos)
        return self._parts.drain_parts()

    def finish_parsing(self) -> list[AnswerPart]:
        if self._state == "head":
            self._parts.add_text(self._held)
        elif self._state == "call" and self._reader.state == "head":
            self._parts.add_text(self._held + self._reader.held)
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
            self._abandon_call()
            return pos
        self._held += char
        if char == "[":
            self._expect_call()
        return pos + 1

    def _expect_call(self) -> None:
        self._reader, self._state = ToolCallReader(self._names), "call"

    def _settle_call(self) -> None:
        if self._reader.state == "done":
            self._state, self._awaits_close, self._held = "between", True, ""
        elif self._reader.state == "broken":
            self._held += self._reader.held
            self._abandon_call()

    def _abandon_call(self) -> None:
        self._parts.add_text(self._held)
        self._held, self._state = "", "outside"

    def _read_separator(self, text: str, pos: int) -> int:
        char = text[pos]
        if char.isspace():
            self._parts.add_text(char)
            return pos + 1
        self._state = "outside"
        if char == ",":
            self._held = char
            self._expect_call()
        return pos + (char in ",]")
