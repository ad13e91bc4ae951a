"""The compute thread of a worker."""

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from molink.ring.work import BlockCopy, Segment, SegmentResult, StepDone
from molink.stage.out_of_memory import is_out_of_memory, release_cached
from molink.stage.stage import Stage
from molinkd.worker.request_table import RequestTable
from molinkd.worker.step import failed_step, run_step
from molinkd.worker.tail import prepare

log = logging.getLogger(__name__)

#: A stage that had no step for so long has time to prepare for those to come. Steps of a ring
#: come more often, as long as it has requests.
IDLE_S = 0.2


@dataclass(frozen=True, slots=True)
class _Step:
    segments: Sequence[Segment]
    done: Callable[[StepDone], None]


@dataclass(frozen=True, slots=True)
class _Task:
    run: Callable[[], None]


_Job = _Step | BlockCopy | _Task


class Executor:
    """Runs steps, and copies between them, in their order on a thread that owns the device.

    An exception in a step (out of memory, say) fails the step's rows and nothing else. Between
    steps, when none has come for a while, the stage makes CUDA graphs that it wants, one by one.
    """

    def __init__(
        self, stage: Stage, requests: RequestTable, hand_over: Callable[..., object]
    ) -> None:
        """``hand_over(function, argument)`` calls a function on the ring's thread."""
        self._stage = stage
        self._requests = requests
        self._hand_over = hand_over
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="compute", daemon=True)
        self._thread.start()

    def submit(self, segments: Sequence[Segment], done: Callable[[StepDone], None]) -> None:
        """Queue a step."""
        self._jobs.put(_Step(segments, done))

    def swap(self, copy: BlockCopy) -> None:
        """Queue a copy."""
        self._jobs.put(copy)

    def between(self, task: Callable[[], None]) -> None:
        """Queue something else that computes; it says itself what came of it."""
        self._jobs.put(_Task(task))

    def close(self) -> None:
        """End after the steps that are queued."""
        self._jobs.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (job := self._next()) is not None:
            if isinstance(job, BlockCopy):
                self._copy(job)
                continue
            if isinstance(job, _Task):
                job.run()
                continue
            began = time.perf_counter()
            results, error, out_of_memory = self._step(job)
            seconds = time.perf_counter() - began
            self._hand_over(job.done, StepDone(results, seconds, error, out_of_memory))
            prepare(self._requests, results)

    def _copy(self, job: BlockCopy) -> None:
        """What can't be copied back is missed by its request; what can't be copied out, later."""
        try:
            self._stage.swap(out=job.out, blocks=job.blocks, hosts=job.hosts)
        except Exception:
            log.exception("%d KV blocks could not be swapped", len(job.blocks))
            state = self._requests.get(job.request)
            if state is not None:
                state.failed = True

    def _next(self) -> _Job | None:
        """The next job; while there is none for a while, the stage prepares."""
        while True:
            try:
                return self._jobs.get(timeout=IDLE_S)
            except queue.Empty:
                if not self._prepare():
                    return self._jobs.get()

    def _prepare(self) -> bool:
        """Make one graph; whether there may be more to make."""
        try:
            return self._stage.capture_wanted()
        except Exception:
            log.exception("no CUDA graph could be prepared")
            return False

    def _step(self, job: _Step) -> tuple[Sequence[SegmentResult], str | None, bool]:
        """Results, what went wrong if anything did, and whether that was memory."""
        try:
            return run_step(self._stage, self._requests, job.segments), None, False
        except Exception as caught:
            log.exception("a step failed; its rows are reported as failed")
            error = f"{type(caught).__name__}: {caught}"
            out_of_memory = is_out_of_memory(caught)
        # Only now are the step's tensors gone: its frames held them as long as the exception did.
        try:
            if out_of_memory:
                release_cached()
            return failed_step(self._stage, self._requests, job.segments), error, out_of_memory
        except Exception as caught:
            log.exception("nor can its rows be reported as failed")
            return (), f"{error}; then {type(caught).__name__}: {caught}", out_of_memory
