"""What parsers of answers have in common: parts that come out, and the text that goes in.

A parser is sans-IO: text in, parts out. However the text is cut, the same parts come out, but for
how texts and arguments are cut in turn. What looks like a call and isn't one comes out as text.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

#: Most characters of white space that wait for what follows: around calls they are dropped.
MAX_SPACE = 1024


@dataclass(frozen=True, slots=True)
class Text:
    """More of the content."""

    text: str


@dataclass(frozen=True, slots=True)
class Thought:
    """More of what the model thinks before it answers."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegin:
    """A call of the tool ``name`` begins; ``index`` counts the answer's calls from 0."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of a call's arguments: together they are JSON as the model writes it."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    """A call is complete."""

    index: int


Part = Text | Thought | CallBegin | CallArguments | CallEnd


class AnswerParser(Protocol):
    """Takes the text of one answer apart."""

    @property
    def thinking(self) -> bool:
        """Whether the text so far ends in what the model thinks."""
        ...

    def push(self, text: str) -> list[Part]:
        """The parts that are certain now that ``text`` follows."""
        ...

    def finish(self) -> list[Part]:
        """What was held back, when no more text follows."""
        ...


class Parts:
    """Collects parts: texts side by side become one, and calls are numbered.

    White space waits until it is known what follows: around calls it is dropped, unless there is
    more text.
    """

    def __init__(self) -> None:
        self._found: list[Part] = []
        self._space = ""
        self._calls = 0

    def text(self, text: str) -> None:
        """More content."""
        text = self._space + text
        end = max(len(text.rstrip()), len(text) - MAX_SPACE)
        self._space = text[end:]
        if end:
            self._add_text(text[:end])

    def thought(self, text: str) -> None:
        """More of what the model thinks."""
        last = self._found[-1] if self._found else None
        if isinstance(last, Thought):
            self._found[-1] = Thought(last.text + text)
        elif text:
            self._found.append(Thought(text))

    def begin(self, name: str) -> None:
        """A call begins."""
        self._found.append(CallBegin(self._calls, name))

    def arguments(self, text: str) -> None:
        """More arguments of the call that began last."""
        last = self._found[-1] if self._found else None
        if isinstance(last, CallArguments):
            self._found[-1] = CallArguments(self._calls, last.text + text)
        elif text:
            self._found.append(CallArguments(self._calls, text))

    def end(self) -> None:
        """The call that began last is complete."""
        self._found.append(CallEnd(self._calls))
        self._calls += 1

    def take(self) -> list[Part]:
        """What was found since the last time."""
        found, self._found = self._found, []
        return found

    def finish(self) -> list[Part]:
        """The last parts: white space at the end belongs to an answer without calls."""
        if self._space and not self._calls:
            self._add_text(self._space)
        self._space = ""
        return self.take()

    def _add_text(self, text: str) -> None:
        last = self._found[-1] if self._found else None
        if isinstance(last, Text):
            self._found[-1] = Text(last.text + text)
        else:
            self._found.append(Text(text))


class MarkerFinder:
    """Finds the first of some markers; holds back only what may be the beginning of one.

    No marker may contain the first character of another one further inside.
    """

    def __init__(self, markers: Sequence[str]) -> None:
        self._markers = tuple(markers)
        self._firsts = tuple({marker[0] for marker in markers})
        self._held = ""

    def push(self, text: str, start: int) -> tuple[str, str | None, int]:
        """The text before the first marker, the marker, and where ``text`` goes on behind it."""
        buffer = self._held + text[start:]
        places = ((buffer.find(marker), marker) for marker in self._markers)
        found = min(((place, marker) for place, marker in places if place >= 0), default=None)
        if found is None:
            keep = self._kept(buffer)
            self._held = buffer[keep:]
            return buffer[:keep], None, len(text)
        place, marker = found
        end = start + place + len(marker) - len(self._held)
        self._held = ""
        return buffer[:place], marker, end

    def flush(self) -> str:
        """What was held back."""
        held, self._held = self._held, ""
        return held

    def _kept(self, buffer: str) -> int:
        """Where the beginning of a marker begins in ``buffer``; its length if there is none."""
        for first in self._firsts:
            place = buffer.rfind(first)
            if place >= 0 and any(marker.startswith(buffer[place:]) for marker in self._markers):
                return place
        return len(buffer)
