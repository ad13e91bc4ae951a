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

#: Seconds without a step after which the stage captures CUDA graphs and moves experts. Steps of an
#: active ring come more often.
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
    """Runs steps and block copies in order, on a thread that owns the device.

    Where the stage interleaves, what is queued during a step of prefill rows runs between its
    layers. An exception in a step, such as out of memory, fails that step's rows only. While no
    step is queued, the stage captures the CUDA graphs it needs, and moves experts between memories
    by their use, one at a time.
    """

    def __init__(
        self, stage: Stage, requests: RequestTable, hand_over: Callable[..., object]
    ) -> None:
        """``hand_over(function, argument)`` calls a function on the ring's thread."""
        self._stage = stage
        self._requests = requests
        self._hand_over = hand_over
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        #: Seconds of jobs that ran between the layers of others.
        self._interleaved_s = 0.0
        self._swaps_experts = True
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
        """Queue another computation, which reports its own result."""
        self._jobs.put(_TaskJob(task))

    def close(self) -> None:
        """Finish the queued steps, then end."""
        self._jobs.put(None)
        self._thread.join()

    def _run_jobs(self) -> None:
        while (job := self._next_job()) is not None:
            self._run_job(job)

    def _run_job(self, job: _Job) -> None:
        began = time.perf_counter()
        if isinstance(job, BlockCopy):
            self._copy_blocks(job)
        elif isinstance(job, _TaskJob):
            job.run()
        else:
            others_s = self._interleaved_s
            results, error, out_of_memory = self._run_step(job)
            seconds = time.perf_counter() - began - (self._interleaved_s - others_s)
            self._hand_over(job.done, StepResult(results, seconds, error, out_of_memory))
            precompute_masks(self._requests, results)

    def _run_interleaved(self) -> None:
        """Run queued jobs between two layers of a step."""
        while not self._jobs.empty():
            job = self._jobs.get()
            if job is None:
                self._jobs.put(None)  # nothing follows it
                return
            began = time.perf_counter()
            self._run_job(job)
            self._interleaved_s += time.perf_counter() - began

    def _copy_blocks(self, job: BlockCopy) -> None:
        """A failed copy to the device fails its request; a failed copy to the host fails on
        swap-in.
        """
        try:
            self._stage.swap_blocks(out=job.is_swap_out, blocks=job.blocks, hosts=job.host_blocks)
        except Exception:
            log.exception("%d KV blocks could not be swapped", len(job.blocks))
            state = self._requests.find_request(job.request)
            if state is not None:
                state.failed = True

    def _next_job(self) -> _Job | None:
        """Wait for the next job; capture graphs while there is none."""
        while True:
            try:
                return self._jobs.get(timeout=IDLE_BEFORE_CAPTURE_S)
            except queue.Empty:
                if not self._run_idle_work():
                    return self._jobs.get()

    def _run_idle_work(self) -> bool:
        """Capture one graph, or move one expert; return whether there may be more to do."""
        try:
            return self._stage.capture_next_graph() or self._swap_experts()
        except Exception:
            log.exception("a CUDA graph could not be captured")
            return False

    def _swap_experts(self) -> bool:
        """Let experts that are used more take places on the device, until one can't be loaded."""
        if not self._swaps_experts:
            return False
        try:
            return self._stage.swap_next_experts()
        except Exception:
            log.exception("experts stay where they are: one could not be loaded")
            self._swaps_experts = False
            return False

    def _run_step(self, job: _StepJob) -> tuple[Sequence[StepOutput], str | None, bool]:
        """Return results, the error if the step failed, and whether it was out of memory."""
        try:
            inputs = job.step_inputs
            has_prefill = any(each.volume.prefill for each in inputs)
            between = self._run_interleaved if has_prefill else None
            return run_step(self._stage, self._requests, inputs, between), None, False
        except Exception as caught:
            log.exception("a step failed; its rows are reported as failed")
            error = f"{type(caught).__name__}: {caught}"
            out_of_memory = is_out_of_memory(caught)
        # Free the step's tensors first: the exception's frames held them until here.
        try:
            if out_of_memory:
                empty_device_cache()
            return fail_step(self._stage, self._requests, job.step_inputs), error, out_of_memory
        except Exception as caught:
            log.exception("the rows could not be reported as failed either")
            return (), f"{error}; then {type(caught).__name__}: {caught}", out_of_memory
