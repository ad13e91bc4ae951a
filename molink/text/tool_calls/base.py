"""What parsers of answers have in common: parts that come out, and the text that goes in.

A parser is sans-IO: text in, parts out. However the text is cut, the same parts come out, but for
how texts and arguments are cut in turn. What looks like a call and isn't one comes out as text.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

#: Most characters of white space that wait for what follows: around calls they are dropped.
MAX_HELD_SPACE = 1024


@dataclass(frozen=True, slots=True)
class TextDelta:
    """More of the content."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """More of what the model thinks before it answers."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallBegin:
    """A call of the tool ``name`` begins; ``index`` counts the answer's calls from 0."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class ToolCallArguments:
    """More of a call's arguments: together they are JSON as the model writes it."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class ToolCallEnd:
    """A call is complete."""

    index: int


AnswerPart = TextDelta | ReasoningDelta | ToolCallBegin | ToolCallArguments | ToolCallEnd


class AnswerParser(Protocol):
    """Takes the text of one answer apart."""

    @property
    def is_reasoning(self) -> bool:
        """Whether the text so far ends in what the model thinks."""

    def parse_delta(self, text: str) -> list[AnswerPart]:
        """The parts that are certain now that ``text`` follows."""

    def finish_parsing(self) -> list[AnswerPart]:
        """What was held back, when no more text follows."""


class AnswerPartBuilder:
    """Collects parts: texts side by side become one, and calls are numbered.

    White space waits until it is known what follows: around calls it is dropped, unless there is
    more text.
    """

    def __init__(self) -> None:
        self._parts: list[AnswerPart] = []
        self._space = ""
        self._num_calls = 0

    def add_text(self, text: str) -> None:
        """More content."""
        text = self._space + text
        end = max(len(text.rstrip()), len(text) - MAX_HELD_SPACE)
        self._space = text[end:]
        if end:
            self._append_text(text[:end])

    def add_reasoning(self, text: str) -> None:
        """More of what the model thinks."""
        last = self._parts[-1] if self._parts else None
        if isinstance(last, ReasoningDelta):
            self._parts[-1] = ReasoningDelta(last.text + text)
        elif text:
            self._parts.append(ReasoningDelta(text))

    def begin_call(self, name: str) -> None:
        """A call begins."""
        self._parts.append(ToolCallBegin(self._num_calls, name))

    def add_arguments(self, text: str) -> None:
        """More arguments of the call that began last."""
        last = self._parts[-1] if self._parts else None
        if isinstance(last, ToolCallArguments):
            self._parts[-1] = ToolCallArguments(self._num_calls, last.text + text)
        elif text:
            self._parts.append(ToolCallArguments(self._num_calls, text))

    def end_call(self) -> None:
        """The call that began last is complete."""
        self._parts.append(ToolCallEnd(self._num_calls))
        self._num_calls += 1

    def drain_parts(self) -> list[AnswerPart]:
        """What was found since the last time."""
        found, self._parts = self._parts, []
        return found

    def finish_parts(self) -> list[AnswerPart]:
        """The last parts: white space at the end belongs to an answer without calls."""
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
    """Finds the first of some markers; holds back only what may be the beginning of one.

    No marker may contain the first character of another one further inside.
    """

    def __init__(self, markers: Sequence[str]) -> None:
        self._markers = tuple(markers)
        self._firsts = tuple({marker[0] for marker in markers})
        self._held = ""

    def find_marker(self, text: str, start: int) -> tuple[str, str | None, int]:
        """The text before the first marker, the marker, and where ``text`` goes on behind it."""
        buffer = self._held + text[start:]
        places = ((buffer.find(marker), marker) for marker in self._markers)
        found = min(((place, marker) for place, marker in places if place >= 0), default=None)
        if found is None:
            keep = self._marker_start(buffer)
            self._held = buffer[keep:]
            return buffer[:keep], None, len(text)
        place, marker = found
        end = start + place + len(marker) - len(self._held)
        self._held = ""
        return buffer[:place], marker, end

    def flush_text(self) -> str:
        """What was held back."""
        held, self._held = self._held, ""
        return held

    def _marker_start(self, buffer: str) -> int:
        """Where the beginning of a marker begins in ``buffer``; its length if there is none."""
        for first in self._firsts:
            place = buffer.rfind(first)
            if place >= 0 and any(marker.startswith(buffer[place:]) for marker in self._markers):
                return place
        return len(buffer)
