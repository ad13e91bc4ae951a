"""Answers of ``/v1/messages``, whole and as events."""

import secrets
from collections.abc import Sequence
from typing import Any

from msgspec import json

from molinkd.api.answer import Usage
from molinkd.api.choice import TextPiece
from molinkd.api.formats import EVENTS, text_of
from molinkd.api.problem import Problem
from molinkd.api.request_plan import Plan

_PREFIX = b'event: content_block_delta\ndata: {"type":"content_block_delta","index":0,'
_ERRORS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def envelope(problem: Problem) -> bytes:
    """An error's body."""
    other = "invalid_request_error" if problem.status < 500 else "api_error"
    error = {"type": _ERRORS.get(problem.status, other), "message": problem.message}
    return json.encode({"type": "error", "error": error})


class MessageFormat:
    """One answer."""

    content_type = EVENTS

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._id = f"msg_{secrets.token_hex(12)}"
        self._last = TextPiece("")

    def opening(self, index: int) -> bytes:
        """That the message and its text begin."""
        usage = {"input_tokens": self._plan.prompt_tokens, "output_tokens": 0}
        message = self._message([], TextPiece(""), usage)
        return _event("message_start", message=message) + _event(
            "content_block_start", index=0, content_block={"type": "text", "text": ""}
        )

    def event(self, index: int, piece: TextPiece) -> bytes:
        """A text that was added."""
        self._last = piece
        if not piece.text:
            return b""
        text = json.encode(piece.text)
        return _PREFIX + b'"delta":{"type":"text_delta","text":' + text + b"}}\n\n"

    def keepalive(self) -> bytes:
        """A ``ping``."""
        return _event("ping")

    def closing(self, usage: Usage) -> bytes:
        """Why it ended, and its figures."""
        delta = _ending(self._last)
        return (
            _event("content_block_stop", index=0)
            + _event("message_delta", delta=delta, usage=_figures(usage))
            + _event("message_stop")
        )

    def failure(self, problem: Problem) -> bytes:
        """The envelope, as an event."""
        return b"event: error\ndata: " + envelope(problem) + b"\n\n"

    def whole(self, answers: Sequence[Sequence[TextPiece]], usage: Usage) -> bytes:
        """A ``message``."""
        pieces = answers[0]
        content = [{"type": "text", "text": text_of(pieces)}]
        return json.encode(self._message(content, pieces[-1], _figures(usage)))

    def _message(
        self, content: list[dict[str, Any]], last: TextPiece, usage: dict[str, int]
    ) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._plan.offer.model.name,
            "content": content,
            **_ending(last),
            "usage": usage,
        }


def _ending(last: TextPiece) -> dict[str, Any]:
    reasons = {"length": "max_tokens", "stop": "stop_sequence" if last.stop else "end_turn"}
    reason = None if last.finish is None else reasons[last.finish]
    return {"stop_reason": reason, "stop_sequence": last.stop}


def _figures(usage: Usage) -> dict[str, int]:
    """What was in the cache doesn't count as input here."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_read_input_tokens": usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "output_tokens": usage.completion_tokens,
    }


def _event(kind: str, **fields: Any) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (kind.encode(), json.encode({"type": kind, **fields}))
