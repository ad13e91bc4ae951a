"""Parses calls of Hermes and Qwen: ``<tool_call>{"name": …, "arguments": {…}}</tool_call>``."""

from molink.text.tool_calls.base import AnswerPart, AnswerPartBuilder, MarkerFinder
from molink.text.tool_calls.call_reader import ToolCallReader

OPEN, CLOSE = "<tool_call>", "</tool_call>"
MARKERS = frozenset({OPEN, CLOSE})


class HermesParser:
    """Implements :class:`molink.text.tool_calls.base.AnswerParser`."""

    is_reasoning = False

    def __init__(self, names: frozenset[str]) -> None:
        self._names = names
        self._parts = AnswerPartBuilder()
        self._finder = MarkerFinder((OPEN, CLOSE))
        self._reader: ToolCallReader | None = None
        self._awaits_close_tag = False

    def parse_delta(self, text: str) -> list[AnswerPart]:
        pos = 0
        while pos < len(text):
            if self._reader is None:
                pos = self._read_content(text, pos)
            else:
                pos = self._reader.parse_text(text, pos, self._parts)
                self._settle_call(self._reader)
        return self._parts.drain_parts()

    def finish_parsing(self) -> list[AnswerPart]:
        if self._reader is not None and self._reader.state == "head":
            self._parts.add_text(OPEN + self._reader.held)
        self._parts.add_text(self._finder.flush_text())
        return self._parts.finish_parts()

    def _read_content(self, text: str, pos: int) -> int:
        before, marker, pos = self._finder.find_marker(text, pos)
        self._parts.add_text(before)
        if marker == OPEN:
            self._reader = ToolCallReader(self._names)
        elif marker == CLOSE and self._awaits_close_tag:
            self._awaits_close_tag = False
        elif marker is not None:
            self._parts.add_text(marker)
        return pos

    def _settle_call(self, reader: ToolCallReader) -> None:
        """Return to content after a call, or if it was not one."""
        if reader.state == "broken":
            self._parts.add_text(OPEN + reader.held)
        elif reader.state != "done":
            return
        self._awaits_close_tag = reader.state == "done"
        self._reader = None
