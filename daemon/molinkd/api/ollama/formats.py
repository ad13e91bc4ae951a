"""Answers as Ollama's clients read them: JSON objects, one a line in a stream."""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from msgspec import json

from molinkd.api.answer import Usage
from molinkd.api.choice import TextPiece
from molinkd.api.formats import logprob_entries, logprobs_of, text_of
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
        self._finish: str | None = None

    def opening(self, index: int) -> bytes:
        """Nothing: each line says all there is."""
        return b""

    def event(self, index: int, piece: TextPiece) -> bytes:
        """A line with what was added; none for the end alone."""
        self._finish = piece.finish
        if not piece.text and not piece.logprobs:
            return b""
        line = self._head + now().encode() + self._before + json.encode(piece.text) + self._after
        if piece.logprobs:
            line += b',"logprobs":' + json.encode(self._logprobs([piece]))
        return line + b"}\n"

    def keepalive(self) -> bytes:
        """A line that adds nothing."""
        return self._head + now().encode() + self._before + b'""' + self._after + b"}\n"

    def closing(self, usage: Usage) -> bytes:
        """The line with the figures."""
        return json.encode(self._object("", self._finish, usage)) + b"\n"

    def failure(self, problem: Problem) -> bytes:
        """A line with the error."""
        return envelope(problem) + b"\n"

    def whole(self, answers: Sequence[Sequence[TextPiece]], usage: Usage) -> bytes:
        """Everything in one object."""
        pieces = answers[0]
        found = self._object(text_of(pieces), pieces[-1].finish, usage)
        if self._plan.logprobs >= 0:
            found["logprobs"] = self._logprobs(pieces)
        return json.encode(found)

    def _object(self, text: str, finish: str | None, usage: Usage) -> dict[str, Any]:
        said = (
            {"message": {"role": "assistant", "content": text}}
            if self._chat
            else {"response": text}
        )
        return {
            "model": self._plan.offer.model.name,
            "created_at": now(),
            **said,
            "done": True,
            "done_reason": finish,
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


def _ns(seconds: float) -> int:
    """Nanoseconds; 1 at least, as clients divide by it."""
    return max(round(seconds * 1e9), 1)
