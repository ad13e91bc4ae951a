"""An answer as the blocks that protocols show: texts, thoughts and calls, in their order."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from molink.text.calls.base import CallArguments, CallBegin, CallEnd, Part, Text, Thought
from molinkd.api.choice import TextPiece, TokenLogprob

BlockKind = Literal["text", "thought", "call"]


@dataclass(slots=True)
class Block:
    """One of an answer's blocks, as far as it has come.

    ``index`` counts them from 0, ``name`` is of a call, ``logprobs`` are of a text's tokens.
    """

    kind: BlockKind
    index: int
    name: str = ""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    ended: bool = False
    texts: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """All of it; of a call, its arguments as the model wrote them."""
        return "".join(self.texts)

    @property
    def arguments(self) -> dict[str, Any] | None:
        """Arguments of a call as JSON; ``None`` if they are no object, being cut off or wrong."""
        try:
            return msgspec.json.decode(self.text, type=dict[str, Any])
        except (ValueError, RecursionError):
            return None

    def as_text(self) -> str:
        """It as a text: a call that can't be shown as one."""
        return f"{self.name}({self.text})" if self.kind == "call" else self.text


@dataclass(frozen=True, slots=True)
class BlockBegun:
    """``block`` begins, empty."""

    block: Block


@dataclass(frozen=True, slots=True)
class BlockGrown:
    """``block`` has got ``text`` more."""

    block: Block
    text: str
    logprobs: Sequence[TokenLogprob] = ()


@dataclass(frozen=True, slots=True)
class BlockEnded:
    """No more comes of ``block``."""

    block: Block


Step = BlockBegun | BlockGrown | BlockEnded


class BlockReader:
    """Sans-IO: an answer's pieces in, what they do to its blocks out. An answer has a block."""

    def __init__(self) -> None:
        self.blocks: list[Block] = []
        self._steps: list[Step] = []

    def push(self, piece: TextPiece) -> list[Step]:
        """What ``piece`` adds; its logprobs go with a text."""
        logprobs = piece.logprobs
        for part in parts_of(piece):
            match part:
                case Text(text):
                    self._grow("text", text, logprobs)
                    logprobs = ()
                case Thought(text):
                    self._grow("thought", text)
                case CallBegin(_, name):
                    self._begin("call", name)
                case CallArguments(_, text):
                    self._grow("call", text)
                case CallEnd():
                    self._end()
        if logprobs and (not self.blocks or self._open("text")):
            self._grow("text", "", logprobs)
        return self._take()

    def finish(self) -> list[Step]:
        """The end of an answer."""
        if not self.blocks:
            self._begin("text")
        self._end()
        return self._take()

    def _open(self, kind: BlockKind) -> bool:
        return bool(self.blocks) and not self.blocks[-1].ended and self.blocks[-1].kind == kind

    def _begin(self, kind: BlockKind, name: str = "") -> None:
        self._end()
        self.blocks.append(Block(kind, len(self.blocks), name))
        self._steps.append(BlockBegun(self.blocks[-1]))

    def _grow(self, kind: BlockKind, text: str, logprobs: Sequence[TokenLogprob] = ()) -> None:
        if not self._open(kind):
            self._begin(kind)
        block = self.blocks[-1]
        block.texts.append(text)
        block.logprobs += logprobs
        self._steps.append(BlockGrown(block, text, logprobs))

    def _end(self) -> None:
        if self.blocks and not self.blocks[-1].ended:
            self.blocks[-1].ended = True
            self._steps.append(BlockEnded(self.blocks[-1]))

    def _take(self) -> list[Step]:
        steps, self._steps = self._steps, []
        return steps


def blocks_of(pieces: Iterable[TextPiece]) -> list[Block]:
    """The blocks of a whole answer."""
    reader = BlockReader()
    for piece in pieces:
        reader.push(piece)
    reader.finish()
    return reader.blocks


def parts_of(piece: TextPiece) -> Sequence[Part]:
    """The parts of a piece, also of one that is content only."""
    return piece.parts or ((Text(piece.text),) if piece.text else ())


def text_in(blocks: Iterable[Block], kind: BlockKind) -> str:
    """What all blocks of ``kind`` say."""
    return "".join(block.text for block in blocks if block.kind == kind)
