"""Answers of ``/v1/responses``: one object, or events that tell how it comes to be."""

import secrets
import time
from collections.abc import Sequence
from typing import Any

from msgspec import json

from molinkd.api.answer import Usage
from molinkd.api.blocks import (
    Block,
    BlockBegun,
    BlockEnded,
    BlockGrown,
    BlockReader,
    Step,
    blocks_of,
)
from molinkd.api.choice import AnswerFinish, TextPiece
from molinkd.api.formats import EVENTS
from molinkd.api.problem import Problem
from molinkd.api.request_plan import Plan
from molinkd.api.responses.items import Items, ItemStatus
from molinkd.api.responses.schema import ResponseRequest

#: What the events of a block's text are called.
_EVENTS = {
    "text": "response.output_text",
    "thought": "response.reasoning_text",
    "call": "response.function_call_arguments",
}


class ResponseObjectFormat:
    """One answer; ``asked`` is repeated in it, as OpenAI does."""

    content_type = EVENTS

    def __init__(self, plan: Plan, asked: ResponseRequest) -> None:
        self._plan = plan
        self._asked = asked
        self._id = f"resp_{secrets.token_hex(24)}"
        self._created = int(time.time())
        self._number = 0
        self._items = Items(plan)
        self._blocks = BlockReader()
        self._finish: AnswerFinish | None = None
        self._delta = b""

    def opening(self, index: int) -> bytes:
        """That the answer begins."""
        response = self._response("in_progress", [])
        return self._event("response.created", response=response) + self._event(
            "response.in_progress", response=response
        )

    def event(self, index: int, piece: TextPiece) -> bytes:
        """What was added to which item."""
        self._finish = piece.finish
        return b"".join(map(self._step, self._blocks.push(piece)))

    def keepalive(self) -> bytes:
        """A comment."""
        return b": waiting\n\n"

    def closing(self, usage: Usage) -> bytes:
        """That the last item and the answer are complete."""
        steps = b"".join(map(self._step, self._blocks.finish()))
        done = self._done(self._blocks.blocks, self._finish, usage)
        return steps + self._event(f"response.{done['status']}", response=done)

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
        pieces = answers[0]
        return json.encode(self._done(blocks_of(pieces), pieces[-1].finish, usage))

    def _step(self, step: Step) -> bytes:
        match step:
            case BlockBegun(block):
                return self._begun(block)
            case BlockGrown(block, text, logprobs):
                delta = self._delta + json.encode(text)
                if block.kind == "text":
                    delta += b',"logprobs":' + json.encode(self._items.logprobs(logprobs))
                return delta + b',"sequence_number":%d}\n\n' % self._next()
            case BlockEnded(block):
                return self._ended(block)

    def _begun(self, block: Block) -> bytes:
        kind, place = f"{_EVENTS[block.kind]}.delta", self._place(block)
        delta = json.encode({"type": kind, **place})[:-1] + b',"delta":'
        self._delta = b"event: " + kind.encode() + b"\ndata: " + delta
        item = self._items.item(block, "in_progress")
        begun = self._event("response.output_item.added", output_index=block.index, item=item)
        if block.kind == "call":
            return begun
        part = self._items.part(block, begun=True)
        return begun + self._event("response.content_part.added", **place, part=part)

    def _ended(self, block: Block) -> bytes:
        kind, place = f"{_EVENTS[block.kind]}.done", self._place(block)
        if block.kind == "call":
            done = self._event(kind, **place, name=block.name, arguments=block.text)
        else:
            part = self._items.part(block)
            more = {"logprobs": part["logprobs"]} if block.kind == "text" else {}
            done = self._event(kind, **place, text=block.text, **more)
            done += self._event("response.content_part.done", **place, part=part)
        item = self._items.item(block, self._status(block, self._blocks.blocks, self._finish))
        return done + self._event("response.output_item.done", output_index=block.index, item=item)

    def _place(self, block: Block) -> dict[str, Any]:
        place = {"item_id": self._items.id_of(block), "output_index": block.index}
        return place if block.kind == "call" else {**place, "content_index": 0}

    def _next(self) -> int:
        number = self._number
        self._number += 1
        return number

    def _event(self, kind: str, **fields: Any) -> bytes:
        data = json.encode({"type": kind, **fields, "sequence_number": self._next()})
        return b"event: %s\ndata: %s\n\n" % (kind.encode(), data)

    @staticmethod
    def _status(block: Block, blocks: Sequence[Block], finish: AnswerFinish | None) -> ItemStatus:
        """What is missing of a cut answer is missing of its last item."""
        cut = finish == "length" and block is blocks[-1]
        return "incomplete" if cut else "completed"

    def _done(
        self, blocks: Sequence[Block], finish: AnswerFinish | None, usage: Usage
    ) -> dict[str, Any]:
        items = [self._items.item(block, self._status(block, blocks, finish)) for block in blocks]
        response = self._response("incomplete" if finish == "length" else "completed", items)
        response["completed_at"] = int(time.time())
        if finish == "length":
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        response["usage"] = {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {
                "cached_tokens": usage.cached_tokens,
                "cache_write_tokens": 0,
            },
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": usage.thinking_tokens},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        }
        return response

    def _response(self, status: ItemStatus, output: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """The object, without figures."""
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
            "output": output,
            "parallel_tool_calls": asked.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {
                "effort": asked.reasoning.effort if asked.reasoning is not None else None,
                "summary": None,
            },
            "store": False,
            "temperature": sampling.temperature,
            "text": {"format": asked.form},
            "tool_choice": asked.tool_choice or "auto",
            "tools": asked.tools or [],
            "top_logprobs": max(self._plan.logprobs, 0),
            "top_p": sampling.top_p,
            "truncation": "disabled",
            "usage": None,
        }
