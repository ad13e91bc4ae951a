"""Reads streamed tool calls ``{"name": …, "arguments": {…}}``, alone or in a list."""

import re
from typing import Any, Literal

import msgspec

from molink.text.tool_calls.base import AnswerPartBuilder

#: Maximum characters held until a call is recognized.
MAX_HELD_CHARACTERS = 64 * 1024

#: Llama calls arguments "parameters".
_ARGUMENT_KEYS = ("arguments", "parameters")
_SPACE = " \t\n\r"
_IN_STRING = re.compile(r'[^"\\]*')
_IN_OBJECT = re.compile(r'[^"{}\[\]]*')
_IN_SCALAR = re.compile(r'[^\s,:"{}\[\]]*')


class JsonValueScanner:
    """Finds the end of a streamed JSON value, tracking brackets and quotes only."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self._scalar = False

    def scan_text(self, text: str, pos: int) -> tuple[int, bool]:
        """Scan from ``pos`` on; return the end position, and whether the value ended there."""
        while pos < len(text):
            if self._escaped:
                self._escaped = False
                pos += 1
            elif self._in_string:
                pos = _match_end(_IN_STRING, text, pos)
                if pos < len(text):
                    self._escaped = text[pos] == "\\"
                    self._in_string = self._escaped
                    pos += 1
                    if not self._in_string and not self._depth:
                        return pos, True
            elif self._depth:
                pos = _match_end(_IN_OBJECT, text, pos)
                if pos < len(text):
                    pos += 1
                    if self._scan_character(text[pos - 1]):
                        return pos, True
            elif text[pos] in '"{[' and not self._scalar:
                self._scan_character(text[pos])
                pos += 1
            else:
                self._scalar = True
                end = _match_end(_IN_SCALAR, text, pos)
                return end, end < len(text)
        return pos, False

    def _scan_character(self, char: str) -> bool:
        if char == '"':
            self._in_string = True
        else:
            self._depth += 1 if char in "{[" else -1
        return not self._depth and not self._in_string


class ToolCallReader:
    """Reads a call of one of the tools ``names``.

    Text is held until the name and the start of the arguments are known (state ``head``); if it is
    not a call (``broken``), ``held`` is its text. Then arguments stream up to their closing
    bracket; the rest of the object is ignored, and invalid JSON ends the call.
    """

    def __init__(self, names: frozenset[str]) -> None:
        self._names = names
        self.state: Literal["head", "arguments", "tail", "done", "broken"] = "head"
        self.held = ""
        self._expect: Literal["open", "first", "key", "colon", "value", "comma"] = "open"
        self._value: JsonValueScanner | None = None
        self._raw = ""
        self._key: Any = None
        self._name: str | None = None
        self._arguments: str | None = None

    def parse_text(self, text: str, pos: int, parts: AnswerPartBuilder) -> int:
        """Read from ``pos`` on; return the position reached."""
        if self.state == "head":
            room = text[pos : pos + MAX_HELD_CHARACTERS - len(self.held)]
            used = self._read_members(room, 0, parts)
            if self.state in ("head", "broken"):
                self.held += room[:used]
                if len(self.held) == MAX_HELD_CHARACTERS:
                    self.state = "broken"
                return pos + used
            self.held = ""
            pos += used
        if self.state == "arguments":
            assert self._value is not None
            end, ended = self._value.scan_text(text, pos)
            parts.add_arguments(text[pos:end])
            pos = end
            if ended:
                self._end_call(parts)
        if self.state == "tail":
            pos = self._read_members(text, pos, parts)
        return pos

    def _read_members(self, text: str, pos: int, parts: AnswerPartBuilder) -> int:
        """Read members until the object ends or the arguments begin."""
        while pos < len(text) and self.state in ("head", "tail"):
            if self._value is not None:
                end, ended = self._value.scan_text(text, pos)
                if self.state == "head":
                    self._raw += text[pos:end]
                pos = end
                if ended:
                    self._value = None
                    self._end_token(parts)
            elif text[pos] in _SPACE:
                pos += 1
            else:
                pos += self._read_character(text[pos], parts)
        return pos

    def _read_character(self, char: str, parts: AnswerPartBuilder) -> int:
        """Handle a character between values; return 0 if the object is invalid."""
        match self._expect, char:
            case "open", "{":
                self._expect = "first"
            case (("first" | "key"), '"'):
                self._value, self._raw = JsonValueScanner(), ""
                self._key = None
                return 0
            case "colon", ":":
                self._expect = "value"
            case "value", _ if char not in ",:]}":
                self._begin_value(char, parts)
                return 0
            case "comma", ",":
                self._expect = "key"
            case (("first" | "comma"), "}"):
                return self._close_object(parts)
            case _:
                self.state = "done" if self.state == "tail" else "broken"
                return 0
        return 1

    def _begin_value(self, char: str, parts: AnswerPartBuilder) -> None:
        self._value, self._raw = JsonValueScanner(), ""
        if self.state == "head" and self._key in _ARGUMENT_KEYS:
            if char not in '{"n':
                self.state = "broken"
            elif char == "{" and self._name is not None:
                parts.begin_call(self._name)
                self.state = "arguments"

    def _end_token(self, parts: AnswerPartBuilder) -> None:
        """Handle the end of a key or value."""
        if self._expect in ("first", "key"):
            self._key = _decode_string(self._raw)
            self._expect = "colon"
            return
        self._expect = "comma"
        if self.state == "tail":
            return
        if self._key == "name":
            self._name = _decode_string(self._raw)
            if not isinstance(self._name, str) or self._name not in self._names:
                self.state = "broken"
        elif self._key in _ARGUMENT_KEYS:
            self._arguments = _normalize_arguments(self._raw)
            if self._arguments is None:
                self.state = "broken"
        if self.state == "head" and self._name is not None and self._arguments is not None:
            self._emit_arguments(self._arguments, parts)

    def _emit_arguments(self, arguments: str, parts: AnswerPartBuilder) -> None:
        assert self._name is not None
        parts.begin_call(self._name)
        parts.add_arguments(arguments)
        self._end_call(parts)

    def _end_call(self, parts: AnswerPartBuilder) -> None:
        parts.end_call()
        self.state, self._expect, self._value = "tail", "comma", None

    def _close_object(self, parts: AnswerPartBuilder) -> int:
        if self.state == "head":
            if self._name is None:
                self.state = "broken"
                return 0
            self._emit_arguments("{}", parts)
        self.state = "done"
        return 1


class CallListReader:
    """Reads the call objects of a JSON list, or one object alone.

    The caller has read ``opening``, which comes out as text if no call follows.
    """

    def __init__(self, names: frozenset[str], opening: str) -> None:
        self._names, self._opening = names, opening
        #: Reads the current call; ``None`` between calls.
        self._reader: ToolCallReader | None = ToolCallReader(names)
        self.has_calls = False
        self.is_done = False

    def parse_text(self, text: str, pos: int, parts: AnswerPartBuilder) -> int:
        """Read from ``pos`` on; return the position reached."""
        if self._reader is None:
            return self._read_separator(text, pos, parts)
        pos = self._reader.parse_text(text, pos, parts)
        if self._reader.state == "done":
            self._reader, self.has_calls = None, True
        elif self._reader.state == "broken":
            parts.add_text(self._opening + self._reader.held)
            self.is_done = True
        return pos

    def finish_parsing(self, parts: AnswerPartBuilder) -> None:
        """At the end of the answer, add held characters that are no call as text."""
        if self._reader is not None and self._reader.state == "head":
            parts.add_text(self._opening + self._reader.held)

    def _read_separator(self, text: str, pos: int, parts: AnswerPartBuilder) -> int:
        char = text[pos]
        if char.isspace():
            parts.add_text(char)
            return pos + 1
        if char == ",":
            self._opening, self._reader = char, ToolCallReader(self._names)
        else:
            self.is_done = True
        return pos + (char in ",]")


def _match_end(pattern: re.Pattern[str], text: str, pos: int) -> int:
    match = pattern.match(text, pos)
    assert match is not None
    return match.end()


def _decode_string(raw: str) -> Any:
    try:
        return msgspec.json.decode(raw)
    except (ValueError, RecursionError):
        return None


def _normalize_arguments(raw: str) -> str | None:
    """Normalize complete arguments: an object, an object in a string, or null."""
    if raw.startswith("{"):
        return raw
    value = _decode_string(raw)
    if isinstance(value, str):
        return value if isinstance(_decode_string(value), dict) else None
    return "{}" if raw == "null" else None
