"""Splits an answer into content blocks: texts, reasoning and tool calls, in order."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from molink.text.tool_calls.base import (
    AnswerPart,
    ReasoningDelta,
    TextDelta,
    ToolCallArguments,
    ToolCallBegin,
    ToolCallEnd,
)
from molinkd.api.output_processor import TextPiece, TokenLogprob

BlockKind = Literal["text", "thought", "call"]


@dataclass(slots=True)
class ContentBlock:
    """One block of an answer, as received so far.

    ``index`` counts from 0; ``name`` is the tool of a call; ``logprobs`` belong to a text.
    """

    kind: BlockKind
    index: int
    name: str = ""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    has_ended: bool = False
    texts: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """The block's text; for a call, its arguments as the model wrote them."""
        return "".join(self.texts)

    @property
    def arguments(self) -> dict[str, Any] | None:
        """The arguments of a call; ``None`` if they are not a complete JSON object."""
        try:
            return msgspec.json.decode(self.text, type=dict[str, Any])
        except (ValueError, RecursionError):
            return None

    def as_text(self) -> str:
        """Render the block as text, also a call that can't be parsed."""
        return f"{self.name}({self.text})" if self.kind == "call" else self.text


@dataclass(frozen=True, slots=True)
class BlockStartedEvent:
    """``block`` starts; it is still empty."""

    block: ContentBlock


@dataclass(frozen=True, slots=True)
class BlockGrownEvent:
    """``text`` was appended to ``block``."""

    block: ContentBlock
    text: str
    logprobs: Sequence[TokenLogprob] = ()


@dataclass(frozen=True, slots=True)
class BlockEndedEvent:
    """``block`` is complete."""

    block: ContentBlock


BlockEvent = BlockStartedEvent | BlockGrownEvent | BlockEndedEvent


class BlockReader:
    """Sans-IO: turns pieces of an answer into block events. An answer has a block."""

    def __init__(self) -> None:
        self.blocks: list[ContentBlock] = []
        self._events: list[BlockEvent] = []

    def push_piece(self, piece: TextPiece) -> list[BlockEvent]:
        """Add a piece and return its events; its logprobs go to a text block."""
        logprobs = piece.logprobs
        for part in piece_parts(piece):
            match part:
                case TextDelta(text):
                    self._append_text("text", text, logprobs)
                    logprobs = ()
                case ReasoningDelta(text):
                    self._append_text("thought", text)
                case ToolCallBegin(_, name):
                    self._start_block("call", name)
                case ToolCallArguments(_, text):
                    self._append_text("call", text)
                case ToolCallEnd():
                    self._end_block()
        if logprobs and (not self.blocks or self._is_open("text")):
            self._append_text("text", "", logprobs)
        return self._pop_events()

    def finish_blocks(self) -> list[BlockEvent]:
        """End the last block; an empty answer gets an empty text block."""
        if not self.blocks:
            self._start_block("text")
        self._end_block()
        return self._pop_events()

    def _is_open(self, kind: BlockKind) -> bool:
        return bool(self.blocks) and not self.blocks[-1].has_ended and self.blocks[-1].kind == kind

    def _start_block(self, kind: BlockKind, name: str = "") -> None:
        self._end_block()
        self.blocks.append(ContentBlock(kind, len(self.blocks), name))
        self._events.append(BlockStartedEvent(self.blocks[-1]))

    def _append_text(
        self, kind: BlockKind, text: str, logprobs: Sequence[TokenLogprob] = ()
    ) -> None:
        if not self._is_open(kind):
            self._start_block(kind)
        block = self.blocks[-1]
        block.texts.append(text)
        block.logprobs += logprobs
        self._events.append(BlockGrownEvent(block, text, logprobs))

    def _end_block(self) -> None:
        if self.blocks and not self.blocks[-1].has_ended:
            self.blocks[-1].has_ended = True
            self._events.append(BlockEndedEvent(self.blocks[-1]))

    def _pop_events(self) -> list[BlockEvent]:
        events, self._events = self._events, []
        return events


def read_blocks(pieces: Iterable[TextPiece]) -> list[ContentBlock]:
    """Return the blocks of a complete answer."""
    reader = BlockReader()
    for piece in pieces:
        reader.push_piece(piece)
    reader.finish_blocks()
    return reader.blocks


def piece_parts(piece: TextPiece) -> Sequence[AnswerPart]:
    """Return the parts of a piece; plain content counts as one part."""
    return piece.parts or ((TextDelta(piece.text),) if piece.text else ())


def text_of_kind(blocks: Iterable[ContentBlock], kind: BlockKind) -> str:
    """Join the texts of all blocks of ``kind``."""
    return "".join(block.text for block in blocks if block.kind == kind)
