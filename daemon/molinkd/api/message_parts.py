"""Content, thoughts and calls of an answer as OpenAI's message, whole and bit by bit."""

import secrets
from collections.abc import Sequence
from typing import Any

from msgspec import json

from molink.text.calls.base import CallArguments, CallBegin, CallEnd, Part, Text, Thought
from molinkd.api.blocks import Block, text_in


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


def whole_message(blocks: Sequence[Block]) -> dict[str, Any]:
    """The message of an answer; ``content`` is null beside calls if there is none."""
    content, thoughts = text_in(blocks, "text"), text_in(blocks, "thought")
    calls = [_call(block.name, block.text) for block in blocks if block.kind == "call"]
    message: dict[str, Any] = {
        "role": "assistant",
        "content": None if calls and not content else content,
        "refusal": None,
    }
    if thoughts:
        message["reasoning_content"] = thoughts
    if calls:
        message["tool_calls"] = calls
    return message


def _call(name: str, arguments: str) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"id": new_call_id(), "type": "function", "function": function}


def new_call_id() -> str:
    """Mistral's templates want nine letters and digits; no other minds."""
    return secrets.token_hex(5)[:9]
