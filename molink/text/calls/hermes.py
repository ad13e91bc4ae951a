"""Calls of Hermes and Qwen: ``<tool_call>{"name": …, "arguments": {…}}</tool_call>``."""

from molink.text.calls.base import MarkerFinder, Part, Parts
from molink.text.calls.call_reader import CallReader

OPEN, CLOSE = "<tool_call>", "</tool_call>"
MARKERS = frozenset({OPEN, CLOSE})


class HermesParser:
    """Implements :class:`molink.text.calls.base.AnswerParser`."""

    thinking = False

    def __init__(self, names: frozenset[str]) -> None:
        self._names = names
        self._parts = Parts()
        self._finder = MarkerFinder((OPEN, CLOSE))
        self._reader: CallReader | None = None
        #: Whether a call's closing tag is still to come.
        self._open = False

    def push(self, text: str) -> list[Part]:
        """See :class:`AnswerParser`."""
        pos = 0
        while pos < len(text):
            if self._reader is None:
                pos = self._outside(text, pos)
            else:
                pos = self._reader.push(text, pos, self._parts)
                self._settle(self._reader)
        return self._parts.take()

    def finish(self) -> list[Part]:
        """See :class:`AnswerParser`."""
        if self._reader is not None and self._reader.state == "head":
            self._parts.text(OPEN + self._reader.held)
        self._parts.text(self._finder.flush())
        return self._parts.finish()

    def _outside(self, text: str, pos: int) -> int:
        before, marker, pos = self._finder.push(text, pos)
        self._parts.text(before)
        if marker == OPEN:
            self._reader = CallReader(self._names)
        elif marker == CLOSE and self._open:
            self._open = False
        elif marker is not None:
            self._parts.text(marker)
        return pos

    def _settle(self, reader: CallReader) -> None:
        """Go on outside, where a call is over or turned out not to be one."""
        if reader.state == "broken":
            self._parts.text(OPEN + reader.held)
        elif reader.state != "done":
            return
        self._open = reader.state == "done"
        self._reader = None
