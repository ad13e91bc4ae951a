"""Turns generated tokens into the text, logprobs and finish reason of one choice."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from molink.swarm.frontend.generated_token import GeneratedToken
from molink.text.stop_strings import StopStringFinder
from molink.text.tool_calls.base import AnswerPart, TextDelta, ToolCallBegin, ToolCallEnd
from molink.wire.messages.serving import FinishReason
from molinkd.api.request_plan import RequestPlan

#: Why an answer ended, in OpenAI's words.
AnswerFinish = FinishReason | Literal["tool_calls"]

#: OpenAI's value for a probability of zero.
MIN_LOGPROB = -9999.0


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A generated token with its logprob and the top alternatives.

    ``offset`` is where its text starts in the answer, in characters.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]
    offset: int


@dataclass(frozen=True, slots=True)
class TextPiece:
    """Text that a token added to an answer; the last piece has a ``finish`` reason.

    ``text`` is the content. ``parts`` holds content, reasoning and calls in order if there is more
    than content. ``stop`` is the stop string that ended the answer.
    """

    text: str
    logprobs: Sequence[TokenLogprob] = ()
    finish: AnswerFinish | None = None
    stop: str | None = None
    parts: Sequence[AnswerPart] = ()


class OutputProcessor:
    """Sans-IO: takes tokens, returns pieces of text.

    ``tokens``, ``reasoning_tokens`` and ``cached_tokens`` are counts for ``usage``.
    """

    def __init__(self, plan: RequestPlan) -> None:
        reading = plan.parser_settings
        self._detokenizer = plan.loaded_model.tokenizer.create_detokenizer(
            skip_special=plan.skip_special,
            continues=plan.continues_prompt,
            keep=frozenset() if reading is None else reading.markers,
        )
        self._parser = None if reading is None else reading.build_parser()
        self._single_call = reading is not None and not reading.parallel
        self._has_called = False
        self._stops = StopStringFinder(plan.stop_strings)
        self._include_stop = plan.include_stop
        self._wants_logprobs = plan.logprobs >= 0
        self._pending: list[TokenLogprob] = []
        #: Characters detokenized, and characters emitted.
        self._decoded_chars = 0
        self._emitted_chars = 0
        self.tokens = 0
        self.reasoning_tokens = 0
        self.cached_tokens = 0
        self._total_logprob = 0.0
        #: Why the text ended, once it has.
        self.finish: AnswerFinish | None = None

    def process_token(self, token: GeneratedToken) -> TextPiece | None:
        """Process a token; ``None`` if there is nothing to emit. Not called after the end."""
        if self.tokens == 0:
            self.cached_tokens = token.cached_tokens
        self.tokens += 1
        self._total_logprob += _clamp_logprob(token.logprob)
        if token.finish_reason == "stop":
            return self._finish_text("stop")
        if self._wants_logprobs:
            self._pending.append(
                TokenLogprob(
                    token.token, _clamp_logprob(token.logprob), token.top, self._decoded_chars
                )
            )
        text = self._filter_stops(self._detokenizer.add_token(token.token))
        if self._stops.matched is not None:
            return self._stop_at_match(text)
        if token.finish_reason is not None:
            return self._finish_text(token.finish_reason, text)
        piece = self._make_piece(text) if text else None
        self.reasoning_tokens += self._parser is not None and self._parser.is_reasoning
        return piece

    def cut_off(self) -> TextPiece | None:
        """End the answer early with finish reason ``length``."""
        return self._finish_text("length")

    @property
    def is_stop_string(self) -> bool:
        """Whether a stop string ended the text."""
        return self._stops.matched is not None

    @property
    def score(self) -> float:
        """The mean logprob of the tokens; meaningless without logprobs."""
        return self._total_logprob / max(self.tokens, 1)

    def _filter_stops(self, text: str) -> str:
        self._decoded_chars += len(text)
        return self._stops.push_text(text)

    def _finish_text(self, finish: FinishReason, text: str = "") -> TextPiece | None:
        text += self._filter_stops(self._detokenizer.flush_text())
        if self._stops.matched is not None:
            return self._stop_at_match(text)
        return self._make_piece(text + self._stops.flush_text(), finish)

    def _stop_at_match(self, text: str) -> TextPiece | None:
        stop = self._stops.matched
        assert stop is not None
        if self._include_stop:
            text += stop
        end = self._emitted_chars + len(text)
        self._pending = [entry for entry in self._pending if entry.offset < end]
        piece = self._make_piece(text, "stop")
        return None if piece is None else replace(piece, stop=stop)

    def _make_piece(self, text: str, finish: FinishReason | None = None) -> TextPiece | None:
        """Make a piece of ``text``; ``None`` if the parser holds it back."""
        self._emitted_chars += len(text)
        parts, ended = self._parse_parts(text, finish)
        self.finish = ended
        if self._parser is not None and not parts and ended is None:
            return None
        logprobs: Sequence[TokenLogprob] = ()
        if self._pending:
            logprobs, self._pending = self._pending, []
        if self._parser is not None:
            text = "".join(part.text for part in parts if isinstance(part, TextDelta))
        return TextPiece(text, logprobs, ended, parts=parts)

    def _parse_parts(
        self, text: str, finish: FinishReason | None
    ) -> tuple[Sequence[AnswerPart], AnswerFinish | None]:
        """Parse ``text`` into parts, and determine the finish reason."""
        if self._parser is None:
            return (), finish
        parts = self._parser.parse_delta(text)
        if finish is not None:
            parts += self._parser.finish_parsing()
        self._has_called = self._has_called or any(
            isinstance(part, ToolCallBegin) for part in parts
        )
        if self._single_call:
            ends = (index for index, part in enumerate(parts) if isinstance(part, ToolCallEnd))
            end = next(ends, None)
            if end is not None:
                return parts[: end + 1], "tool_calls"
        return parts, "tool_calls" if self._has_called and finish == "stop" else finish


def _clamp_logprob(logprob: float) -> float:
    return MIN_LOGPROB if math.isnan(logprob) else max(logprob, MIN_LOGPROB)
