"""A compute thread that sleeps instead of computing."""

import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from molink.ring.step import BlockCopy, StepInput, StepOutput, StepResult
from molink.sim.executor import step_rows
from molink.sim.roofline import Roofline
from molink.wire.messages.data_plane import SampledId, SamplerOutput, Volume
from molinkd.worker.engine import HandOver, StageConfig
from tools.emulation.activations import Activations


class TimedStage(Protocol):
    """A stage whose steps take a known time."""

    @property
    def config(self) -> StageConfig:
        """The emulated model."""

    @property
    def is_last(self) -> bool:
        """Whether this stage samples."""

    @property
    def roofline(self) -> Roofline:
        """Times of its steps."""

    def slowed(self, steps: int) -> float:
        """Slowdown of the next step after ``steps`` steps."""


@dataclass(slots=True)
class Punctuality:
    """Planned and actual times of a stage's steps."""

    steps: int = 0
    planned_s: float = 0.0
    took_s: float = 0.0
    worst_late_s: float = 0.0

    def add(self, planned: float, took: float) -> None:
        """Record a step."""
        self.steps += 1
        self.planned_s += planned
        self.took_s += took
        self.worst_late_s = max(self.worst_late_s, took - planned)


class EmulatedExecutor:
    """Runs steps in order, each for its roofline time, results included."""

    def __init__(self, stage: TimedStage, activations: Activations, hand_over: HandOver) -> None:
        self._stage = stage
        self._roofline = stage.roofline
        self._activations = activations
        self._hand_over = hand_over
        self._jobs: queue.SimpleQueue[
            tuple[Sequence[StepInput], Callable[[StepResult], None]] | None
        ] = queue.SimpleQueue()
        #: Last sampled position and token by request.
        self._last: dict[int, tuple[int, int]] = {}
        self.punctuality = Punctuality()
        self._thread = threading.Thread(target=self._run, name="compute", daemon=True)
        self._thread.start()

    def submit_step(
        self, step_inputs: Sequence[StepInput], done: Callable[[StepResult], None]
    ) -> None:
        """Queue a step."""
        self._jobs.put((step_inputs, done))

    def submit_copy(self, copy: BlockCopy) -> None:
        """Refuse: an emulated stage swaps no blocks."""
        raise NotImplementedError

    def submit_task(self, task: Callable[[], None]) -> None:
        """Refuse: no draft model runs beside an emulated stage."""
        raise NotImplementedError

    def close(self) -> None:
        """Stop after the queued steps."""
        self._jobs.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            began = time.perf_counter()
            segments, done = job
            rows = step_rows([segment.volume for segment in segments], self._stage.is_last)
            planned = self._roofline.step_s(rows) * self._stage.slowed(self.punctuality.steps)
            results = [self._make_result(segment.volume) for segment in segments]
            if (left := planned - (time.perf_counter() - began)) > 0:
                time.sleep(left)
            took = time.perf_counter() - began
            self.punctuality.add(planned, took)
            self._hand_over(done, StepResult(results, took, None))

    def _make_result(self, volume: Volume) -> StepOutput:
        if self._stage.is_last:
            vocabulary = self._stage.config.vocab_size
            return StepOutput(volume, None, sample_tokens(volume, vocabulary, self._last))
        return StepOutput(volume, self._activations.rows(volume.count), None)


def sample_tokens(
    volume: Volume, vocabulary: int, last: dict[int, tuple[int, int]]
) -> SamplerOutput:
    """Sample deterministic tokens for each slice that wants one, and accept drafts.

    ``last`` maps requests to their last sampled position and token.
    """
    choices = []
    for rows in volume.slices:
        if not rows.sample or not rows.continues_from(*last.get(rows.request, (-1, -1))):
            continue
        first = rows.start + rows.count - len(rows.verified_drafts)
        for position, draft in enumerate((*rows.verified_drafts, None), first):
            token = (rows.request * 2654435761 + position * 40503) % vocabulary
            choices.append(SampledId(rows.request, position, token))
            last[rows.request] = position, token
            if token != draft:
                break
    return SamplerOutput(volume.seq, tuple(choices))
