"""What goes into a step and what comes out of it, and who runs it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from molink.facts.dtypes import DType
from molink.wire.messages.data import Admit, Sampled, TopLogprobs, Volume


@dataclass(frozen=True, slots=True)
class StageShape:
    """What the order of work depends on in a stage; ``dtype`` is that of rows on their way.

    It is stage ``index`` of ``stages``.
    """

    is_last: bool
    hidden: int
    vocabulary: int
    dtype: DType
    index: int = 0
    stages: int = 1


@dataclass(frozen=True, slots=True)
class Segment:
    """The part of a step that came as one volume and leaves as one.

    ``data`` is token ids at stage 0 and the raw bytes of rows ``[n, hidden]`` at the others;
    ``kept`` has the indices of those that belong to ``volume.rows``, ``None`` if all do.
    """

    volume: Volume
    data: Any
    kept: Sequence[int] | None = None


@dataclass(frozen=True, slots=True)
class SegmentResult:
    """A segment after the step: rows for the next stage, or (at the tail) what was sampled."""

    volume: Volume
    rows: bytearray | memoryview | None
    sampled: Sampled | None
    tops: tuple[TopLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class StepDone:
    """A step that has ended; ``seconds`` is its wall-clock time, ``error`` why it failed, if so.

    ``out_of_memory`` says that this was for want of memory. A failed step without ``results`` could
    not even report its requests as failed.
    """

    results: Sequence[SegmentResult]
    seconds: float
    error: str | None
    out_of_memory: bool = False


class StageRequests(Protocol):
    """What a stage knows of each request; the worker has ``RequestTable``."""

    def admit(self, message: Admit) -> None:
        """A request begins."""

    def history(self, request: int, first: int, ids: memoryview) -> None:
        """Learn tokens (``i32``) from position ``first`` on; parts come in order."""

    def table(self, request: int, blocks: Sequence[int]) -> None:
        """Learn blocks that its table begins with."""

    def release(self, request: int) -> None:
        """A request is over."""

    def __len__(self) -> int:
        """How many live."""


class Executing(Protocol):
    """Runs steps, one at a time; :class:`molinkd.worker.executor.Executor` does on a thread."""

    def submit(self, segments: Sequence[Segment], done: Callable[[StepDone], None]) -> None:
        """Begin a step; ``done`` is called where the ring lives (on its event loop)."""
