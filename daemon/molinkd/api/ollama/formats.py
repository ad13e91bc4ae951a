"""Answers as Ollama's clients read them: JSON objects, one a line in a stream."""

import secrets
from collections.abc import Sequence
from datetime import UTC, datetime
from itertools import count
from typing import Any

from msgspec import json

from molinkd.api.answer import Usage
from molinkd.api.blocks import Block, BlockEnded, BlockGrown, BlockReader, Step, blocks_of, text_in
from molinkd.api.choice import TextPiece
from molinkd.api.formats import logprob_entries, logprobs_of
from molinkd.api.problem import Problem
from molinkd.api.request_plan import Plan

LINES = "application/x-ndjson"


def now() -> str:
    """The time as Ollama writes it."""
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


def envelope(problem: Problem) -> bytes:
    """An error's body."""
    return json.encode({"error": problem.message})


class OllamaFormat:
    """Answers of ``/api/chat`` (``chat``), or of ``/api/generate``."""

    content_type = LINES

    def __init__(self, plan: Plan, *, chat: bool) -> None:
        self._plan = plan
        self._chat = chat
        self._head = b'{"model":' + json.encode(plan.offer.model.name) + b',"created_at":"'
        self._before, self._after = b'","response":', b',"done":false'
        if chat:
            self._before, self._after = (
                b'","message":{"role":"assistant","content":',
                b'},"done":false',
            )
        self._blocks = BlockReader()
        self._calls = 0
        self._finish: str | None = None

    def opening(self, index: int) -> bytes:
        """Nothing: each line says all there is."""
        return b""

    def event(self, index: int, piece: TextPiece) -> bytes:
        """Lines with what was added; none for the end alone."""
        self._finish = piece.finish
        lines = self._lines(self._blocks.push(piece))
        if not piece.logprobs:
            return b"".join(lines)
        *before, last = lines or [self._line()]
        logprobs = b',"logprobs":' + json.encode(self._logprobs([piece])) + b"}\n"
        return b"".join(before) + last.removesuffix(b"}\n") + logprobs

    def keepalive(self) -> bytes:
        """A line that adds nothing."""
        return self._line()

    def closing(self, usage: Usage) -> bytes:
        """The line with the figures."""
        lines = b"".join(self._lines(self._blocks.finish()))
        return lines + json.encode(self._object(_said(""), self._finish, usage)) + b"\n"

    def failure(self, problem: Problem) -> bytes:
        """A line with the error."""
        return envelope(problem) + b"\n"

    def whole(self, answers: Sequence[Sequence[TextPiece]], usage: Usage) -> bytes:
        """Everything in one object."""
        pieces = answers[0]
        blocks = blocks_of(pieces)
        calls = [block for block in blocks if _is_call(block)]
        text = "".join(
            block.as_text() for block in blocks if block.kind != "thought" and not _is_call(block)
        )
        said = _said(text, text_in(blocks, "thought"), list(map(_call, calls, count())))
        found = self._object(said, pieces[-1].finish, usage)
        if self._plan.logprobs >= 0:
            found["logprobs"] = self._logprobs(pieces)
        return json.encode(found)

    def _lines(self, steps: Sequence[Step]) -> list[bytes]:
        """A call comes when it is complete, in one line."""
        lines = []
        for step in steps:
            match step:
                case BlockGrown(Block(kind="text"), text) if text:
                    lines.append(self._line(text))
                case BlockGrown(Block(kind="thought"), text):
                    lines.append(self._object_line(_said("", text)))
                case BlockEnded(Block(kind="call") as block) if _is_call(block):
                    call = _call(block, self._calls)
                    self._calls += 1
                    lines.append(self._object_line(_said("", calls=[call])))
                case BlockEnded(Block(kind="call") as block):
                    lines.append(self._line(block.as_text()))
        return lines

    def _line(self, text: str = "") -> bytes:
        said = self._before + json.encode(text) + self._after
        return self._head + now().encode() + said + b"}\n"

    def _object_line(self, said: dict[str, Any]) -> bytes:
        return json.encode({**self._common(said), "done": False}) + b"\n"

    def _common(self, said: dict[str, Any]) -> dict[str, Any]:
        """``said`` is a message; to a prompt its content is the ``response``."""
        shown: dict[str, Any] = {"message": said}
        if not self._chat:
            shown = {"response": said["content"]}
            if "thinking" in said:
                shown["thinking"] = said["thinking"]
        return {"model": self._plan.offer.model.name, "created_at": now(), **shown}

    def _object(self, said: dict[str, Any], finish: str | None, usage: Usage) -> dict[str, Any]:
        return {
            **self._common(said),
            "done": True,
            "done_reason": "length" if finish == "length" else "stop",
            "total_duration": _ns(usage.last - usage.began),
            "load_duration": _ns(usage.loaded - usage.began),
            "prompt_eval_count": usage.prompt_tokens,
            "prompt_eval_duration": _ns(usage.prompt_s),
            "eval_count": usage.completion_tokens,
            "eval_duration": _ns(usage.answer_s),
        }

    def _logprobs(self, pieces: Sequence[TextPiece]) -> list[dict[str, Any]]:
        plan = self._plan
        return logprob_entries(logprobs_of(pieces), plan.logprobs, plan.offer.tokenizer)


def _is_call(block: Block) -> bool:
    """Whether ``block`` is a call that can be followed: its arguments are an object here."""
    return block.kind == "call" and block.arguments is not None


def _call(block: Block, index: int) -> dict[str, Any]:
    function = {"index": index, "name": block.name, "arguments": block.arguments}
    return {"id": f"call_{secrets.token_hex(4)}", "function": function}


def _said(content: str, thoughts: str = "", calls: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
    """A message."""
    said: dict[str, Any] = {"role": "assistant", "content": content}
    if thoughts:
        said["thinking"] = thoughts
    if calls:
        said["tool_calls"] = calls
    return said


def _ns(seconds: float) -> int:
    """Nanoseconds; 1 at least, as clients divide by it."""
    return max(round(seconds * 1e9), 1)
