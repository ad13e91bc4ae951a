"""Encodes answers for Ollama's clients: JSON objects, one per line in a stream."""

import secrets
from collections.abc import Sequence
from datetime import UTC, datetime
from itertools import count
from typing import Any

from msgspec import json

from molinkd.api.content_blocks import (
    BlockEndedEvent,
    BlockEvent,
    BlockGrownEvent,
    BlockReader,
    ContentBlock,
    read_blocks,
    text_of_kind,
)
from molinkd.api.generation_runner import Usage
from molinkd.api.line_stream import NDJSON
from molinkd.api.openai.encoder import collect_logprobs, logprob_entries
from molinkd.api.output_processor import TextPiece
from molinkd.api.problem import Problem
from molinkd.api.request_plan import RequestPlan


def format_now() -> str:
    """Return the current time in Ollama's format."""
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


def encode_envelope(problem: Problem) -> bytes:
    """Encode an error."""
    return json.encode({"error": problem.message})


class OllamaEncoder:
    """Encodes answers of ``/api/chat`` (``chat``) or ``/api/generate``."""

    content_type = NDJSON

    def __init__(self, plan: RequestPlan, *, chat: bool) -> None:
        self._plan = plan
        self._chat = chat
        self._line_head = (
            b'{"model":' + json.encode(plan.loaded_model.model.name) + b',"created_at":"'
        )
        self._text_prefix, self._text_suffix = b'","response":', b',"done":false'
        if chat:
            self._text_prefix, self._text_suffix = (
                b'","message":{"role":"assistant","content":',
                b'},"done":false',
            )
        self._blocks = BlockReader()
        self._calls = 0
        self._finish: str | None = None

    def encode_start(self, index: int) -> bytes:
        """Return nothing: each line is self-contained."""
        return b""

    def encode_piece(self, index: int, piece: TextPiece) -> bytes:
        """Encode the added text and calls; empty for the end alone."""
        self._finish = piece.finish
        lines = self._encode_block_events(self._blocks.push_piece(piece))
        if not piece.logprobs:
            return b"".join(lines)
        *before, last = lines or [self._text_line()]
        logprobs = b',"logprobs":' + json.encode(self._logprobs_json([piece])) + b"}\n"
        return b"".join(before) + last.removesuffix(b"}\n") + logprobs

    def encode_keepalive(self) -> bytes:
        """Encode a line without content."""
        return self._text_line()

    def encode_end(self, usage: Usage) -> bytes:
        """Encode the last line, with usage."""
        lines = b"".join(self._encode_block_events(self._blocks.finish_blocks()))
        return (
            lines + json.encode(self._final_fields(_make_message(""), self._finish, usage)) + b"\n"
        )

    def encode_error(self, problem: Problem) -> bytes:
        """Encode the error as a line."""
        return encode_envelope(problem) + b"\n"

    def encode_response(self, answers: Sequence[Sequence[TextPiece]], usage: Usage) -> bytes:
        """Encode the answer as one object."""
        pieces = answers[0]
        blocks = read_blocks(pieces)
        calls = [block for block in blocks if _is_call(block)]
        text = "".join(
            block.as_text() for block in blocks if block.kind != "thought" and not _is_call(block)
        )
        message = _make_message(
            text, text_of_kind(blocks, "thought"), list(map(_tool_call, calls, count()))
        )
        found = self._final_fields(message, pieces[-1].finish, usage)
        if self._plan.logprobs >= 0:
            found["logprobs"] = self._logprobs_json(pieces)
        return json.encode(found)

    def _encode_block_events(self, steps: Sequence[BlockEvent]) -> list[bytes]:
        """Encode block events as lines; a call is sent when complete."""
        lines = []
        for step in steps:
            match step:
                case BlockGrownEvent(ContentBlock(kind="text"), text) if text:
                    lines.append(self._text_line(text))
                case BlockGrownEvent(ContentBlock(kind="thought"), text):
                    lines.append(self._message_line(_make_message("", text)))
                case BlockEndedEvent(ContentBlock(kind="call") as block) if _is_call(block):
                    call = _tool_call(block, self._calls)
                    self._calls += 1
                    lines.append(self._message_line(_make_message("", calls=[call])))
                case BlockEndedEvent(ContentBlock(kind="call") as block):
                    lines.append(self._text_line(block.as_text()))
        return lines

    def _text_line(self, text: str = "") -> bytes:
        message = self._text_prefix + json.encode(text) + self._text_suffix
        return self._line_head + format_now().encode() + message + b"}\n"

    def _message_line(self, message: dict[str, Any]) -> bytes:
        return json.encode({**self._common_fields(message), "done": False}) + b"\n"

    def _common_fields(self, message: dict[str, Any]) -> dict[str, Any]:
        """Return the fields of every object; ``/api/generate`` has ``response`` for a message."""
        fields: dict[str, Any] = {"message": message}
        if not self._chat:
            fields = {"response": message["content"]}
            if "thinking" in message:
                fields["thinking"] = message["thinking"]
        return {"model": self._plan.loaded_model.model.name, "created_at": format_now(), **fields}

    def _final_fields(
        self, message: dict[str, Any], finish: str | None, usage: Usage
    ) -> dict[str, Any]:
        return {
            **self._common_fields(message),
            "done": True,
            "done_reason": "length" if finish == "length" else "stop",
            "total_duration": _nanoseconds(usage.last_token_at - usage.started_at),
            "load_duration": _nanoseconds(usage.loaded_at - usage.started_at),
            "prompt_eval_count": usage.prompt_tokens,
            "prompt_eval_duration": _nanoseconds(usage.prompt_s),
            "eval_count": usage.completion_tokens,
            "eval_duration": _nanoseconds(usage.answer_s),
        }

    def _logprobs_json(self, pieces: Sequence[TextPiece]) -> list[dict[str, Any]]:
        plan = self._plan
        return logprob_entries(collect_logprobs(pieces), plan.logprobs, plan.loaded_model.tokenizer)


def _is_call(block: ContentBlock) -> bool:
    """Whether ``block`` is a call with valid arguments."""
    return block.kind == "call" and block.arguments is not None


def _tool_call(block: ContentBlock, index: int) -> dict[str, Any]:
    function = {"index": index, "name": block.name, "arguments": block.arguments}
    return {"id": f"call_{secrets.token_hex(4)}", "function": function}


def _make_message(
    content: str, thoughts: str = "", calls: Sequence[dict[str, Any]] = ()
) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if thoughts:
        message["thinking"] = thoughts
    if calls:
        message["tool_calls"] = calls
    return message


def _nanoseconds(seconds: float) -> int:
    """Convert to nanoseconds; at least 1, since clients divide by it."""
    return max(round(seconds * 1e9), 1)
