"""Encodes content, reasoning and tool calls as OpenAI messages and deltas."""

import secrets
from collections.abc import Sequence
from typing import Any

from msgspec import json

from molink.text.tool_calls.base import (
    AnswerPart,
    ReasoningDelta,
    TextDelta,
    ToolCallArguments,
    ToolCallBegin,
    ToolCallEnd,
)
from molinkd.api.content_blocks import ContentBlock, text_of_kind


def encode_delta(part: AnswerPart) -> bytes | None:
    """Encode the ``delta`` of ``part``; ``None`` if it adds nothing."""
    match part:
        case TextDelta(text):
            return b'{"content":' + json.encode(text) + b"}"
        case ReasoningDelta(text):
            return b'{"reasoning_content":' + json.encode(text) + b"}"
        case ToolCallBegin(index, name):
            return json.encode({"tool_calls": [{"index": index, **_tool_call(name, "")}]})
        case ToolCallArguments(index, text):
            call = {"index": index, "function": {"arguments": text}}
            return json.encode({"tool_calls": [call]})
        case ToolCallEnd():
            return None


def make_message(blocks: Sequence[ContentBlock]) -> dict[str, Any]:
    """Return the message of an answer; ``content`` is null if there are only calls."""
    content, thoughts = text_of_kind(blocks, "text"), text_of_kind(blocks, "thought")
    calls = [_tool_call(block.name, block.text) for block in blocks if block.kind == "call"]
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


def _tool_call(name: str, arguments: str) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"id": new_call_id(), "type": "function", "function": function}


def new_call_id() -> str:
    """Return a call id. Mistral's templates require nine letters or digits."""
    return secrets.token_hex(5)[:9]
