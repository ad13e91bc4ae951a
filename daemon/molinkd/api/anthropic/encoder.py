"""Encodes answers of ``/v1/messages``, whole or as events."""

import secrets
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from msgspec import json

from molinkd.api.content_blocks import (
    BlockEndedEvent,
    BlockEvent,
    BlockGrownEvent,
    BlockReader,
    BlockStartedEvent,
    ContentBlock,
    read_blocks,
)
from molinkd.api.generation_runner import Usage
from molinkd.api.openai.encoder import EVENT_STREAM
from molinkd.api.output_processor import TextPiece
from molinkd.api.problem import Problem
from molinkd.api.request_plan import RequestPlan

_DELTA = b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,"delta":'
#: Start of a delta, by block kind.
_DELTA_STARTS = {
    "text": b'{"type":"text_delta","text":',
    "thought": b'{"type":"thinking_delta","thinking":',
    "call": b'{"type":"input_json_delta","partial_json":',
}
_ERRORS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def encode_envelope(problem: Problem) -> bytes:
    """Encode an error."""
    other = "invalid_request_error" if problem.status < 500 else "api_error"
    error = {"type": _ERRORS.get(problem.status, other), "message": problem.message}
    return json.encode({"type": "error", "error": error})


class MessagesEncoder:
    """Encodes one answer."""

    content_type = EVENT_STREAM

    def __init__(self, plan: RequestPlan) -> None:
        self._plan = plan
        self._id = f"msg_{secrets.token_hex(12)}"
        self._last = TextPiece("")
        self._blocks = BlockReader()

    def encode_start(self, index: int) -> bytes:
        """Encode ``message_start``."""
        usage = {"input_tokens": self._plan.prompt_tokens, "output_tokens": 0}
        return _encode_event("message_start", message=self._message_json([], TextPiece(""), usage))

    def encode_piece(self, index: int, piece: TextPiece) -> bytes:
        """Encode the block events of ``piece``."""
        self._last = piece
        return b"".join(map(_encode_block_event, self._blocks.push_piece(piece)))

    def encode_keepalive(self) -> bytes:
        """Encode a ``ping``."""
        return _encode_event("ping")

    def encode_end(self, usage: Usage) -> bytes:
        """Encode the stop reason and usage."""
        return (
            b"".join(map(_encode_block_event, self._blocks.finish_blocks()))
            + _encode_event(
                "message_delta", delta=_stop_fields(self._last), usage=_usage_json(usage)
            )
            + _encode_event("message_stop")
        )

    def encode_error(self, problem: Problem) -> bytes:
        """Encode the error envelope as an event."""
        return b"event: error\ndata: " + encode_envelope(problem) + b"\n\n"

    def encode_response(self, answers: Sequence[Sequence[TextPiece]], usage: Usage) -> bytes:
        """Encode a ``message``."""
        content = [_complete_block_json(block) for block in read_blocks(answers[0])]
        last = answers[0][-1]
        if last.finish == "tool_calls" and all(part["type"] != "tool_use" for part in content):
            last = replace(last, finish="stop")
        return json.encode(self._message_json(content, last, _usage_json(usage)))

    def _message_json(
        self, content: list[dict[str, Any]], last: TextPiece, usage: dict[str, int]
    ) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._plan.loaded_model.model.name,
            "content": content,
            **_stop_fields(last),
            "usage": usage,
        }


def _encode_block_event(step: BlockEvent) -> bytes:
    match step:
        case BlockStartedEvent(block):
            start = _block_json(block)
            return _encode_event("content_block_start", index=block.index, content_block=start)
        case BlockGrownEvent(block, text):
            if not text:  # logprobs only, which this protocol lacks
                return b""
            return _DELTA % block.index + _DELTA_STARTS[block.kind] + json.encode(text) + b"}}\n\n"
        case BlockEndedEvent(block):
            return _encode_event("content_block_stop", index=block.index)


def _block_json(block: ContentBlock, text: str = "", arguments: object = None) -> dict[str, Any]:
    match block.kind:
        case "text":
            return {"type": "text", "text": text}
        case "thought":
            return {"type": "thinking", "thinking": text, "signature": ""}
        case "call":
            ident = f"toolu_{secrets.token_hex(12)}"
            return {"type": "tool_use", "id": ident, "name": block.name, "input": arguments or {}}


def _complete_block_json(block: ContentBlock) -> dict[str, Any]:
    """Encode a complete block; a call with invalid arguments becomes a text."""
    if block.kind == "call" and block.arguments is None:
        return {"type": "text", "text": block.as_text()}
    return _block_json(block, block.text, block.arguments if block.kind == "call" else None)


def _stop_fields(last: TextPiece) -> dict[str, Any]:
    reasons = {
        "length": "max_tokens",
        "stop": "stop_sequence" if last.stop else "end_turn",
        "tool_calls": "tool_use",
    }
    reason = None if last.finish is None else reasons[last.finish]
    return {"stop_reason": reason, "stop_sequence": last.stop}


def _usage_json(usage: Usage) -> dict[str, int]:
    """Return the usage; cached tokens don't count as input in this protocol."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_read_input_tokens": usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "output_tokens": usage.completion_tokens,
    }


def _encode_event(kind: str, **fields: Any) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (kind.encode(), json.encode({"type": kind, **fields}))
