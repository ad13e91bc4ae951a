"""Content, thoughts and calls of an answer as OpenAI's message, whole and bit by bit."""

import secrets
from collections.abc import Iterable, Sequence
from typing import Any

from msgspec import json

from molink.text.calls.base import CallArguments, CallBegin, CallEnd, Part, Text, Thought
from molinkd.api.choice import TextPiece


def parts_of(piece: TextPiece) -> Sequence[Part]:
    """The parts of a piece, also of one that is content only."""
    return piece.parts or ((Text(piece.text),) if piece.text else ())


def delta_json(part: Part) -> bytes | None:
    """A stream's ``delta`` that adds ``part``; ``None`` if nothing says so."""
    match part:
        case Text(text):
            return b'{"content":' + json.encode(text) + b"}"
        case Thought(text):
            return b'{"reasoning_content":' + json.encode(text) + b"}"
        case CallBegin(index, name):
            return json.encode({"tool_calls": [{"index": index, **_call(name, "")}]})
        case CallArguments(index, text):
            call = {"index": index, "function": {"arguments": text}}
            return json.encode({"tool_calls": [call]})
        case CallEnd():
            return None


def whole_message(parts: Iterable[Part]) -> dict[str, Any]:
    """The message of ``parts``; ``content`` is null beside calls if there is none."""
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[tuple[str, list[str]]] = []
    for part in parts:
        match part:
            case Text(text):
                texts.append(text)
            case Thought(text):
                thoughts.append(text)
            case CallBegin(_, name):
                calls.append((name, []))
            case CallArguments(_, text):
                calls[-1][1].append(text)
    content = "".join(texts)
    message: dict[str, Any] = {
        "role": "assistant",
        "content": None if calls and not content else content,
        "refusal": None,
    }
    if thoughts:
        message["reasoning_content"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = [_call(name, "".join(arguments)) for name, arguments in calls]
    return message


def _call(name: str, arguments: str) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"id": _new_id(), "type": "function", "function": function}


def _new_id() -> str:
    """Mistral's templates want nine letters and digits; no other minds."""
    return secrets.token_hex(5)[:9]
