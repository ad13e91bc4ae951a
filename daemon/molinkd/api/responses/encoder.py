"""Encodes answers of ``/v1/responses``, whole or as events."""

import secrets
import time
from collections.abc import Sequence
from typing import Any, Literal

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
from molinkd.api.openai.encoder import EVENT_STREAM, logprob_entries
from molinkd.api.output_processor import AnswerFinish, TextPiece, TokenLogprob
from molinkd.api.problem import Problem
from molinkd.api.request_plan import RequestPlan
from molinkd.api.responses.schema import ResponseRequest

ItemStatus = Literal["in_progress", "completed", "incomplete"]

_PREFIXES = {"text": "msg", "thought": "rs", "call": "fc"}


class ResponseItems:
    """The items of one answer, by block index."""

    def __init__(self, plan: RequestPlan) -> None:
        self._plan = plan
        self._ids: dict[int, str] = {}
        self._call_ids: dict[int, str] = {}

    def item_id(self, block: ContentBlock) -> str:
        """Return the id of a block's item."""
        new = f"{_PREFIXES[block.kind]}_{secrets.token_hex(24)}"
        return self._ids.setdefault(block.index, new)

    def make_item(self, block: ContentBlock, status: ItemStatus) -> dict[str, Any]:
        """Build an item; it has no content while in progress."""
        started = status == "in_progress"
        item = {"id": self.item_id(block), "status": status}
        content = [] if started else [self.make_part(block)]
        match block.kind:
            case "text":
                return {**item, "type": "message", "role": "assistant", "content": content}
            case "thought":
                return {**item, "type": "reasoning", "summary": [], "content": content}
            case "call":
                call_id = self._call_ids.setdefault(block.index, f"call_{secrets.token_hex(12)}")
                return {
                    **item,
                    "type": "function_call",
                    "call_id": call_id,
                    "name": block.name,
                    "arguments": "" if started else block.text,
                }

    def make_part(self, block: ContentBlock, *, started: bool = False) -> dict[str, Any]:
        """Build the single content part of an item; empty when ``started``."""
        text = "" if started else block.text
        if block.kind == "thought":
            return {"type": "reasoning_text", "text": text}
        logprobs = [] if started else self.make_logprobs(block.logprobs)
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}

    def make_logprobs(self, entries: Sequence[TokenLogprob]) -> list[dict[str, Any]]:
        """Encode logprobs; empty if not requested."""
        if self._plan.logprobs < 0:
            return []
        return logprob_entries(entries, self._plan.logprobs, self._plan.loaded_model.tokenizer)


#: Event names of a block's text.
_EVENTS = {
    "text": "response.output_text",
    "thought": "response.reasoning_text",
    "call": "response.function_call_arguments",
}


class ResponsesEncoder:
    """Encodes one answer, which repeats the fields of ``request`` as OpenAI does."""

    content_type = EVENT_STREAM

    def __init__(self, plan: RequestPlan, request: ResponseRequest) -> None:
        self._plan = plan
        self._request = request
        self._id = f"resp_{secrets.token_hex(24)}"
        self._created_at = int(time.time())
        self._sequence_number = 0
        self._items = ResponseItems(plan)
        self._blocks = BlockReader()
        self._finish: AnswerFinish | None = None
        self._delta_start = b""

    def encode_start(self, index: int) -> bytes:
        """Encode the start of the response."""
        response = self._response_fields("in_progress", [])
        return self._encode_event("response.created", response=response) + self._encode_event(
            "response.in_progress", response=response
        )

    def encode_piece(self, index: int, piece: TextPiece) -> bytes:
        """Encode the item events of ``piece``."""
        self._finish = piece.finish
        return b"".join(map(self._encode_block_event, self._blocks.push_piece(piece)))

    def encode_keepalive(self) -> bytes:
        """Encode a comment."""
        return b": waiting\n\n"

    def encode_end(self, usage: Usage) -> bytes:
        """Encode the end of the last item and the response."""
        steps = b"".join(map(self._encode_block_event, self._blocks.finish_blocks()))
        done = self._final_response(self._blocks.blocks, self._finish, usage)
        return steps + self._encode_event(f"response.{done['status']}", response=done)

    def encode_error(self, problem: Problem) -> bytes:
        """Encode an ``error`` event, with the envelope that makes clients raise."""
        return self._encode_event(
            "error",
            code=problem.code,
            message=problem.message,
            param=problem.param,
            error=problem.error_fields(),
        )

    def encode_response(self, answers: Sequence[Sequence[TextPiece]], usage: Usage) -> bytes:
        """Encode a ``response``."""
        pieces = answers[0]
        return json.encode(self._final_response(read_blocks(pieces), pieces[-1].finish, usage))

    def _encode_block_event(self, step: BlockEvent) -> bytes:
        match step:
            case BlockStartedEvent(block):
                return self._encode_block_start(block)
            case BlockGrownEvent(block, text, logprobs):
                delta = self._delta_start + json.encode(text)
                if block.kind == "text":
                    delta += b',"logprobs":' + json.encode(self._items.make_logprobs(logprobs))
                return delta + b',"sequence_number":%d}\n\n' % self._next_number()
            case BlockEndedEvent(block):
                return self._encode_block_end(block)

    def _encode_block_start(self, block: ContentBlock) -> bytes:
        kind, position = f"{_EVENTS[block.kind]}.delta", self._item_position(block)
        delta = json.encode({"type": kind, **position})[:-1] + b',"delta":'
        self._delta_start = b"event: " + kind.encode() + b"\ndata: " + delta
        item = self._items.make_item(block, "in_progress")
        started = self._encode_event(
            "response.output_item.added", output_index=block.index, item=item
        )
        if block.kind == "call":
            return started
        part = self._items.make_part(block, started=True)
        return started + self._encode_event("response.content_part.added", **position, part=part)

    def _encode_block_end(self, block: ContentBlock) -> bytes:
        kind, position = f"{_EVENTS[block.kind]}.done", self._item_position(block)
        if block.kind == "call":
            done = self._encode_event(kind, **position, name=block.name, arguments=block.text)
        else:
            part = self._items.make_part(block)
            more = {"logprobs": part["logprobs"]} if block.kind == "text" else {}
            done = self._encode_event(kind, **position, text=block.text, **more)
            done += self._encode_event("response.content_part.done", **position, part=part)
        item = self._items.make_item(
            block, self._item_status(block, self._blocks.blocks, self._finish)
        )
        return done + self._encode_event(
            "response.output_item.done", output_index=block.index, item=item
        )

    def _item_position(self, block: ContentBlock) -> dict[str, Any]:
        position = {"item_id": self._items.item_id(block), "output_index": block.index}
        return position if block.kind == "call" else {**position, "content_index": 0}

    def _next_number(self) -> int:
        number = self._sequence_number
        self._sequence_number += 1
        return number

    def _encode_event(self, kind: str, **fields: Any) -> bytes:
        data = json.encode({"type": kind, **fields, "sequence_number": self._next_number()})
        return b"event: %s\ndata: %s\n\n" % (kind.encode(), data)

    @staticmethod
    def _item_status(
        block: ContentBlock, blocks: Sequence[ContentBlock], finish: AnswerFinish | None
    ) -> ItemStatus:
        """Return a block's status; the last item of a cut answer is incomplete."""
        cut = finish == "length" and block is blocks[-1]
        return "incomplete" if cut else "completed"

    def _final_response(
        self, blocks: Sequence[ContentBlock], finish: AnswerFinish | None, usage: Usage
    ) -> dict[str, Any]:
        items = [
            self._items.make_item(block, self._item_status(block, blocks, finish))
            for block in blocks
        ]
        response = self._response_fields("incomplete" if finish == "length" else "completed", items)
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
            "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        }
        return response

    def _response_fields(
        self, status: ItemStatus, output: Sequence[dict[str, Any]]
    ) -> dict[str, Any]:
        """Return the response object without usage."""
        request = self._request
        sampling = self._plan.choices[0].request.sampling_params
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created_at,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "metadata": request.metadata or {},
            "model": self._plan.loaded_model.model.name,
            "output": output,
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {
                "effort": request.reasoning.effort if request.reasoning is not None else None,
                "summary": None,
            },
            "store": False,
            "temperature": sampling.temperature,
            "text": {"format": request.text_format},
            "tool_choice": request.tool_choice or "auto",
            "tools": request.tools or [],
            "top_logprobs": max(self._plan.logprobs, 0),
            "top_p": sampling.top_p,
            "truncation": "disabled",
            "usage": None,
        }
