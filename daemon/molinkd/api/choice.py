"""One answer's tokens to what its client sees: text, logprobs, and why it ended."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from molink.swarm.frontend.generation import GeneratedToken
from molink.text.calls.base import CallBegin, CallEnd, Part, Text
from molink.text.stops import StopStrings
from molink.wire.messages.serving import FinishReason
from molinkd.api.request_plan import Plan

#: Why an answer ended, as clients are told.
AnswerFinish = FinishReason | Literal["tool_calls"]

#: OpenAI's stand-in for a probability of nothing.
MIN_LOGPROB = -9999.0


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token of the answer with its logprob and the most likely ones in its place.

    ``offset`` is where its text begins in the answer, in characters.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]
    offset: int


@dataclass(frozen=True, slots=True)
class TextPiece:
    """What a token added to an answer; the last one has ``finish``.

    ``parts`` has it in order where there is more than content; ``text`` is the content of it.
    ``stop`` is the stop string at which it ended.
    """

    text: str
    logprobs: Sequence[TokenLogprob] = ()
    finish: AnswerFinish | None = None
    stop: str | None = None
    parts: Sequence[Part] = ()


class ChoiceText:
    """Sans-IO: tokens in, pieces out.

    ``tokens``, ``thinking_tokens`` of them and ``cached`` are figures for ``usage``.
    """

    def __init__(self, plan: Plan) -> None:
        reading = plan.reading
        self._detokenizer = plan.offer.tokenizer.detokenizer(
            skip_special=plan.skip_special,
            continues=plan.continues,
            keep=frozenset() if reading is None else reading.markers,
        )
        self._parser = None if reading is None else reading.parser()
        self._one_call = reading is not None and not reading.parallel
        self._calls = False
        self._stops = StopStrings(plan.stops)
        self._include_stop = plan.include_stop
        self._wants_logprobs = plan.logprobs >= 0
        self._pending: list[TokenLogprob] = []
        #: Characters detokenized, and characters that went out.
        self._seen = 0
        self._emitted = 0
        self.tokens = 0
        self.thinking_tokens = 0
        self.cached = 0
        self._logprob = 0.0

    def add(self, token: GeneratedToken) -> TextPiece | None:
        """What the client sees of ``token``; ``None`` if nothing yet. None comes after an end."""
        if self.tokens == 0:
            self.cached = token.cached
        self.tokens += 1
        self._logprob += _finite(token.logprob)
        if token.finish == "stop":
            return self._last("stop")
        if self._wants_logprobs:
            self._pending.append(
                TokenLogprob(token.token, _finite(token.logprob), token.top, self._seen)
            )
        text = self._take(self._detokenizer.add(token.token))
        if self._stops.matched is not None:
            return self._stopped(text)
        if token.finish is not None:
            return self._last(token.finish, text)
        piece = self._piece(text) if text else None
        self.thinking_tokens += self._parser is not None and self._parser.thinking
        return piece

    def cut(self) -> TextPiece | None:
        """The end of an answer of which no more tokens are wanted."""
        return self._last("length")

    @property
    def score(self) -> float:
        """The mean logprob of its tokens; means nothing where none was asked for."""
        return self._logprob / max(self.tokens, 1)

    def _take(self, text: str) -> str:
        self._seen += len(text)
        return self._stops.push(text)

    def _last(self, finish: FinishReason, text: str = "") -> TextPiece | None:
        text += self._take(self._detokenizer.flush())
        if self._stops.matched is not None:
            return self._stopped(text)
        return self._piece(text + self._stops.flush(), finish)

    def _stopped(self, text: str) -> TextPiece | None:
        stop = self._stops.matched
        assert stop is not None
        if self._include_stop:
            text += stop
        end = self._emitted + len(text)
        self._pending = [entry for entry in self._pending if entry.offset < end]
        piece = self._piece(text, "stop")
        return None if piece is None else replace(piece, stop=stop)

    def _piece(self, text: str, finish: FinishReason | None = None) -> TextPiece | None:
        """The piece of ``text``; ``None`` if it is held back until more of it is there."""
        self._emitted += len(text)
        parts, ended = self._parts(text, finish)
        if self._parser is not None and not parts and ended is None:
            return None
        logprobs: Sequence[TokenLogprob] = ()
        if self._pending:
            logprobs, self._pending = self._pending, []
        if self._parser is not None:
            text = "".join(part.text for part in parts if isinstance(part, Text))
        return TextPiece(text, logprobs, ended, parts=parts)

    def _parts(
        self, text: str, finish: FinishReason | None
    ) -> tuple[Sequence[Part], AnswerFinish | None]:
        """What the parser finds in ``text``, and why the answer ends there."""
        if self._parser is None:
            return (), finish
        parts = self._parser.push(text)
        if finish is not None:
            parts += self._parser.finish()
        self._calls = self._calls or any(isinstance(part, CallBegin) for part in parts)
        if self._one_call:
            ends = (index for index, part in enumerate(parts) if isinstance(part, CallEnd))
            end = next(ends, None)
            if end is not None:
                return parts[: end + 1], "tool_calls"
        return parts, "tool_calls" if self._calls and finish == "stop" else finish


def _finite(logprob: float) -> float:
    return MIN_LOGPROB if math.isnan(logprob) else max(logprob, MIN_LOGPROB)
