"""Parses reasoning between tags: ``<think>…</think>``."""

from typing import Literal

from molink.text.tool_calls.base import (
    MAX_HELD_SPACE,
    AnswerParser,
    AnswerPart,
    MarkerFinder,
    ReasoningDelta,
    TextDelta,
)

#: Known pairs of opening and closing tags.
REASONING_TAGS = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
    ("<|channel>thought", "<channel|>"),
)
#: The tokens that begin tags which are not tokens themselves.
TAG_TOKENS = {"<|channel>thought": "<|channel>"}


def is_tag_open(tail: str, tag: str) -> bool:
    """Whether a prompt that ends with ``tail`` has an open ``tag``."""
    return tail.rstrip().endswith(tag)


class PlainTextParser:
    """Parses answers with content only."""

    is_reasoning = False

    def parse_delta(self, text: str) -> list[AnswerPart]:
        return [TextDelta(text)] if text else []

    def finish_parsing(self) -> list[AnswerPart]:
        return []


class ReasoningParser:
    """Splits off reasoning at the start of an answer; another parser handles the rest.

    If the prompt ends with the opening tag, the answer begins inside it. White space around
    reasoning is dropped.
    """

    def __init__(self, inner: AnswerParser, tags: tuple[str, str], tail: str) -> None:
        """``tail`` is the end of the prompt."""
        self._content_parser = inner
        self._open, close = tags
        self._finder = MarkerFinder((close,))
        self._opened = is_tag_open(tail, self._open)
        self._state: Literal["first", "thought", "gap", "content"] = "first"
        self._held = ""
        #: White space held until more reasoning follows.
        self._space = ""
        self._has_reasoning = False

    @property
    def is_reasoning(self) -> bool:
        return self._state == "thought" or (self._state == "first" and self._opened)

    def parse_delta(self, text: str) -> list[AnswerPart]:
        parts: list[AnswerPart] = []
        if self._state == "first":
            text = self._read_opening(text, parts)
        if self._state == "thought":
            text = self._read_reasoning(text, parts)
        if self._state == "gap" and text:
            text = text.lstrip()
            if text:
                self._state = "content"
        if self._state == "content" and text:
            parts += self._content_parser.parse_delta(text)
        return parts

    def finish_parsing(self) -> list[AnswerPart]:
        parts: list[AnswerPart] = []
        held, self._held = self._held, ""
        if self.is_reasoning:
            self._add_reasoning(held + self._finder.flush_text(), parts)
        elif held:
            parts += self._content_parser.parse_delta(held)
        return parts + self._content_parser.finish_parsing()

    def _read_opening(self, text: str, parts: list[AnswerPart]) -> str:
        """Check for the opening tag; return the text still to parse."""
        self._held += text
        begun = self._held.lstrip()
        spaces = len(self._held) - len(begun)
        if begun.startswith(self._open) and spaces <= MAX_HELD_SPACE:
            self._state, self._held = "thought", ""
            return begun[len(self._open) :]
        if spaces <= MAX_HELD_SPACE and self._open.startswith(begun):
            return ""
        text, self._held = self._held, ""
        self._state = "thought" if self._opened else "content"
        return text

    def _read_reasoning(self, text: str, parts: list[AnswerPart]) -> str:
        before, marker, end = self._finder.find_marker(text, 0)
        self._add_reasoning(before, parts)
        if marker is None:
            return ""
        self._state = "gap"
        return text[end:]

    def _add_reasoning(self, text: str, parts: list[AnswerPart]) -> None:
        text = self._space + text
        if not self._has_reasoning:
            text = text.lstrip()
        end = max(len(text.rstrip()), len(text) - MAX_HELD_SPACE)
        self._space = text[end:]
        if end:
            self._has_reasoning = True
            parts.append(ReasoningDelta(text[:end]))
