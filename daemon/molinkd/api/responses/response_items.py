"""The output items of a response: messages, reasoning and calls."""

import secrets
from collections.abc import Sequence
from typing import Any, Literal

from molinkd.api.content_blocks import ContentBlock
from molinkd.api.openai_encoders import logprob_entries
from molinkd.api.output_processor import TokenLogprob
from molinkd.api.request_plan import RequestPlan

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
        begun = status == "in_progress"
        item = {"id": self.item_id(block), "status": status}
        content = [] if begun else [self.make_part(block)]
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
                    "arguments": "" if begun else block.text,
                }

    def make_part(self, block: ContentBlock, *, begun: bool = False) -> dict[str, Any]:
        """Build the single content part of an item; empty when ``begun``."""
        text = "" if begun else block.text
        if block.kind == "thought":
            return {"type": "reasoning_text", "text": text}
        logprobs = [] if begun else self.make_logprobs(block.logprobs)
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}

    def make_logprobs(self, entries: Sequence[TokenLogprob]) -> list[dict[str, Any]]:
        """Encode logprobs; empty if not requested."""
        if self._plan.logprobs < 0:
            return []
        return logprob_entries(entries, self._plan.logprobs, self._plan.loaded_model.tokenizer)
