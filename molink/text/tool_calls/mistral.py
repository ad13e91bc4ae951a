"""Parses tool calls of Mistral: ``[TOOL_CALLS][{"name": …, "arguments": {…}}]``.

Tokenizers from v11 on write ``[TOOL_CALLS]name[ARGS]{…}`` per call, optionally with ``[CALL_ID]…``.
"""

import re
from typing import Literal

from molink.text.tool_calls.base import AnswerPart, AnswerPartBuilder, MarkerFinder
from molink.text.tool_calls.call_reader import CallListReader, JsonValueScanner

OPEN_TAG = "[TOOL_CALLS]"
MARKERS = frozenset({OPEN_TAG, "[CALL_ID]", "[ARGS]"})

#: Maximum characters between the tag and a call's arguments.
_MAX_HEADER = 256
_HEADER_PATTERN = re.compile(r"\s*([\w.-]+)\s*(?:\[CALL_ID\][^\[\]{]*)?(?:\[ARGS\])?\s*")


class MistralParser:
    """Implements :class:`molink.text.tool_calls.base.AnswerParser`."""

    is_reasoning = False

    def __init__(self, names: frozenset[str]) -> None:
        self._names = names
        self._parts = AnswerPartBuilder()
        self._finder = MarkerFinder((OPEN_TAG,))
        self._calls = CallListReader(names, "")
        self._value = JsonValueScanner()
        #: ``head`` follows the tag; then ``named`` with arguments, or ``listed`` objects.
        self._state: Literal["outside", "head", "named", "listed"] = "outside"
        #: The tag and what follows; text if no call follows.
        self._held = ""

    def parse_delta(self, text: str) -> list[AnswerPart]:
        pos = 0
        while pos < len(text):
            match self._state:
                case "outside":
                    pos = self._read_content(text, pos)
                case "head":
                    pos = self._read_header(text, pos)
                case "named":
                    pos = self._read_named_call(text, pos)
                case "listed":
                    pos = self._calls.parse_text(text, pos, self._parts)
                    if self._calls.is_done:
                        self._state = "outside"
        return self._parts.drain_parts()

    def finish_parsing(self) -> list[AnswerPart]:
        if self._state == "head":
            self._parts.add_text(self._held)
        elif self._state == "listed":
            self._calls.finish_parsing(self._parts)
        self._parts.add_text(self._finder.flush_text())
        return self._parts.finish_parts()

    def _read_content(self, text: str, pos: int) -> int:
        before, marker, pos = self._finder.find_marker(text, pos)
        self._parts.add_text(before)
        if marker is not None:
            self._state, self._held = "head", marker
        return pos

    def _read_header(self, text: str, pos: int) -> int:
        char = text[pos]
        blank = not self._held.removeprefix(OPEN_TAG).strip()
        if char == "{":
            self._open_object(blank)
            return pos
        if len(self._held) == _MAX_HEADER:
            self._abandon_call()
            return pos
        self._held += char
        if char == "[" and blank:
            self._expect_call()
        return pos + 1

    def _open_object(self, blank: bool) -> None:
        """Begin the arguments of a named call, or a single call object."""
        head = _HEADER_PATTERN.fullmatch(self._held, len(OPEN_TAG))
        if head is not None and head[1] in self._names:
            self._parts.begin_call(head[1])
            self._value, self._state = JsonValueScanner(), "named"
        elif blank:
            self._expect_call()
        else:
            self._abandon_call()

    def _read_named_call(self, text: str, pos: int) -> int:
        end, ended = self._value.scan_text(text, pos)
        self._parts.add_arguments(text[pos:end])
        if ended:
            self._parts.end_call()
            self._state = "outside"
        return end

    def _expect_call(self) -> None:
        self._calls, self._state = CallListReader(self._names, self._held), "listed"

    def _abandon_call(self) -> None:
        self._parts.add_text(self._held)
        self._state = "outside"
