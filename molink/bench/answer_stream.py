"""Parses a streamed OpenAI answer and records when each piece arrived. No I/O."""

from typing import Any

import msgspec

from molink.bench.report import Sample
from molink.errors import Unavailable

#: Maximum length of an event stream line, in bytes.
MAX_LINE_BYTES = 1 << 20


class _Delta(msgspec.Struct, frozen=True):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[Any] | None = None

    @property
    def has_output(self) -> bool:
        return bool(self.content or self.reasoning_content or self.reasoning or self.tool_calls)


class _DeltaChoice(msgspec.Struct, frozen=True):
    delta: _Delta | None = None
    text: str | None = None
    finish_reason: str | None = None

    @property
    def has_output(self) -> bool:
        return bool(self.text) or (self.delta is not None and self.delta.has_output)


class ReportedUsage(msgspec.Struct, frozen=True):
    """The token counts that the server reports for a request."""

    prompt_tokens: int = 0
    completion_tokens: int | None = 0


class _ServerEvent(msgspec.Struct, frozen=True):
    choices: list[_DeltaChoice] = msgspec.field(default_factory=list)
    usage: ReportedUsage | None = None
    error: Any = None


class AnswerStream:
    """Reads the server-sent events of one streamed answer (chat or plain completion)."""

    def __init__(self, sent_at: float) -> None:
        self._sent_at = sent_at
        self._buffer = b""
        self._piece_times: list[float] = []
        self._finished_at: float | None = None
        self._usage: ReportedUsage | None = None
        self._decoder = msgspec.json.Decoder(_ServerEvent)

    def feed_data(self, data: bytes, now: float) -> None:
        """Parse bytes that arrived at ``now``.

        Raises:
            Unavailable: the server reports an error or sends an invalid event.
        """
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        if len(self._buffer) > MAX_LINE_BYTES:
            raise Unavailable(f"the server sent a line of more than {MAX_LINE_BYTES} bytes")
        for line in lines:
            if line.startswith(b"data:"):
                self._read_event(line.removeprefix(b"data:").strip(), now)

    def to_sample(self) -> Sample:
        """Return the measured sample after the stream has ended.

        Raises:
            Unavailable: the answer is incomplete.
        """
        if self._finished_at is None:
            raise Unavailable("the stream ended before the answer was complete")
        tokens = self._usage.completion_tokens if self._usage else None
        return Sample(
            sent_at=self._sent_at,
            piece_times=tuple(self._piece_times),
            finished_at=self._finished_at,
            input_tokens=self._usage.prompt_tokens if self._usage else 0,
            output_tokens=len(self._piece_times) if tokens is None else tokens,
        )

    def _read_event(self, data: bytes, now: float) -> None:
        if data == b"[DONE]":
            return
        try:
            event = self._decoder.decode(data)
        except msgspec.MsgspecError as error:
            raise Unavailable(f"the server sent an invalid event: {error}") from error
        if event.error:
            raise Unavailable(error_message(event.error))
        if event.usage is not None:
            self._usage = event.usage
        for choice in event.choices:
            if choice.has_output:
                self._piece_times.append(now)
            if choice.finish_reason:
                self._finished_at = now


def error_message(error: object) -> str:
    """Return the message of an OpenAI error envelope, or the error as text."""
    if isinstance(error, dict):
        return str(error.get("message") or error)
    return str(error)
