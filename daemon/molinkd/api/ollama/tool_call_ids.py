"""Assigns ids to tool calls of a conversation, which Ollama's clients may omit."""

from collections import defaultdict, deque
from collections.abc import Sequence

import msgspec

from molinkd.api.openai_schema import CallId, ChatMessage, FunctionCall, ToolCall


class OllamaToolCall(msgspec.Struct, kw_only=True):
    """A tool call in a message."""

    function: FunctionCall
    id: CallId | None = None


class ToolCallIds:
    """Assigns ids to calls and matches results to them."""

    def __init__(self) -> None:
        self._count = 0
        #: Ids of calls without a result, in order; ids by tool.
        self._pending: dict[str, None] = {}
        self._ids_by_tool: defaultdict[str, deque[str]] = defaultdict(deque)

    def assign_ids(self, calls: Sequence[OllamaToolCall]) -> list[ToolCall] | None:
        """Return the calls of an answer with ids."""
        found = []
        for call in calls:
            ident = call.id or self._next_id()
            self._pending[ident] = None
            self._ids_by_tool[call.function.name].append(ident)
            found.append(ToolCall(id=ident, function=call.function))
        return found or None

    def match_result(self, content: str, ident: str | None, name: str | None) -> ChatMessage:
        """Match a result to a pending call: by ``ident``, else by tool name, else the first."""
        if ident is None:
            ident = (
                self._first_pending(name or "")
                or next(iter(self._pending), None)
                or self._next_id()
            )
        self._pending.pop(ident, None)
        return ChatMessage(role="tool", content=content, tool_call_id=ident, name=name)

    def _first_pending(self, name: str) -> str | None:
        queue = self._ids_by_tool.get(name, deque())
        while queue and queue[0] not in self._pending:
            queue.popleft()
        return queue[0] if queue else None

    def _next_id(self) -> str:
        self._count += 1
        return f"call_{self._count}"
