"""What a ring has around it at its stage: shape, requests, what computes, and the next stage."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from molink.facts.drafts import DraftBatch, DraftResults
from molink.facts.dtypes import DTYPE_SIZES, DType
from molink.link.policies.base import LinkEvent
from molink.ring.step import BlockCopy, StepInput, StepResult
from molink.wire.messages.codec import Buffer
from molink.wire.messages.data_plane import Admit, RingMessage, Volume


@dataclass(frozen=True, slots=True)
class StageShape:
    """What the order of work depends on in a stage; ``wire_dtype`` is that of rows on their way.

    It is stage ``index`` of ``stages``; rows have ``hidden`` elements and token ids are below
    ``vocabulary``.
    """

    index: int
    stages: int
    hidden: int
    vocabulary: int
    wire_dtype: DType

    @property
    def is_first(self) -> bool:
        """Whether it has the head."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """Whether it samples."""
        return self.index == self.stages - 1

    @property
    def row_bytes(self) -> int:
        """Bytes of a row on its way."""
        return self.hidden * DTYPE_SIZES[self.wire_dtype]


class StageRequests(Protocol):
    """What a stage knows of each request; the worker has ``RequestTable``."""

    def admit_request(self, message: Admit) -> None:
        """A request begins."""

    def add_history(self, request: int, first: int, ids: memoryview) -> None:
        """Learn tokens (``i32``) from position ``first`` on; parts come in order."""

    def set_grammar(self, request: int, text: bytes) -> None:
        """Learn what the answer is held to, before any of it."""

    def append_blocks(self, request: int, blocks: Sequence[int]) -> None:
        """Learn blocks that its table begins with."""

    def release_request(self, request: int) -> None:
        """A request is over."""

    def __len__(self) -> int:
        """How many live."""


class StepExecutor(Protocol):
    """Runs steps, one at a time; :class:`molinkd.worker.executor.StageExecutor` does on a
    thread."""

    def submit_step(
        self, step_inputs: Sequence[StepInput], done: Callable[[StepResult], None]
    ) -> None:
        """Begin a step; ``done`` is called where the ring lives (on its event loop)."""

    def submit_copy(self, copy: BlockCopy) -> None:
        """Copy blocks after the step that runs and before the next that needs what is copied."""


class DraftRunner(Protocol):
    """A small model beside the head; :class:`molinkd.worker.draft_proposer.DraftModelThread` asks
    one."""

    def request_drafts(self, order: DraftBatch, done: Callable[[DraftResults], None]) -> None:
        """Do what the head wants, after what it wanted before.

        ``done`` is called later, where the ring lives.
        """


class NextStage(Protocol):
    """Toward the next stage; the tail's leads back to the head.

    :class:`molink.link.out_link.OutLink` is one.
    """

    def send_control(self, body: RingMessage, payload: Buffer | None = None) -> None:
        """Send a control message on the decode channel."""
        ...

    def send_volume(self, header: Volume, rows: Buffer) -> None:
        """Send a volume whose rows ``header.payload`` describes: all of them, or the first ones."""
        ...

    def send_more_rows(self, seq: int, rows: Buffer) -> None:
        """Send the next rows of a volume that was begun with its first ones."""
        ...

    def handle_event(self, event: LinkEvent) -> None:
        """Tell the transmission policy what the executor does."""
        ...

    @property
    def is_full(self) -> bool:
        """Whether so much is unsent that this stage had better wait."""
        ...
