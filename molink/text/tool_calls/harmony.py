"""Parses gpt-oss answers: messages in channels, OpenAI's harmony format.

``<|channel|>analysis<|message|>…<|end|>`` is reasoning, ``final`` the content, and ``commentary
to=functions.NAME`` a tool call; other ``commentary`` is also content.
"""

import re
from typing import Literal

from molink.text.tool_calls.base import AnswerPart, AnswerPartBuilder, MarkerFinder

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>")
MARKERS = frozenset({START, CHANNEL, MESSAGE, "<|constrain|>", *_ENDS})

#: Maximum characters of a message header.
_MAX_HEADER = 256
_CHANNEL_PATTERN = re.compile(r"<\|channel\|>\s*(analysis|commentary|final)\b")
_RECIPIENT_PATTERN = re.compile(r"\bto=([^\s<]+)")
#: Header of an unfinished message at the end of the prompt.
_OPEN_MESSAGE = re.compile(r"<\|start\|>assistant([^<]*<\|channel\|>[^<]*)<\|message\|>$")

MessageKind = Literal["text", "thought", "call"]


class HarmonyParser:
    """Implements :class:`molink.text.tool_calls.base.AnswerParser`."""

    def __init__(self, names: frozenset[str], tail: str) -> None:
        """``tail`` is the end of the prompt."""
        self._names = names
        self._parts = AnswerPartBuilder()
        self._finder = MarkerFinder(tuple(MARKERS))
        self._state: Literal["header", "body", "between"] = "header"
        self._header = ""
        self._kind: MessageKind = "text"
        self._awaits_arguments = False
        #: Kinds of the messages so far.
        self._seen_kinds: set[MessageKind] = set()
        opened = _OPEN_MESSAGE.search(tail)
        if opened is not None:
            self._begin_message(opened[1])

    @property
    def is_reasoning(self) -> bool:
        return self._state == "body" and self._kind == "thought"

    def parse_delta(self, text: str) -> list[AnswerPart]:
        pos = 0
        while pos < len(text):
            before, marker, pos = self._finder.find_marker(text, pos)
            self._read_text(before)
            if marker is not None:
                self._read_marker(marker)
        return self._parts.drain_parts()

    def finish_parsing(self) -> list[AnswerPart]:
        self._read_text(self._finder.flush_text())
        if self._state == "header":
            self._parts.add_text(self._header)
        elif self._state == "body":
            self._end_message()
        return self._parts.finish_parts()

    def _read_text(self, text: str) -> None:
        """Handle text between markers."""
        if self._state == "between":
            text = text.lstrip()
            if text:
                self._begin_message("")
        if self._state == "body":
            self._add_content(text)
        elif self._state == "header":
            room = _MAX_HEADER - len(self._header)
            self._header += text[:room]
            if len(text) > room:
                self._begin_text_message()
                self._add_content(text[room:])

    def _read_marker(self, marker: str) -> None:
        if marker in _ENDS:
            self._close_message(marker)
        elif marker == START or (marker == CHANNEL and self._state != "header"):
            self._close_message("")
            self._state, self._header = "header", marker
        elif self._state == "header" and marker == MESSAGE:
            self._begin_message(self._header)
        else:
            self._read_text(marker)

    def _begin_message(self, header: str) -> None:
        """Begin a message; an unknown kind is text, including its header."""
        channel, recipient = _CHANNEL_PATTERN.search(header), _RECIPIENT_PATTERN.search(header)
        name = recipient[1].removeprefix("functions.") if recipient is not None else ""
        self._header = ""
        if channel is not None and name in self._names:
            self._enter_message("call")
            self._parts.begin_call(name)
        elif channel is not None and channel[1] == "analysis":
            self._enter_message("thought")
        elif channel is not None and recipient is None:
            self._enter_message("text")
        else:
            self._header = header
            self._begin_text_message(MESSAGE if header else "")

    def _begin_text_message(self, behind: str = "") -> None:
        """Treat a header as text."""
        header, self._header = self._header, ""
        self._enter_message("text")
        self._parts.add_text(header + behind)

    def _enter_message(self, kind: MessageKind) -> None:
        self._state, self._kind, self._awaits_arguments = "body", kind, True
        if kind in self._seen_kinds and kind != "call":
            self._add_content("\n\n")
        self._seen_kinds.add(kind)

    def _add_content(self, text: str) -> None:
        if self._kind == "text":
            self._parts.add_text(text)
        elif self._kind == "thought":
            self._parts.add_reasoning(text)
        else:
            text = text.lstrip() if self._awaits_arguments else text
            self._parts.add_arguments(text)
            self._awaits_arguments = self._awaits_arguments and not text

    def _close_message(self, marker: str) -> None:
        """End a message; a header without a body is text."""
        if self._state == "header" and self._header:
            self._begin_text_message(marker)
        elif self._state == "body":
            self._end_message()
        self._state, self._header = "between", ""

    def _end_message(self) -> None:
        if self._kind == "call":
            if self._awaits_arguments:
                self._parts.add_arguments("{}")
            self._parts.end_call()
