"""Answers of gpt-oss: messages in channels, which OpenAI calls the harmony format.

``<|channel|>analysis<|message|>…<|end|>`` is what the model thinks, ``final`` the content, and
``commentary to=functions.NAME`` a call with its arguments; ``commentary`` to nobody is content too.
"""

import re
from typing import Literal

from molink.text.calls.base import MarkerFinder, Part, Parts

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>")
MARKERS = frozenset({START, CHANNEL, MESSAGE, "<|constrain|>", *_ENDS})

#: Most characters of a message's header.
_MAX_HEADER = 256
_CHANNEL = re.compile(r"<\|channel\|>\s*(analysis|commentary|final)\b")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
#: A prompt that ends within a message: its header.
_OPENED = re.compile(r"<\|start\|>assistant([^<]*<\|channel\|>[^<]*)<\|message\|>$")

Kind = Literal["text", "thought", "call"]


class HarmonyParser:
    """Implements :class:`molink.text.calls.base.AnswerParser`."""

    def __init__(self, names: frozenset[str], tail: str) -> None:
        """``tail`` is the end of the prompt."""
        self._names = names
        self._parts = Parts()
        self._finder = MarkerFinder(tuple(MARKERS))
        self._state: Literal["header", "body", "between"] = "header"
        self._header = ""
        self._kind: Kind = "text"
        #: Whether the call's arguments are still to come.
        self._empty = False
        #: Kinds of messages that there have been.
        self._seen: set[Kind] = set()
        opened = _OPENED.search(tail)
        if opened is not None:
            self._begin(opened[1])

    @property
    def thinking(self) -> bool:
        """See :class:`AnswerParser`."""
        return self._state == "body" and self._kind == "thought"

    def push(self, text: str) -> list[Part]:
        """See :class:`AnswerParser`."""
        pos = 0
        while pos < len(text):
            before, marker, pos = self._finder.push(text, pos)
            self._take(before)
            if marker is not None:
                self._mark(marker)
        return self._parts.take()

    def finish(self) -> list[Part]:
        """See :class:`AnswerParser`."""
        self._take(self._finder.flush())
        if self._state == "header":
            self._parts.text(self._header)
        elif self._state == "body":
            self._end()
        return self._parts.finish()

    def _take(self, text: str) -> None:
        """Text between two marks."""
        if self._state == "between":
            text = text.lstrip()
            if text:
                self._begin("")
        if self._state == "body":
            self._add(text)
        elif self._state == "header":
            room = _MAX_HEADER - len(self._header)
            self._header += text[:room]
            if len(text) > room:
                self._begin_text()
                self._add(text[room:])

    def _mark(self, marker: str) -> None:
        if marker in _ENDS:
            self._close(marker)
        elif marker == START or (marker == CHANNEL and self._state != "header"):
            self._close("")
            self._state, self._header = "header", marker
        elif self._state == "header" and marker == MESSAGE:
            self._begin(self._header)
        else:
            self._take(marker)

    def _begin(self, header: str) -> None:
        """A message begins; one of an unknown kind is text, its header included."""
        channel, recipient = _CHANNEL.search(header), _RECIPIENT.search(header)
        name = recipient[1].removeprefix("functions.") if recipient is not None else ""
        self._header = ""
        if channel is not None and name in self._names:
            self._enter("call")
            self._parts.begin(name)
        elif channel is not None and channel[1] == "analysis":
            self._enter("thought")
        elif channel is not None and recipient is None:
            self._enter("text")
        else:
            self._header = header
            self._begin_text(MESSAGE if header else "")

    def _begin_text(self, behind: str = "") -> None:
        """What was read as a header is text."""
        header, self._header = self._header, ""
        self._enter("text")
        self._parts.text(header + behind)

    def _enter(self, kind: Kind) -> None:
        self._state, self._kind, self._empty = "body", kind, True
        if kind in self._seen and kind != "call":
            self._add("\n\n")
        self._seen.add(kind)

    def _add(self, text: str) -> None:
        if self._kind == "text":
            self._parts.text(text)
        elif self._kind == "thought":
            self._parts.thought(text)
        else:
            text = text.lstrip() if self._empty else text
            self._parts.arguments(text)
            self._empty = self._empty and not text

    def _close(self, marker: str) -> None:
        """A message ends; what has no body by then is text."""
        if self._state == "header" and self._header:
            self._begin_text(marker)
        elif self._state == "body":
            self._end()
        self._state, self._header = "between", ""

    def _end(self) -> None:
        if self._kind == "call":
            if self._empty:
                self._parts.arguments("{}")
            self._parts.end()
