"""The compute thread of a worker."""

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from molink.ring.step import BlockCopy, StepInput, StepOutput, StepResult
from molink.stage.out_of_memory import empty_device_cache, is_out_of_memory
from molink.stage.stage import Stage
from molinkd.worker.request_table import RequestTable
from molinkd.worker.sampler import precompute_masks
from molinkd.worker.step import fail_step, run_step

log = logging.getLogger(__name__)

#: A stage that had no step for so long has time to prepare for those to come. Steps of a ring
#: come more often, as long as it has requests.
IDLE_BEFORE_CAPTURE_S = 0.2


@dataclass(frozen=True, slots=True)
class _StepJob:
    step_inputs: Sequence[StepInput]
    done: Callable[[StepResult], None]


@dataclass(frozen=True, slots=True)
class _TaskJob:
    run: Callable[[], None]


_Job = _StepJob | BlockCopy | _TaskJob


class StageExecutor:
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
        self._thread = threading.Thread(target=self._run_jobs, name="compute", daemon=True)
        self._thread.start()

    def submit_step(
        self, step_inputs: Sequence[StepInput], done: Callable[[StepResult], None]
    ) -> None:
        """Queue a step."""
        self._jobs.put(_StepJob(step_inputs, done))

    def submit_copy(self, copy: BlockCopy) -> None:
        """Queue a copy."""
        self._jobs.put(copy)

    def submit_task(self, task: Callable[[], None]) -> None:
        """Queue something else that computes; it says itself what came of it."""
        self._jobs.put(_TaskJob(task))

    def close(self) -> None:
        """End after the steps that are queued."""
        self._jobs.put(None)
        self._thread.join()

    def _run_jobs(self) -> None:
        while (job := self._next_job()) is not None:
            if isinstance(job, BlockCopy):
                self._copy_blocks(job)
                continue
            if isinstance(job, _TaskJob):
                job.run()
                continue
            began = time.perf_counter()
            results, error, out_of_memory = self._run_step(job)
            seconds = time.perf_counter() - began
            self._hand_over(job.done, StepResult(results, seconds, error, out_of_memory))
            precompute_masks(self._requests, results)

    def _copy_blocks(self, job: BlockCopy) -> None:
        """What can't be copied back is missed by its request; what can't be copied out, later."""
        try:
            self._stage.swap_blocks(out=job.is_swap_out, blocks=job.blocks, hosts=job.host_blocks)
        except Exception:
            log.exception("%d KV blocks could not be swapped", len(job.blocks))
            state = self._requests.find_request(job.request)
            if state is not None:
                state.failed = True

    def _next_job(self) -> _Job | None:
        """The next job; while there is none for a while, the stage prepares."""
        while True:
            try:
                return self._jobs.get(timeout=IDLE_BEFORE_CAPTURE_S)
            except queue.Empty:
                if not self._capture_graph():
                    return self._jobs.get()

    def _capture_graph(self) -> bool:
        """Make one graph; whether there may be more to make."""
        try:
            return self._stage.capture_next_graph()
        except Exception:
            log.exception("no CUDA graph could be prepared")
            return False

    def _run_step(self, job: _StepJob) -> tuple[Sequence[StepOutput], str | None, bool]:
        """Results, what went wrong if anything did, and whether that was memory."""
        try:
            return run_step(self._stage, self._requests, job.step_inputs), None, False
        except Exception as caught:
            log.exception("a step failed; its rows are reported as failed")
            error = f"{type(caught).__name__}: {caught}"
            out_of_memory = is_out_of_memory(caught)
        # Only now are the step's tensors gone: its frames held them as long as the exception did.
        try:
            if out_of_memory:
                empty_device_cache()
            return fail_step(self._stage, self._requests, job.step_inputs), error, out_of_memory
        except Exception as caught:
            log.exception("nor can its rows be reported as failed")
            return (), f"{error}; then {type(caught).__name__}: {caught}", out_of_memory
