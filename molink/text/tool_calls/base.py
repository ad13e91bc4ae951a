"""Interface and helpers of answer parsers.

Parsers are sans-IO: text in, parts out, independent of how the text is split. Malformed tool calls
come out as text.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

#: Maximum white space held until the next part is known; white space around calls is dropped.
MAX_HELD_SPACE = 1024


@dataclass(frozen=True, slots=True)
class TextDelta:
    """More content."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """More reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallBegin:
    """Start of a call of the tool ``name``; ``index`` counts the answer's calls from 0."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class ToolCallArguments:
    """More arguments of a call: fragments of the JSON that the model writes."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class ToolCallEnd:
    """End of a call."""

    index: int


AnswerPart = TextDelta | ReasoningDelta | ToolCallBegin | ToolCallArguments | ToolCallEnd


class AnswerParser(Protocol):
    """Parses the text of one answer."""

    @property
    def is_reasoning(self) -> bool:
        """Whether the text so far ends in reasoning."""

    def parse_delta(self, text: str) -> list[AnswerPart]:
        """Append ``text``; return the parts that are now certain."""

    def finish_parsing(self) -> list[AnswerPart]:
        """Return the held parts at the end."""


class AnswerPartBuilder:
    """Collects parts: merges adjacent texts and numbers calls.

    White space is held until the next part is known, since white space around calls is dropped.
    """

    def __init__(self) -> None:
        self._parts: list[AnswerPart] = []
        self._space = ""
        self._num_calls = 0

    def add_text(self, text: str) -> None:
        """Add content."""
        text = self._space + text
        end = max(len(text.rstrip()), len(text) - MAX_HELD_SPACE)
        self._space = text[end:]
        if end:
            self._append_text(text[:end])

    def add_reasoning(self, text: str) -> None:
        """Add reasoning."""
        last = self._parts[-1] if self._parts else None
        if isinstance(last, ReasoningDelta):
            self._parts[-1] = ReasoningDelta(last.text + text)
        elif text:
            self._parts.append(ReasoningDelta(text))

    def begin_call(self, name: str) -> None:
        """Begin a call."""
        self._parts.append(ToolCallBegin(self._num_calls, name))

    def add_arguments(self, text: str) -> None:
        """Add arguments to the current call."""
        last = self._parts[-1] if self._parts else None
        if isinstance(last, ToolCallArguments):
            self._parts[-1] = ToolCallArguments(self._num_calls, last.text + text)
        elif text:
            self._parts.append(ToolCallArguments(self._num_calls, text))

    def end_call(self) -> None:
        """End the current call."""
        self._parts.append(ToolCallEnd(self._num_calls))
        self._num_calls += 1

    def drain_parts(self) -> list[AnswerPart]:
        """Return the parts since the last call."""
        found, self._parts = self._parts, []
        return found

    def finish_parts(self) -> list[AnswerPart]:
        """Return the last parts; an answer without calls keeps white space at its end."""
        if self._space and not self._num_calls:
            self._append_text(self._space)
        self._space = ""
        return self.drain_parts()

    def _append_text(self, text: str) -> None:
        last = self._parts[-1] if self._parts else None
        if isinstance(last, TextDelta):
            self._parts[-1] = TextDelta(last.text + text)
        else:
            self._parts.append(TextDelta(text))


class MarkerFinder:
    """Finds the first of several markers; holds only a possible marker prefix.

    A marker's first character must not occur inside another marker.
    """

    def __init__(self, markers: Sequence[str]) -> None:
        self._markers = tuple(markers)
        self._firsts = tuple({marker[0] for marker in markers})
        self._held = ""

    def find_marker(self, text: str, start: int) -> tuple[str, str | None, int]:
        """Return the text before the first marker, the marker, and the position after it."""
        buffer = self._held + text[start:]
        begins = ((buffer.find(marker), marker) for marker in self._markers)
        found = min(((begin, marker) for begin, marker in begins if begin >= 0), default=None)
        if found is None:
            keep = self._marker_start(buffer)
            self._held = buffer[keep:]
            return buffer[:keep], None, len(text)
        begin, marker = found
        end = start + begin + len(marker) - len(self._held)
        self._held = ""
        return buffer[:begin], marker, end

    def flush_text(self) -> str:
        """Return the held text."""
        held, self._held = self._held, ""
        return held

    def _marker_start(self, buffer: str) -> int:
        """Return the start of a possible marker prefix in ``buffer``, or the buffer's length."""
        for first in self._firsts:
            begin = buffer.rfind(first)
            if begin >= 0 and any(marker.startswith(buffer[begin:]) for marker in self._markers):
                return begin
        return len(buffer)
