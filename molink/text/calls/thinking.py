"""What a model thinks before it answers, between tags: ``<think>…</think>``."""

from typing import Literal

from molink.text.calls.base import MAX_SPACE, AnswerParser, MarkerFinder, Part, Text, Thought

#: Opening and closing tags that models have.
TAGS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))


def is_opened(tail: str, tag: str) -> bool:
    """Whether a prompt that ends with ``tail`` has opened ``tag`` for its answer."""
    return tail.rstrip().endswith(tag)


class PlainText:
    """An answer that has content only; implements :class:`AnswerParser`."""

    thinking = False

    def push(self, text: str) -> list[Part]:
        """See :class:`AnswerParser`."""
        return [Text(text)] if text else []

    def finish(self) -> list[Part]:
        """See :class:`AnswerParser`."""
        return []


class ThinkingParser:
    """Takes off what stands between tags at the beginning; the rest is for another parser.

    Where the prompt ends with the opening tag, the answer begins behind it. White space around what
    the model thinks is dropped. Implements :class:`AnswerParser`.
    """

    def __init__(self, inner: AnswerParser, tags: tuple[str, str], tail: str) -> None:
        """``tail`` is the end of the prompt."""
        self._inner = inner
        self._open, close = tags
        self._finder = MarkerFinder((close,))
        self._opened = is_opened(tail, self._open)
        self._state: Literal["first", "thought", "gap", "content"] = "first"
        self._held = ""
        #: White space that waits for more of what the model thinks.
        self._space = ""
        self._thought = False

    @property
    def thinking(self) -> bool:
        """See :class:`AnswerParser`."""
        return self._state == "thought" or (self._state == "first" and self._opened)

    def push(self, text: str) -> list[Part]:
        """See :class:`AnswerParser`."""
        parts: list[Part] = []
        if self._state == "first":
            text = self._first(text, parts)
        if self._state == "thought":
            text = self._inside(text, parts)
        if self._state == "gap" and text:
            text = text.lstrip()
            if text:
                self._state = "content"
        if self._state == "content" and text:
            parts += self._inner.push(text)
        return parts

    def finish(self) -> list[Part]:
        """See :class:`AnswerParser`."""
        parts: list[Part] = []
        held, self._held = self._held, ""
        if self.thinking:
            self._think(held + self._finder.flush(), parts)
        elif held:
            parts += self._inner.push(held)
        return parts + self._inner.finish()

    def _first(self, text: str, parts: list[Part]) -> str:
        """Whether the answer begins with the opening tag; what is to be read further."""
        self._held += text
        begun = self._held.lstrip()
        spaces = len(self._held) - len(begun)
        if begun.startswith(self._open) and spaces <= MAX_SPACE:
            self._state, self._held = "thought", ""
            return begun[len(self._open) :]
        if spaces <= MAX_SPACE and self._open.startswith(begun):
            return ""
        text, self._held = self._held, ""
        self._state = "thought" if self._opened else "content"
        return text

    def _inside(self, text: str, parts: list[Part]) -> str:
        before, marker, end = self._finder.push(text, 0)
        self._think(before, parts)
        if marker is None:
            return ""
        self._state = "gap"
        return text[end:]

    def _think(self, text: str, parts: list[Part]) -> None:
        text = self._space + text
        if not self._thought:
            text = text.lstrip()
        end = max(len(text.rstrip()), len(text) - MAX_SPACE)
        self._space = text[end:]
        if end:
            self._thought = True
            parts.append(Thought(text[:end]))
