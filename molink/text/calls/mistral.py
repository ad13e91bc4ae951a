"""Calls of Mistral: ``[TOOL_CALLS][{"name": …, "arguments": {…}}]``.

Tokenizers from v11 on write each as ``[TOOL_CALLS]name[ARGS]{…}``, or with ``[CALL_ID]…`` between.
"""

import re
from typing import Literal

from molink.text.calls.base import MarkerFinder, Part, Parts
from molink.text.calls.call_reader import CallReader, JsonValue

OPEN = "[TOOL_CALLS]"
MARKERS = frozenset({OPEN, "[CALL_ID]", "[ARGS]"})

#: Most characters between the tag and a call's arguments.
_MAX_HEAD = 256
_HEAD = re.compile(r"\s*([\w.-]+)\s*(?:\[CALL_ID\][^\[\]{]*)?(?:\[ARGS\])?\s*")


class MistralParser:
    """Implements :class:`molink.text.calls.base.AnswerParser`."""

    thinking = False

    def __init__(self, names: frozenset[str]) -> None:
        self._names = names
        self._parts = Parts()
        self._finder = MarkerFinder((OPEN,))
        self._reader = CallReader(names)
        self._value = JsonValue()
        #: ``head``: behind the tag; then ``named`` with its arguments, or a ``list`` of objects.
        self._state: Literal["outside", "head", "named", "listed", "between"] = "outside"
        #: What turns out to be text if no call comes.
        self._held = ""

    def push(self, text: str) -> list[Part]:
        """See :class:`AnswerParser`."""
        pos = 0
        while pos < len(text):
            match self._state:
                case "outside":
                    pos = self._outside(text, pos)
                case "head":
                    pos = self._head(text, pos)
                case "named":
                    pos = self._named(text, pos)
                case "listed":
                    pos = self._reader.push(text, pos, self._parts)
                    self._settle()
                case "between":
                    pos = self._between(text, pos)
        return self._parts.take()

    def finish(self) -> list[Part]:
        """See :class:`AnswerParser`."""
        if self._state == "head":
            self._parts.text(self._held)
        elif self._state == "listed" and self._reader.state == "head":
            self._parts.text(self._held + self._reader.held)
        self._parts.text(self._finder.flush())
        return self._parts.finish()

    def _outside(self, text: str, pos: int) -> int:
        before, marker, pos = self._finder.push(text, pos)
        self._parts.text(before)
        if marker is not None:
            self._state, self._held = "head", marker
        return pos

    def _head(self, text: str, pos: int) -> int:
        char = text[pos]
        blank = not self._held.removeprefix(OPEN).strip()
        if char == "{":
            self._open_object(blank)
            return pos
        if len(self._held) == _MAX_HEAD:
            self._give_up()
            return pos
        self._held += char
        if char == "[" and blank:
            self._expect()
        return pos + 1

    def _open_object(self, blank: bool) -> None:
        """The arguments of a name begin, or a whole call that isn't in a list."""
        head = _HEAD.fullmatch(self._held, len(OPEN))
        if head is not None and head[1] in self._names:
            self._parts.begin(head[1])
            self._value, self._state = JsonValue(), "named"
        elif blank:
            self._expect()
        else:
            self._give_up()

    def _named(self, text: str, pos: int) -> int:
        end, ended = self._value.push(text, pos)
        self._parts.arguments(text[pos:end])
        if ended:
            self._parts.end()
            self._state = "outside"
        return end

    def _expect(self) -> None:
        self._reader, self._state = CallReader(self._names), "listed"

    def _settle(self) -> None:
        if self._reader.state == "done":
            self._state = "between"
        elif self._reader.state == "broken":
            self._held += self._reader.held
            self._give_up()

    def _give_up(self) -> None:
        self._parts.text(self._held)
        self._state = "outside"

    def _between(self, text: str, pos: int) -> int:
        char = text[pos]
        if char.isspace():
            self._parts.text(char)
            return pos + 1
        self._state = "outside"
        if char == ",":
            self._held = char
            self._expect()
        return pos + (char in ",]")
