"""Answers of ``/v1/responses``: one object, or events that tell how it comes to be."""

import secrets
import time
from collections.abc import Sequence
from typing import Any

from msgspec import json

from molinkd.api.answer import Usage
from molinkd.api.choice import TextPiece
from molinkd.api.formats import EVENTS, logprob_entries, logprobs_of, text_of
from molinkd.api.problem import Problem
from molinkd.api.request_plan import Plan
from molinkd.api.responses.schema import ResponseRequest

#: Where the only text of an answer is.
_PLACE = {"output_index": 0, "content_index": 0}


class ResponseFormat:
    """One answer; ``asked`` is repeated in it, as OpenAI does."""

    content_type = EVENTS

    def __init__(self, plan: Plan, asked: ResponseRequest) -> None:
        self._plan = plan
        self._asked = asked
        self._id = f"resp_{secrets.token_hex(24)}"
        self._item = f"msg_{secrets.token_hex(24)}"
        self._created = int(time.time())
        self._number = 0
        self._pieces: list[TextPiece] = []
        delta = {"type": "response.output_text.delta", "item_id": self._item, **_PLACE}
        self._delta = b"event: response.output_text.delta\ndata: " + json.encode(delta)[:-1]

    def opening(self, index: int) -> bytes:
        """That the answer, its message and its text begin."""
        response = self._response("in_progress")
        item = self._message("in_progress", [])
        return (
            self._event("response.created", response=response)
            + self._event("response.in_progress", response=response)
            + self._event("response.output_item.added", output_index=0, item=item)
            + self._event(
                "response.content_part.added",
                item_id=self._item,
                **_PLACE,
                part={"type": "output_text", "text": "", "annotations": [], "logprobs": []},
            )
        )

    def event(self, index: int, piece: TextPiece) -> bytes:
        """A text that was added."""
        self._pieces.append(piece)
        if not piece.text and not piece.logprobs:
            return b""
        logprobs = json.encode(self._logprobs([piece])) if piece.logprobs else b"[]"
        return self._delta + b',"delta":%s,"logprobs":%s,"sequence_number":%d}\n\n' % (
            json.encode(piece.text),
            logprobs,
            self._next(),
        )

    def keepalive(self) -> bytes:
        """A comment."""
        return b": waiting\n\n"

    def closing(self, usage: Usage) -> bytes:
        """That text, message and answer are complete."""
        text, status = text_of(self._pieces), self._status(self._pieces)
        part = self._part(self._pieces)
        return (
            self._event(
                "response.output_text.done",
                item_id=self._item,
                **_PLACE,
                text=text,
                logprobs=part["logprobs"],
            )
            + self._event("response.content_part.done", item_id=self._item, **_PLACE, part=part)
            + self._event(
                "response.output_item.done", output_index=0, item=self._message(status, [part])
            )
            + self._event(f"response.{status}", response=self._done(self._pieces, usage))
        )

    def failure(self, problem: Problem) -> bytes:
        """An ``error`` event; with an envelope in it, at which clients raise."""
        return self._event(
            "error",
            code=problem.code,
            message=problem.message,
            param=problem.param,
            error=problem.fields(),
        )

    def whole(self, answers: Sequence[Sequence[TextPiece]], usage: Usage) -> bytes:
        """A ``response``."""
        return json.encode(self._done(answers[0], usage))

    def _next(self) -> int:
        number = self._number
        self._number += 1
        return number

    def _event(self, kind: str, **fields: Any) -> bytes:
        data = json.encode({"type": kind, **fields, "sequence_number": self._next()})
        return b"event: %s\ndata: %s\n\n" % (kind.encode(), data)

    def _status(self, pieces: Sequence[TextPiece]) -> str:
        return "incomplete" if pieces[-1].finish == "length" else "completed"

    def _part(self, pieces: Sequence[TextPiece]) -> dict[str, Any]:
        logprobs = self._logprobs(pieces) if self._plan.logprobs >= 0 else []
        text = text_of(pieces)
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}

    def _message(self, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._item,
            "type": "message",
            "status": status,
            "role": "assistant",
            "content": content,
        }

    def _logprobs(self, pieces: Sequence[TextPiece]) -> list[dict[str, Any]]:
        plan = self._plan
        return logprob_entries(logprobs_of(pieces), plan.logprobs, plan.offer.tokenizer)

    def _done(self, pieces: Sequence[TextPiece], usage: Usage) -> dict[str, Any]:
        status = self._status(pieces)
        response = self._response(status)
        response["output"] = [self._message(status, [self._part(pieces)])]
        response["completed_at"] = int(time.time())
        if status == "incomplete":
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        response["usage"] = {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {
                "cached_tokens": usage.cached_tokens,
                "cache_write_tokens": 0,
            },
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        }
        return response

    def _response(self, status: str) -> dict[str, Any]:
        """The object before there is anything in it."""
        asked = self._asked
        sampling = self._plan.choices[0].request.sampling
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": asked.instructions,
            "max_output_tokens": asked.max_output_tokens,
            "metadata": asked.metadata or {},
            "model": self._plan.offer.model.name,
            "output": [],
            "parallel_tool_calls": False,
            "previous_response_id": None,
            "reasoning": {
                "effort": asked.reasoning.effort if asked.reasoning is not None else None,
                "summary": None,
            },
            "store": False,
            "temperature": sampling.temperature,
            "text": {"format": {"type": "text"}},
            "tool_choice": "auto",
            "tools": [],
            "top_logprobs": max(self._plan.logprobs, 0),
            "top_p": sampling.top_p,
            "truncation": "disabled",
            "usage": None,
        }
