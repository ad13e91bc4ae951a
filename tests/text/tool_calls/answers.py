"""Runs parsers over answers, and returns the results in a short form."""

import itertools
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from molink.text.tool_calls.base import (
    AnswerParser,
    ReasoningDelta,
    TextDelta,
    ToolCallArguments,
    ToolCallBegin,
    ToolCallEnd,
)
from molink.text.tool_calls.create import AnswerFormat, create_answer_parser

#: Callable tools and their schemas.
TOOLS: dict[str, dict[str, Any] | None] = {
    "get_weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "array"},
            "count": {"type": "integer"},
            "note": {"type": ["string", "null"]},
        },
    },
    "now": None,
}
THINK = ("<think>", "</think>")


@dataclass
class Read:
    """A parsed answer: ``calls`` are names with arguments, ``ended`` tells which are complete."""

    text: str = ""
    thought: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)
    ended: list[int] = field(default_factory=list)


def cut_text(text: str, places: Iterable[int]) -> list[str]:
    """Cut ``text`` at ``places``."""
    bounds = [0, *sorted(places), len(text)]
    return [text[first:last] for first, last in itertools.pairwise(bounds)]


def read(parser: AnswerParser, pieces: Iterable[str]) -> Read:
    found = Read()
    parts = [part for piece in pieces for part in parser.parse_delta(piece)]
    for part in [*parts, *parser.finish_parsing()]:
        match part:
            case TextDelta(text):
                assert text
                found.text += text
            case ReasoningDelta(text):
                assert text
                found.thought += text
            case ToolCallBegin(index, name):
                assert index == len(found.calls)
                found.calls.append((name, ""))
            case ToolCallArguments(index, text):
                assert text
                assert index == len(found.calls) - 1
                name, before = found.calls[index]
                found.calls[index] = (name, before + text)
            case ToolCallEnd(index):
                assert index == len(found.calls) - 1
                found.ended.append(index)
    return found


def parser_of(calls: Any, tail: str = "", *, thinks: bool = False) -> AnswerParser:
    tags = THINK if thinks else None
    parser = create_answer_parser(AnswerFormat(calls, tags), TOOLS, tail)
    assert parser is not None
    return parser


def read_text(calls: Any, text: str, tail: str = "", *, thinks: bool = False) -> Read:
    """Parse ``text`` whole and character by character; both must give the same."""
    whole = read(parser_of(calls, tail, thinks=thinks), [text])
    assert read(parser_of(calls, tail, thinks=thinks), text) == whole
    return whole


def called(found: Read) -> list[tuple[str, Any]]:
    """The complete calls with parsed arguments."""
    assert found.ended == list(range(len(found.calls)))
    return [(name, json.loads(arguments)) for name, arguments in found.calls]
