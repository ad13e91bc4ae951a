"""Encodes answers in OpenAI's chat and completion formats, whole or as event streams.

The constant parts of events are serialized once per choice: at 64 streams, encoding whole objects
for every token would dominate the endpoint's work.
"""

import secrets
import time
from collections.abc import Sequence
from typing import Any, ClassVar, Protocol

from msgspec import json

from molink.text.tokenizer import Tokenizer
from molink.text.tool_calls.base import (
    AnswerPart,
    ReasoningDelta,
    TextDelta,
    ToolCallArguments,
    ToolCallBegin,
    ToolCallEnd,
)
from molinkd.api.content_blocks import ContentBlock, piece_parts, read_blocks, text_of_kind
from molinkd.api.generation_runner import Usage
from molinkd.api.output_processor import MIN_LOGPROB, TextPiece, TokenLogprob
from molinkd.api.problem import Problem
from molinkd.api.request_plan import RequestPlan


def encode_delta(part: AnswerPart) -> bytes | None:
    """Encode the ``delta`` of ``part``; ``None`` if it adds nothing."""
    match part:
        case TextDelta(text):
            return b'{"content":' + json.encode(text) + b"}"
        case ReasoningDelta(text):
            return b'{"reasoning_content":' + json.encode(text) + b"}"
        case ToolCallBegin(index, name):
            return json.encode({"tool_calls": [{"index": index, **_tool_call(name, "")}]})
        case ToolCallArguments(index, text):
            call = {"index": index, "function": {"arguments": text}}
            return json.encode({"tool_calls": [call]})
        case ToolCallEnd():
            return None


def make_message(blocks: Sequence[ContentBlock]) -> dict[str, Any]:
    """Return the message of an answer; ``content`` is null if there are only calls."""
    content, thoughts = text_of_kind(blocks, "text"), text_of_kind(blocks, "thought")
    calls = [_tool_call(block.name, block.text) for block in blocks if block.kind == "call"]
    message: dict[str, Any] = {
        "role": "assistant",
        "content": None if calls and not content else content,
        "refusal": None,
    }
    if thoughts:
        message["reasoning_content"] = thoughts
    if calls:
        message["tool_calls"] = calls
    return message


def _tool_call(name: str, arguments: str) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"id": new_call_id(), "type": "function", "function": function}


def new_call_id() -> str:
    """Return a call id. Mistral's templates require nine letters or digits."""
    return secrets.token_hex(5)[:9]


DONE = b"data: [DONE]\n\n"
#: Server-sent events.
EVENT_STREAM = "text/event-stream"


class ResponseEncoder(Protocol):
    """Encodes one answer in the format of a route."""

    #: The content type of a stream.
    content_type: str

    def encode_start(self, index: int) -> bytes:
        """Encode the events before the first piece of choice ``index``; may be empty."""
        ...

    def encode_piece(self, index: int, piece: TextPiece) -> bytes:
        """Encode the events of ``piece``."""
        ...

    def encode_keepalive(self) -> bytes:
        """Encode an event without content, which keeps the connection alive."""
        ...

    def encode_end(self, usage: Usage) -> bytes:
        """Encode the events that end a stream."""
        ...

    def encode_error(self, problem: Problem) -> bytes:
        """Encode an error in a stream that has started."""
        ...

    def encode_response(self, answers: Sequence[Sequence[TextPiece]], usage: Usage) -> bytes:
        """Encode the answer as one object; ``answers`` has the pieces of each choice."""
        ...


class _OpenAIEncoder:
    """Shared parts of both formats."""

    #: Prefix of ids, object type of a response and of an event, name of the text field.
    content_type = EVENT_STREAM
    _id_prefix: ClassVar[str]
    _object: ClassVar[str]
    _chunk: ClassVar[str]
    _text_field: ClassVar[bytes]

    def __init__(self, plan: RequestPlan, with_usage: bool = False) -> None:
        self._model, self._tokenizer = plan.loaded_model.model, plan.loaded_model.tokenizer
        self._num_logprobs = plan.logprobs
        self._response_head = _make_response_head(self._id_prefix, self._object, plan)
        self._event_head = _make_event_head(self._id_prefix, self._chunk, plan)
        self._prefixes = [
            self._event_head + b'"choices":[{"index":%d,"%s":' % (choice.index, self._text_field)
            for choice in plan.choices
        ]
        self._with_usage = with_usage
        self._end = b',"usage":null}\n\n' if with_usage else b"}\n\n"
        self._suffix = b',"logprobs":null,"finish_reason":null}]' + self._end

    def encode_keepalive(self) -> bytes:
        """Encode a comment."""
        return b": waiting\n\n"

    def encode_end(self, usage: Usage) -> bytes:
        """Encode the usage chunk if requested, then the end marker."""
        if not self._with_usage:
            return DONE
        event = {"choices": [], **self._figures(usage)}
        return self._event_head + json.encode(event)[1:] + b"\n\n" + DONE

    def _encode_object(self, choices: list[dict[str, Any]], usage: Usage) -> bytes:
        return json.encode({**self._response_head, "choices": choices, **self._figures(usage)})

    def _figures(self, usage: Usage) -> dict[str, object]:
        """Return the counts and times that go with an answer."""
        return {"usage": usage.as_json(), "timings": usage.to_timings()}

    def encode_error(self, problem: Problem) -> bytes:
        """Encode the error envelope as an event."""
        return b"event: error\ndata: " + problem.to_json() + b"\n\n"


class ChatEncoder(_OpenAIEncoder):
    """``chat.completion`` and ``chat.completion.chunk``."""

    _id_prefix, _object, _chunk = "chatcmpl", "chat.completion", "chat.completion.chunk"
    _text_field = b"delta"

    def encode_start(self, index: int) -> bytes:
        """Encode the event with the role."""
        return self._prefixes[index] + b'{"role":"assistant","content":""}' + self._suffix

    def encode_piece(self, index: int, piece: TextPiece) -> bytes:
        """Encode the added text, then the finish reason."""
        prefix = self._prefixes[index]
        suffix = self._suffix
        if piece.logprobs:
            logprobs = json.encode(self._logprobs_json(piece.logprobs))
            suffix = b',"logprobs":' + logprobs + b',"finish_reason":null}]' + self._end
        event = b""
        for delta in self._deltas(piece):
            event += prefix + delta + suffix
            suffix = self._suffix
        if piece.finish is not None:
            event += prefix + b'{},"logprobs":null,"finish_reason":"'
            event += piece.finish.encode() + b'"}]' + self._end
        return event

    def _deltas(self, piece: TextPiece) -> Sequence[bytes]:
        """Encode the deltas of ``piece``; empty content if it has only logprobs."""
        deltas = [delta for part in piece_parts(piece) if (delta := encode_delta(part)) is not None]
        return deltas or ([b'{"content":""}'] if piece.logprobs else [])

    def encode_response(self, answers: Sequence[Sequence[TextPiece]], usage: Usage) -> bytes:
        """Encode a ``chat.completion``."""
        choices = []
        for index, pieces in enumerate(answers):
            message = make_message(read_blocks(pieces))
            logprobs = (
                self._logprobs_json(collect_logprobs(pieces)) if self._num_logprobs >= 0 else None
            )
            choices.append(
                {
                    "index": index,
                    "message": message,
                    "logprobs": logprobs,
                    "finish_reason": pieces[-1].finish,
                }
            )
        return self._encode_object(choices, usage)

    def _logprobs_json(self, entries: Sequence[TokenLogprob]) -> dict[str, Any]:
        content = logprob_entries(entries, self._num_logprobs, self._tokenizer)
        return {"content": content, "refusal": None}


class CompletionEncoder(_OpenAIEncoder):
    """``text_completion``."""

    _id_prefix, _object, _chunk = "cmpl", "text_completion", "text_completion"
    _text_field = b"text"

    def __init__(self, plan: RequestPlan, with_usage: bool = False) -> None:
        super().__init__(plan, with_usage)
        self._echoes = [choice.echo for choice in plan.choices]

    def encode_start(self, index: int) -> bytes:
        """Encode the prompt if ``echo`` is set."""
        if not self._echoes[index]:
            return b""
        return self._prefixes[index] + json.encode(self._echoes[index]) + self._suffix

    def encode_piece(self, index: int, piece: TextPiece) -> bytes:
        """Encode the added text; the last event has the finish reason."""
        start = self._prefixes[index] + json.encode(piece.text)
        if not piece.logprobs and piece.finish is None:
            return start + self._suffix
        logprobs = json.encode(self._logprobs_json(piece.logprobs) if piece.logprobs else None)
        finish = json.encode(piece.finish)
        return (
            start + b',"logprobs":' + logprobs + b',"finish_reason":' + finish + b"}]" + self._end
        )

    def encode_response(self, answers: Sequence[Sequence[TextPiece]], usage: Usage) -> bytes:
        """Encode a ``text_completion``."""
        choices = []
        for index, pieces in enumerate(answers):
            logprobs = (
                self._logprobs_json(collect_logprobs(pieces)) if self._num_logprobs >= 0 else None
            )
            choices.append(
                {
                    "index": index,
                    "text": self._echoes[index] + join_pieces(pieces),
                    "logprobs": logprobs,
                    "finish_reason": pieces[-1].finish,
                }
            )
        return self._encode_object(choices, usage)

    def _logprobs_json(self, entries: Sequence[TokenLogprob]) -> dict[str, Any]:
        return {
            "tokens": [self._decode_token(entry.token) for entry in entries],
            "token_logprobs": [entry.logprob for entry in entries],
            "top_logprobs": [self._top_logprobs(entry) for entry in entries],
            "text_offset": [entry.offset for entry in entries],
        }

    def _top_logprobs(self, entry: TokenLogprob) -> dict[str, float]:
        """Return the top alternatives and the sampled token; of equal texts the likelier one."""
        found: dict[str, float] = {}
        for token, logprob in (*entry.top[: self._num_logprobs], (entry.token, entry.logprob)):
            found.setdefault(self._decode_token(token), max(logprob, MIN_LOGPROB))
        return found

    def _decode_token(self, token: int) -> str:
        return _token_text(self._tokenizer, token)


def logprob_entries(
    entries: Sequence[TokenLogprob], top: int, tokenizer: Tokenizer
) -> list[dict[str, Any]]:
    """Return tokens with bytes, logprobs and ``top`` alternatives, in chat format."""

    def shown(token: int, logprob: float) -> dict[str, Any]:
        data = tokenizer.token_bytes(token)
        text = data.decode("utf-8", "replace")
        return {"token": text, "logprob": max(logprob, MIN_LOGPROB), "bytes": list(data)}

    return [
        {
            **shown(entry.token, entry.logprob),
            "top_logprobs": [shown(*pair) for pair in entry.top[: max(top, 0)]],
        }
        for entry in entries
    ]


def _token_text(tokenizer: Tokenizer, token: int) -> str:
    """Decode a token; part of a character becomes ``bytes:\\xe4``, as OpenAI writes it."""
    data = tokenizer.token_bytes(token)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def join_pieces(pieces: Sequence[TextPiece]) -> str:
    """Join the texts of pieces."""
    return "".join(piece.text for piece in pieces)


def collect_logprobs(pieces: Sequence[TextPiece]) -> list[TokenLogprob]:
    """Collect the logprobs of pieces."""
    return [entry for piece in pieces for entry in piece.logprobs]


def _make_response_head(prefix: str, kind: str, plan: RequestPlan) -> dict[str, Any]:
    return {
        "id": f"{prefix}-{secrets.token_hex(12)}",
        "object": kind,
        "created": int(time.time()),
        "model": plan.loaded_model.model.name,
    }


def _make_event_head(prefix: str, kind: str, plan: RequestPlan) -> bytes:
    """Encode the start that all events of a stream share, up to a comma."""
    return b"data: " + json.encode(_make_response_head(prefix, kind, plan))[:-1] + b","
