"""Parses calls whose arguments are tagged one by one: Qwen3-Coder, Seed-OSS, GLM, MiniMax-M2.

Qwen3-Coder::

    <tool_call>
    <function=get_weather>
    <parameter=city>
    Paris
    </parameter>
    </function>
    </tool_call>

Seed-OSS has ``<seed:tool_call>`` around them and no line breaks around values. GLM-4.5 to 4.7:
``<tool_call>get_weather<arg_key>city</arg_key><arg_value>Paris</arg_value></tool_call>``, with
or without line breaks. MiniMax-M2: ``<minimax:tool_call><invoke name="get_weather"><parameter
name="city">Paris</parameter></invoke></minimax:tool_call>``, several calls between the outer tags.

A tool's schema decides which values are plain text; all others are JSON. Arguments are emitted as
JSON, text values as they arrive.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import msgspec

from molink.text.tool_calls.base import AnswerPart, AnswerPartBuilder, MarkerFinder
from molink.text.tool_calls.call_reader import MAX_HELD_CHARACTERS

#: Arguments schema of each tool.
ToolSchemas = Mapping[str, Mapping[str, Any] | None]
#: Maximum characters of a tag, or of tags between two values.
_MAX_TAG = 512
_PYTHON_WORDS = {"True": True, "False": False, "None": None}


@dataclass(frozen=True, slots=True)
class CallTags:
    """Tags of a format.

    ``open`` and ``close`` enclose calls. A call begins with ``begin``, which may be empty; then
    ``name`` matches its beginning up to its last character or, without ``begin``, up to the next
    tag. ``key`` matches the text before a value. ``value_end`` ends a value, ``end`` a call. With
    ``is_framed``, one line break before and one after a value are not part of it. ``inner`` are
    further tags that may be special tokens.
    """

    open: str
    close: str
    begin: str
    name: re.Pattern[str]
    key_begin: str
    key: re.Pattern[str]
    value_end: str
    end: str
    is_framed: bool = False
    inner: tuple[str, ...] = ()

    @property
    def markers(self) -> frozenset[str]:
        """Tags that may be special tokens."""
        return frozenset({self.open, self.close, *self.inner})


QWEN3_CODER = CallTags(
    "<tool_call>",
    "</tool_call>",
    "<function=",
    re.compile(r"\s*<function=([^<>]*)>"),
    "<parameter=",
    re.compile(r"<parameter=([^<>]*)>"),
    "</parameter>",
    "</function>",
    is_framed=True,
)
SEED = replace(QWEN3_CODER, open="<seed:tool_call>", close="</seed:tool_call>", is_framed=False)
GLM = CallTags(
    "<tool_call>",
    "</tool_call>",
    "",
    re.compile(r"\s*([^\s<>]+)\s*<"),
    "<arg_key>",
    re.compile(r"<arg_key>([^<>]*)</arg_key>\s*<arg_value>"),
    "</arg_value>",
    "</tool_call>",
    inner=("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
)
MINIMAX = CallTags(
    "<minimax:tool_call>",
    "</minimax:tool_call>",
    "<invoke name=",
    re.compile(r"\s*<invoke name=\"?([^<>\"]*)\"?>"),
    "<parameter name=",
    re.compile(r"<parameter name=\"?([^<>\"]*)\"?>"),
    "</parameter>",
    "</invoke>",
)
#: A name without a tag before it, which may be incomplete.
_BARE_NAME = re.compile(r"[^\s<>]*\s*")


class TaggedCallParser:
    """Implements :class:`molink.text.tool_calls.base.AnswerParser`."""

    is_reasoning = False

    def __init__(self, tools: ToolSchemas, tags: CallTags) -> None:
        self._tools, self._tags = tools, tags
        self._parts = AnswerPartBuilder()
        # Some models forget the outer tag.
        begins = (tags.open, tags.close, tags.begin)
        self._finder = MarkerFinder([tag for tag in begins if tag])
        self._values = MarkerFinder((tags.value_end,))
        #: ``head`` follows the opening tag, ``between`` a call, ``keys`` a name or a value.
        self._state: Literal["outside", "head", "between", "keys", "value"] = "outside"
        #: The opening tag, which is text if no call follows, and tags so far.
        self._opening = ""
        self._held = ""
        self._properties: Mapping[str, Any] = {}
        self._has_values = False
        self._awaits_close = False
        self._value = _ValueWriter(None, is_framed=False)

    def parse_delta(self, text: str) -> list[AnswerPart]:
        self._parse_text(text)
        return self._parts.drain_parts()

    def finish_parsing(self) -> list[AnswerPart]:
        if self._state in ("head", "between"):
            self._parts.add_text(self._opening + self._held)
        elif self._state == "value":
            self._value.add_text(self._values.flush_text(), self._parts)
            self._value.end_value(self._parts)
        elif self._state == "keys":
            self._end_call()
            self._parts.add_text(self._held)
        self._parts.add_text(self._finder.flush_text())
        return self._parts.finish_parts()

    def _parse_text(self, text: str) -> None:
        pos = 0
        while pos < len(text):
            match self._state:
                case "outside":
                    pos = self._read_content(text, pos)
                case "head" | "between":
                    self._read_name(text[pos])
                    pos += 1
                case "keys":
                    self._read_key(text[pos])
                    pos += 1
                case "value":
                    pos = self._read_value(text, pos)

    def _read_content(self, text: str, pos: int) -> int:
        before, marker, pos = self._finder.find_marker(text, pos)
        self._parts.add_text(before)
        if marker == self._tags.open:
            self._opening, self._held, self._state = marker, "", "head"
        elif marker == self._tags.close:
            if not self._awaits_close:
                self._parts.add_text(marker)
            self._awaits_close = False
        elif marker is not None:
            self._opening, self._held, self._state = "", marker, "head"
        return pos

    def _read_name(self, char: str) -> None:
        """Read the name of a call or, after a call, the closing tag."""
        self._held += char
        begun = self._held.lstrip()
        if self._state == "between" and self._tags.close.startswith(begun):
            if begun == self._tags.close:
                self._held, self._state, self._awaits_close = "", "outside", False
            return
        found = self._tags.name.fullmatch(self._held)
        if found is not None and found[1].strip() in self._tools:
            self._begin_call(found[1].strip())
        elif found is not None or len(self._held) >= _MAX_TAG or not self._may_be_name(begun):
            self._abandon_name()

    def _may_be_name(self, begun: str) -> bool:
        begin = self._tags.begin
        if not begin:
            return _BARE_NAME.fullmatch(begun) is not None
        return begin.startswith(begun) or begun.startswith(begin)

    def _abandon_name(self) -> None:
        """Treat the tag that was read as text; the following text may have another one."""
        if self._state == "head":
            tag = self._opening or self._tags.begin
            self._parts.add_text(tag)
            self._held = self._held if self._opening else self._held.removeprefix(tag)
        self._read_again()

    def _read_again(self) -> None:
        """Read the held text as content."""
        held, self._held, self._opening = self._held, "", ""
        self._state = "outside"
        self._parse_text(held)

    def _begin_call(self, name: str) -> None:
        schema = self._tools[name] or {}
        found = schema.get("properties")
        self._properties = found if isinstance(found, Mapping) else {}
        self._parts.begin_call(name)
        # A bare name's pattern takes the first character of the next tag.
        self._held = "" if self._tags.begin else self._held[-1]
        self._opening, self._has_values, self._state = "", False, "keys"

    def _read_key(self, char: str) -> None:
        """Read the beginning of a value, or the end of the call."""
        if not self._held and char.isspace():
            return
        self._held += char
        found = self._tags.key.fullmatch(self._held) if char == ">" else None
        if found is not None:
            self._begin_value(found[1].strip())
        elif self._held == self._tags.end:
            self._end_call()
            self._awaits_close = self._tags.end != self._tags.close
            self._held, self._state = "", "between" if self._awaits_close else "outside"
        elif len(self._held) >= _MAX_TAG or not self._may_be_key():
            self._end_call()
            self._awaits_close = True
            self._read_again()

    def _may_be_key(self) -> bool:
        held, begin = self._held, self._tags.key_begin
        return held.startswith(begin) or any(
            one.startswith(held) for one in (begin, self._tags.end)
        )

    def _begin_value(self, key: str) -> None:
        opening = ", " if self._has_values else "{"
        self._parts.add_arguments(f"{opening}{json.dumps(key, ensure_ascii=False)}: ")
        self._has_values = True
        self._value = _ValueWriter(self._properties.get(key), is_framed=self._tags.is_framed)
        self._held, self._state = "", "value"

    def _read_value(self, text: str, pos: int) -> int:
        before, marker, pos = self._values.find_marker(text, pos)
        self._value.add_text(before, self._parts)
        if marker is not None:
            self._value.end_value(self._parts)
            self._state = "keys"
        return pos

    def _end_call(self) -> None:
        self._parts.add_arguments("}" if self._has_values else "{}")
        self._parts.end_call()


class _ValueWriter:
    """Writes one value as JSON: text as it arrives, other values when they are complete."""

    def __init__(self, schema: Any, *, is_framed: bool) -> None:
        self._types = _json_types(schema)
        self._is_framed = is_framed
        self._is_first = True
        self._is_open = False
        #: A line break that may end the value; the whole value if it is not a text.
        self._held = ""

    def add_text(self, text: str, parts: AnswerPartBuilder) -> None:
        """Add a part of the value."""
        if not text:
            return
        if self._is_first and self._is_framed:
            text = text.removeprefix("\n")
        self._is_first = False
        self._held += text
        if self._types == {"string"} or len(self._held) > MAX_HELD_CHARACTERS:
            keep = len(self._held) - (self._is_framed and self._held.endswith("\n"))
            self._write_text(self._held[:keep], parts)
            self._held = self._held[keep:]

    def end_value(self, parts: AnswerPartBuilder) -> None:
        """Write the rest."""
        rest = self._held
        if self._is_framed:
            rest = rest.removesuffix("\n")
        if self._is_open or self._types == {"string"}:
            self._write_text(rest, parts)
            parts.add_arguments('"')
        else:
            parts.add_arguments(_encode_value(rest, self._types))

    def _write_text(self, text: str, parts: AnswerPartBuilder) -> None:
        if not self._is_open:
            parts.add_arguments('"')
            self._is_open, self._types = True, {"string"}
        parts.add_arguments(json.dumps(text, ensure_ascii=False)[1:-1])


def _json_types(schema: Any) -> set[str]:
    """Return the types that a property may have; empty if its schema does not say."""
    if not isinstance(schema, Mapping):
        return set()
    found = schema.get("type")
    if isinstance(found, str):
        return {found}
    if isinstance(found, list):
        return {one for one in found if isinstance(one, str)}
    choices = schema.get("enum")
    if isinstance(choices, list) and choices and all(isinstance(one, str) for one in choices):
        return {"string"}
    return set()


def is_text(schema: Any) -> bool:
    """Whether a property can only be text, so that its value is plain."""
    return _json_types(schema) == {"string"}


def _encode_value(text: str, types: set[str]) -> str:
    """Encode a value as JSON.

    JSON that need not be a string is unchanged; everything else becomes a string.
    """
    raw = text.strip()
    try:
        value = _PYTHON_WORDS[raw] if raw in _PYTHON_WORDS else msgspec.json.decode(raw)
        is_text_too = "string" in types and not _has_type(value, types - {"string"})
        if not is_text_too:
            return raw if raw not in _PYTHON_WORDS else json.dumps(value)
    except (ValueError, RecursionError):
        pass
    return json.dumps(text, ensure_ascii=False)


def _has_type(value: Any, types: set[str]) -> bool:
    """Whether a decoded value is of one of the types."""
    kinds: dict[type, set[str]] = {
        type(None): {"null"},
        bool: {"boolean"},
        int: {"integer", "number"},
        float: {"number"},
        list: {"array"},
        dict: {"object"},
    }
    return bool(kinds.get(type(value), set()) & types)
