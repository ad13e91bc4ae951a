"""The environment of a ring at its stage: shape, requests, executor, next stage."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from molink.facts.drafts import DraftBatch, DraftResults
from molink.facts.dtypes import DTYPE_SIZES, DType
from molink.facts.images import ImageSpan
from molink.link.policies.base import LinkEvent
from molink.ring.step import BlockCopy, StepInput, StepResult
from molink.wire.messages.codec import Buffer
from molink.wire.messages.data_plane import Admit, RingMessage, Volume


@dataclass(frozen=True, slots=True)
class StageShape:
    """Stage ``index`` of ``stages``.

    Rows have ``hidden`` elements, of type ``wire_dtype`` on the link. Token ids are below
    ``vocabulary``.
    """

    index: int
    stages: int
    hidden: int
    vocabulary: int
    wire_dtype: DType

    @property
    def is_first(self) -> bool:
        """Whether the scheduler runs here."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """Whether this stage samples."""
        return self.index == self.stages - 1

    @property
    def row_bytes(self) -> int:
        """Bytes of a row on the link."""
        return self.hidden * DTYPE_SIZES[self.wire_dtype]


class StageRequests(Protocol):
    """A stage's knowledge about live requests; implemented by the worker's ``RequestTable``."""

    def admit_request(self, message: Admit) -> None:
        """Add a request."""

    def add_history(self, request: int, first: int, ids: memoryview) -> None:
        """Add token ids (``i32``) from position ``first`` on; calls come in order."""

    def set_grammar(self, request: int, text: bytes) -> None:
        """Set the grammar that constrains the answer, before any token is sampled."""

    def set_images(self, request: int, spans: Sequence[ImageSpan], rows: object) -> None:
        """Set the prompt's images before any of its rows; ``rows`` is given at stage 0 only."""

    def append_blocks(self, request: int, blocks: Sequence[int]) -> None:
        """Append blocks to the request's block table."""

    def release_request(self, request: int) -> None:
        """Drop a request."""

    def __len__(self) -> int:
        """Number of live requests."""


class StepExecutor(Protocol):
    """Runs one step at a time; :class:`molinkd.worker.executor.StageExecutor` uses a thread."""

    def submit_step(
        self, step_inputs: Sequence[StepInput], done: Callable[[StepResult], None]
    ) -> None:
        """Start a step; ``done`` is called on the ring's thread."""

    def submit_copy(self, copy: BlockCopy) -> None:
        """Copy blocks after the running step and before the next one that needs them."""


class DraftRunner(Protocol):
    """Runs a draft model on the scheduler's PC
    (:class:`molinkd.worker.draft_proposer.DraftModelThread`).
    """

    def request_drafts(self, order: DraftBatch, done: Callable[[DraftResults], None]) -> None:
        """Queue a batch; ``done`` is called later on the ring's thread."""


class NextStage(Protocol):
    """Sends to the next stage; the last stage sends to the first.

    :class:`molink.link.out_link.OutLink` implements it.
    """

    def send_control(self, body: RingMessage, payload: Buffer | None = None) -> None:
        """Send a control message on the decode channel."""
        ...

    def send_volume(self, header: Volume, rows: Buffer) -> None:
        """Send a volume; ``rows`` has all or the first of the rows in ``header.payload``."""
        ...

    def send_more_rows(self, seq: int, rows: Buffer) -> None:
        """Send the next rows of a volume whose first rows were sent."""
        ...

    def handle_event(self, event: LinkEvent) -> None:
        """Pass an executor event to the link policy."""
        ...

    @property
    def is_full(self) -> bool:
        """Whether the stage should pause because too much is unsent."""
        ...
