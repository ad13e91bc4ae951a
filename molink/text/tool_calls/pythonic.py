"""Parses calls written in Python: ``[get_weather(city="Paris"), now()]``, as Llama 3.2 and 4 may.

The answer consists of such a list only; values are literals. A list is emitted when it is complete.
"""

import ast
import json
import warnings
from typing import Any, Literal

from molink.text.tool_calls.base import MAX_HELD_SPACE, AnswerPart, AnswerPartBuilder
from molink.text.tool_calls.call_reader import MAX_HELD_CHARACTERS

TAG = "<|python_tag|>"
MARKERS = frozenset({TAG})
_BRACKETS = {")": "(", "]": "[", "}": "{"}
#: JSON's names of Python's constants.
_JSON_WORDS = {"true": True, "false": False, "null": None}
#: Names and JSON arguments of calls.
Calls = list[tuple[str, str]]
#: Maximum nesting of values.
MAX_DEPTH = 32


class _JsonWords(ast.NodeTransformer):
    """Replaces JSON's constants, which objects in calls may contain."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(_JSON_WORDS[node.id]) if node.id in _JSON_WORDS else node


class PythonicParser:
    """Implements :class:`molink.text.tool_calls.base.AnswerParser`."""

    is_reasoning = False

    def __init__(self, names: frozenset[str]) -> None:
        self._names = names
        self._parts = AnswerPartBuilder()
        self._state: Literal["first", "list", "outside"] = "first"
        self._held = ""
        #: Open brackets, the quote of an open string, and whether its next character is escaped.
        self._open = ""
        self._quote = ""
        self._escaped = False

    def parse_delta(self, text: str) -> list[AnswerPart]:
        for pos, char in enumerate(text):
            if self._state == "outside":
                self._parts.add_text(text[pos:])
                break
            self._held += char
            if self._state == "first":
                self._read_opening(char)
            else:
                self._read_list(char)
        return self._parts.drain_parts()

    def finish_parsing(self) -> list[AnswerPart]:
        self._parts.add_text(self._held)
        return self._parts.finish_parts()

    def _read_opening(self, char: str) -> None:
        begun = self._held.lstrip()
        may_begin = TAG.startswith(begun) or begun.rstrip() == TAG
        if char == "[" and "".join(begun.split()) in ("[", TAG + "["):
            self._state, self._open = "list", "["
        elif not may_begin or len(self._held) > MAX_HELD_SPACE:
            self._abandon_list()

    def _read_list(self, char: str) -> None:
        if self._quote:
            ends = char == self._quote and not self._escaped
            self._escaped = char == "\\" and not self._escaped
            self._quote = "" if ends else self._quote
        elif char in "\"'":
            self._quote = char
        elif char in "([{":
            self._open += char
        elif char in _BRACKETS:
            if self._open[-1] != _BRACKETS[char]:
                self._abandon_list()
                return
            self._open = self._open[:-1]
            if not self._open:
                self._settle_list()
                return
        if len(self._open) > MAX_DEPTH or len(self._held) > MAX_HELD_CHARACTERS:
            self._abandon_list()

    def _settle_list(self) -> None:
        calls = parse_python_calls(self._held[self._held.index("[") :], self._names)
        if calls is None:
            self._abandon_list()
            return
        for name, arguments in calls:
            self._parts.begin_call(name)
            self._parts.add_arguments(arguments)
            self._parts.end_call()
        self._held, self._state = "", "outside"

    def _abandon_list(self) -> None:
        self._parts.add_text(self._held)
        self._held, self._state = "", "outside"


def parse_python_calls(text: str, names: frozenset[str]) -> Calls | None:
    """Parse a list of calls of ``names``; ``None`` if it is anything else."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warnings about unknown escapes in strings
            tree = ast.parse(text.strip(), mode="eval").body
        if not isinstance(tree, ast.List) or not tree.elts:
            return None
        calls = [_parse_call(each, names) for each in tree.elts]
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None
    return None if None in calls else [call for call in calls if call is not None]


def _parse_call(node: ast.expr, names: frozenset[str]) -> tuple[str, str] | None:
    if not isinstance(node, ast.Call) or node.args:
        return None
    name = ast.unparse(node.func)
    if name not in names:
        return None
    values: dict[str, Any] = {}
    for keyword in node.keywords:
        if keyword.arg is None:
            return None
        values[keyword.arg] = ast.literal_eval(_JsonWords().visit(keyword.value))
    text = json.dumps(values, ensure_ascii=False, allow_nan=False)
    text.encode("utf-8")  # this fails for half a surrogate pair
    return name, text
