"""Parses calls between markers, which are emitted when complete: LFM2 and Gemma 4.

LFM2 writes ``<|tool_call_start|>[name(key="value")]<|tool_call_end|>``, a list in Python; Gemma 4
writes ``<|tool_call>call:name{key:<|"|>value<|"|>}<tool_call|>``, with unquoted keys.
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from molink.text.tool_calls.base import AnswerPart, AnswerPartBuilder, MarkerFinder
from molink.text.tool_calls.call_reader import MAX_HELD_CHARACTERS
from molink.text.tool_calls.pythonic import MAX_DEPTH, Calls, parse_python_calls

_QUOTE = '<|"|>'
_GEMMA_CALL = re.compile(r"\s*call:([^\s{]+)(?=\{)")
_KEY = re.compile(r"\s*([^\s:{}\[\],]+)\s*:")
_SCALAR = re.compile(r"[^,{}\[\]]+")
_WORDS = {"true": True, "false": False, "null": None, "None": None}


@dataclass(frozen=True, slots=True)
class Enclosure:
    """Markers around calls, other special tokens in them, and the parser of the text between."""

    open: str
    close: str
    parse_calls: Callable[[str, frozenset[str]], Calls | None]
    inner: tuple[str, ...] = ()

    @property
    def markers(self) -> frozenset[str]:
        """Special tokens that the parser needs to see."""
        return frozenset((self.open, self.close, *self.inner))


class EnclosedCallParser:
    """Implements :class:`molink.text.tool_calls.base.AnswerParser`."""

    is_reasoning = False

    def __init__(self, names: frozenset[str], enclosure: Enclosure) -> None:
        self._names, self._enclosure = names, enclosure
        self._parts = AnswerPartBuilder()
        self._outside = MarkerFinder((enclosure.open,))
        self._inside = MarkerFinder((enclosure.close,))
        #: Text of a call so far; ``None`` outside of calls.
        self._held: str | None = None

    def parse_delta(self, text: str) -> list[AnswerPart]:
        pos = 0
        while pos < len(text):
            if self._held is None:
                before, marker, pos = self._outside.find_marker(text, pos)
                self._parts.add_text(before)
                self._held = None if marker is None else ""
                continue
            before, marker, pos = self._inside.find_marker(text, pos)
            self._held += before
            if marker is not None or len(self._held) > MAX_HELD_CHARACTERS:
                self._settle_calls(marker or self._inside.flush_text())
        return self._parts.drain_parts()

    def finish_parsing(self) -> list[AnswerPart]:
        self._parts.add_text(self._outside.flush_text())
        if self._held is not None:
            self._held += self._inside.flush_text()
            self._settle_calls("")
        return self._parts.finish_parts()

    def _settle_calls(self, behind: str) -> None:
        """End the calls; text that is no call, and the text ``behind`` it, becomes content."""
        held, self._held = self._held or "", None
        calls = None
        if len(held) <= MAX_HELD_CHARACTERS:
            calls = self._enclosure.parse_calls(held, self._names)
        if calls is None:
            self._parts.add_text(self._enclosure.open + held + behind)
            return
        for name, arguments in calls:
            self._parts.begin_call(name)
            self._parts.add_arguments(arguments)
            self._parts.end_call()


def _parse_gemma_call(text: str, names: frozenset[str]) -> Calls | None:
    match = _GEMMA_CALL.match(text)
    if match is None or match[1] not in names:
        return None
    try:
        values, end = _parse_value(text, match.end(), 0)
        made = json.dumps(values, ensure_ascii=False, allow_nan=False)
        made.encode("utf-8")  # this fails for half a surrogate pair
    except (ValueError, IndexError):
        return None
    return None if text[end:].strip() else [(match[1], made)]


def _parse_value(text: str, pos: int, depth: int) -> tuple[Any, int]:
    """Parse a value at ``pos``; return it and the position after it.

    Raises: ValueError: there is no value. Likewise ``IndexError``.
    """
    if depth > MAX_DEPTH:
        raise ValueError(text)
    pos = _skip_space(text, pos)
    if text.startswith(_QUOTE, pos):
        begin = pos + len(_QUOTE)
        end = text.index(_QUOTE, begin)
        return text[begin:end], end + len(_QUOTE)
    if text[pos] not in "{[":
        match = _SCALAR.match(text, pos)
        word = "" if match is None else match[0].strip()
        value = _WORDS[word] if word in _WORDS else json.loads(word)
        return value, pos if match is None else match.end()
    is_object = text[pos] == "{"
    closing, values, items = "}" if is_object else "]", dict[str, Any](), list[Any]()
    pos = _skip_space(text, pos + 1)
    while text[pos] != closing:
        key = ""
        if is_object:
            key, pos = _parse_key(text, pos)
        value, pos = _parse_value(text, pos, depth + 1)
        values[key] = value
        items.append(value)
        pos = _skip_space(text, pos)
        if text[pos] == ",":
            pos = _skip_space(text, pos + 1)
        elif text[pos] != closing:
            raise ValueError(text)
    return values if is_object else items, pos + 1


def _parse_key(text: str, pos: int) -> tuple[str, int]:
    """Parse a key with its colon, quoted or not."""
    if text.startswith(_QUOTE, pos):
        begin = pos + len(_QUOTE)
        end = text.index(_QUOTE, begin)
        colon = _skip_space(text, end + len(_QUOTE))
        if text[colon] != ":":
            raise ValueError(text)
        return text[begin:end], colon + 1
    match = _KEY.match(text, pos)
    if match is None:
        raise ValueError(text)
    return match[1], match.end()


def _skip_space(text: str, pos: int) -> int:
    while pos < len(text) and text[pos].isspace():
        pos += 1
    return pos


LFM2 = Enclosure("<|tool_call_start|>", "<|tool_call_end|>", parse_python_calls)
GEMMA4 = Enclosure("<|tool_call>", "<tool_call|>", _parse_gemma_call, (_QUOTE,))
