"""Parses tool calls of Llama 3.1 and later: ``{"name": …, "parameters": {…}}``, with an optional
tag.

The answer is the call, or several separated by ``;``. After ``<|python_tag|>`` there may be a
program instead, which is emitted as text.
"""

from typing import Literal

from molink.text.tool_calls.base import AnswerPart, AnswerPartBuilder, MarkerFinder
from molink.text.tool_calls.call_reader import ToolCallReader

TAG = "<|python_tag|>"
MARKERS = frozenset({TAG})


class LlamaParser:
    """Implements :class:`molink.text.tool_calls.base.AnswerParser`."""

    is_reasoning = False

    def __init__(self, names: frozenset[str]) -> None:
        self._names = names
        self._parts = AnswerPartBuilder()
        self._finder = MarkerFinder((TAG,))
        self._reader = ToolCallReader(names)
        #: A call without a tag may begin in the states ``first`` and ``after``.
        self._state: Literal["first", "after", "outside", "call"] = "first"
        #: Text before the current call, emitted if it turns out not to be one.
        self._opening = ""

    def parse_delta(self, text: str) -> list[AnswerPart]:
        pos = 0
        while pos < len(text):
            if self._state == "call":
                pos = self._reader.parse_text(text, pos, self._parts)
                self._settle_call()
            elif self._state == "outside":
                before, marker, pos = self._finder.find_marker(text, pos)
                self._parts.add_text(before)
                if marker is not None:
                    self._begin_call(marker)
            else:
                pos = self._read_content(text, pos)
        return self._parts.drain_parts()

    def finish_parsing(self) -> list[AnswerPart]:
        if self._state == "call" and self._reader.state == "head":
            self._parts.add_text(self._opening + self._reader.held)
        self._parts.add_text(self._finder.flush_text())
        return self._parts.finish_parts()

    def _read_content(self, text: str, pos: int) -> int:
        char = text[pos]
        if char.isspace():
            self._parts.add_text(char)
        elif char == ";" and self._state == "after":
            self._begin_call(char)
        elif char == "{":
            self._begin_call("")
            return pos
        else:
            self._state = "outside"
            return pos
        return pos + 1

    def _begin_call(self, opening: str) -> None:
        self._reader, self._opening, self._state = ToolCallReader(self._names), opening, "call"

    def _settle_call(self) -> None:
        if self._reader.state == "done":
            self._state = "after"
        elif self._reader.state == "broken":
            self._parts.add_text(self._opening + self._reader.held)
            self._state = "outside"
