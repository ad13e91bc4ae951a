"""Runs one stage of the ring during one epoch: receive, order, fuse, compute, send."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType

import msgspec

from molink.facts.profile import Profile
from molink.facts.ring_times import LinkFacts
from molink.link.heartbeat import StageProgress, timeout_for
from molink.link.policies.base import DecodeFinishedEvent, DecodeStartedEvent
from molink.ring.control_executor import ControlExecutor
from molink.ring.interleaving import Interleaving
from molink.ring.ring_measurements import (
    NO_HOST_MEMORY,
    HostMemory,
    RingMeasurements,
    SlowdownMeter,
)
from molink.ring.round_trip import RoundTripClock
from molink.ring.scheduler_bridge import LastStageMessage, SampleCollector, SchedulerBridge
from molink.ring.scoreboard import Scoreboard, ScoreboardLimits
from molink.ring.stage import NextStage, StageRequests, StageShape, StepExecutor
from molink.ring.step import (
    ControlMessage,
    Step,
    StepInput,
    StepOutput,
    StepResult,
)
from molink.ring.step_monitor import BubbleMeter, StepLog, StepTime, StepTimePredictor
from molink.ring.sub_chunks import SubChunkPolicy, WholeVolumePolicy
from molink.wire.messages.base import Payload
from molink.wire.messages.codec import Buffer
from molink.wire.messages.data_plane import (
    HostMemoryReport,
    LinkReport,
    PooledRow,
    Release,
    RingMessage,
    SamplerOutput,
    SlowdownReport,
    Tombstone,
    TopLogprobs,
    Volume,
    VolumeFragment,
)

log = logging.getLogger(__name__)


class ErrorGuard:
    """Ends the stage on an unexpected error, which could leave a ``seq`` incomplete forever.

    It is reentrant, and a class rather than a generator for speed, since each step enters it
    several times.
    """

    __slots__ = ("_on_broken",)

    def __init__(self, on_broken: Callable[[str], None]) -> None:
        """``on_broken`` gets the error's text."""
        self._on_broken = on_broken

    def __enter__(self) -> None:
        """Do nothing."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        if not isinstance(error, Exception):
            return False
        log.error("this stage can't continue", exc_info=error)
        self._on_broken(f"{type(error).__name__}: {error}")
        return True


#: Messages that the scoreboard of a later stage orders, apart from volume fragments.
_SCOREBOARD_MESSAGES = ControlMessage | Volume


@dataclass(frozen=True, slots=True, eq=False)
class RunningStep:
    """A step that the executor is running."""

    step: Step
    predicted: StepTime


@dataclass(frozen=True, slots=True)
class RingConfig:
    """Configuration of a stage.

    ``profile`` has this stage's measured step times, ``profiles`` has those of all stages.
    ``sub_chunk_policy`` decides how many prefill rows are computed and sent at once while more are
    arriving. ``host_memory`` is this stage's host memory for KV.
    """

    shape: StageShape
    profile: Profile
    profiles: tuple[Profile, ...] = ()
    limits: ScoreboardLimits = field(default_factory=ScoreboardLimits)
    sub_chunk_policy: SubChunkPolicy = field(default_factory=WholeVolumePolicy)
    host_memory: HostMemory = NO_HOST_MEMORY


class Ring:
    """Connects one stage's deciders: scoreboard, scheduler (at stage 0), executor, outgoing link.

    It has no clock, threads or sockets of its own, so a simulation can run it in virtual time.
    ``clock`` returns seconds. All methods run on one thread, on which ``executor`` reports. One
    step runs at a time. If the stage interleaves (:mod:`molink.ring.interleaving`), a step of
    decode rows may run during a step of prefill rows. After each event, ``run_pending`` does
    everything that is possible.
    """

    def __init__(
        self,
        config: RingConfig,
        requests: StageRequests,
        executor: StepExecutor,
        bridge: SchedulerBridge | None,
        clock: Callable[[], float],
        on_broken: Callable[[str], None],
    ) -> None:
        """``bridge`` connects to the scheduler, at stage 0 only.

        ``on_broken`` is called once if this stage can't continue, after an internal error that
        loses a ``seq`` or after repeated failed steps.
        """
        self._shape = shape = config.shape
        self._clock = clock
        self._executor = executor
        self._bridge = bridge
        self._next_stage: NextStage | None = None
        self._requests = requests
        #: The running step, and the step of decode rows that runs between its layers.
        self._running: list[RunningStep] = []
        self._interleaving = Interleaving(config.profile)
        self._closed = False
        self._sub_chunk_policy = config.sub_chunk_policy
        self.scoreboard = Scoreboard(config.limits, config.sub_chunk_policy)
        self._samples = SampleCollector()
        self.bubbles = BubbleMeter(clock())
        self.step_log = StepLog()
        self._num_strays = 0
        self._measurements = RingMeasurements(shape, config.profiles)
        self._on_broken = on_broken
        self._error_guard = ErrorGuard(self._fail)
        self._predictor = StepTimePredictor(config.profile)
        self._slowdown_meter = SlowdownMeter(config.profile)
        self._round_trips = RoundTripClock(self._measurements.times)
        self._host_memory = config.host_memory
        self._controls = ControlExecutor(
            shape, requests, executor, self._round_trips.on_request_finished, self._forward
        )
        #: Maximum expected seconds of the running steps; 0 between steps.
        self.predicted_s = 0.0
        self._step_began_at = 0.0

    def open(self, next_stage: NextStage | None) -> None:
        """Start the epoch. Without a ``next_stage`` this stage is the whole ring."""
        self._next_stage = next_stage
        if self._host_memory.blocks:
            self._forward(self._measurements.host_memories.make_report(self._host_memory))
            self._update_times()
        self.run_pending()

    def close(self) -> None:
        """End the epoch, and ignore the result of the running step."""
        self._closed = True
        if self._bridge is not None:
            self._bridge.receiver.close()

    # --- events ----------------------------------------------------------------------------------

    def on_message(
        self, body: RingMessage, data: bytearray | memoryview | None, rows: int | None = None
    ) -> None:
        """Handle a message of the previous stage (see :class:`molink.link.receiver.Arrival`).

        ``data`` has room for all rows of a volume; the first ``rows`` have arrived (``None``: all).
        Each later :class:`VolumeFragment` comes without data and reports the new total in ``rows``.
        """
        with self._error_guard:
            self._on_message(body, data, rows)
            self._run_pending()

    def run_pending(self) -> None:
        """Do everything possible now: feed batches, forward controls, start a step."""
        with self._error_guard:
            self._run_pending()

    def _fail(self, reason: str) -> None:
        if not self._closed:
            self.close()
            self._on_broken(reason)

    def _on_message(
        self, body: RingMessage, data: bytearray | memoryview | None, rows: int | None
    ) -> None:
        now = self._clock()
        match body:
            case VolumeFragment() if self._bridge is None and rows is not None:
                self.scoreboard.extend_volume(body.seq, rows, now)
            case _ if self._bridge is None and isinstance(body, _SCOREBOARD_MESSAGES):
                self.scoreboard.on_message(body, data, now, rows)
            case SamplerOutput() | TopLogprobs() | PooledRow() | Release() | Tombstone():
                self._on_last_stage_message(body, now, data)
            case LinkReport() | SlowdownReport() | HostMemoryReport() if (
                self._measurements.accept_report(body)
            ):
                if self._measurements.should_forward(body, now):
                    self._forward(body)
                self._update_times()
            case _:
                self._num_strays += 1

    def _run_pending(self) -> None:
        if self._closed:
            return
        now = self._clock()
        if self._bridge is not None and self._accepts_step:
            while self._bridge.feed_batch(self.scoreboard, now):
                self._controls.apply_controls(self.scoreboard.complete_volumes((), now))
            self._bridge.request_drafts(self.run_pending)
        if controls := self.scoreboard.complete_volumes((), now):
            self._controls.apply_controls(controls)
        is_full = self._next_stage is not None and self._next_stage.is_full
        step = self._next_step(now) if self._accepts_step and not is_full else None
        if step is not None:
            self._start_step(step, now)
        else:
            self._update_bubbles(now)

    @property
    def _accepts_step(self) -> bool:
        """Whether a step can start: none runs, or one of prefill rows that can be interleaved."""
        if not self._running:
            return True
        is_chunk = len(self._running) == 1 and self._running[0].step.decode is None
        return self._interleaving.is_possible and is_chunk

    def _next_step(self, now: float) -> Step | None:
        """Return the next runnable step.

        Volumes that can never run become tombstones, which may unblock others.
        """
        while True:
            step = self.scoreboard.next_step(now, self._interleaving)
            dropped = self.scoreboard.complete_volumes((), now)
            if not dropped:
                return step
            self._controls.apply_controls(dropped)
            if step is not None:
                return step

    def _start_step(self, step: Step, now: float) -> None:
        predicted = self._predictor.predict_step(step.volumes)
        if not self._running:
            self.predicted_s, self._step_began_at = 0.0, now
        self.predicted_s += predicted.max_s
        running = RunningStep(step, predicted)
        self._interleaving.begin_step(step)
        self._running.append(running)
        self._update_bubbles(now)
        if step.decode is not None and self._next_stage is not None:
            self._next_stage.handle_event(
                DecodeStartedEvent(step.decode.volume.count, predicted.expected_s)
            )
        # Runs on the compute thread, in molinkd.worker.step.
        self._executor.submit_step(step.inputs, partial(self._on_step_result, running))

    def _on_last_stage_message(
        self, body: LastStageMessage, now: float, data: Buffer | None = None
    ) -> None:
        if self._bridge is not None:
            self._bridge.on_last_stage_message(body, now, data)

    # --- links and slowdowns
    # -------------------------------------------------------------------------

    def on_link_measured(self, facts: LinkFacts, now: float) -> None:
        """Report this stage's outgoing link to the other stages if it has changed."""
        if facts == self._measurements.links.settled:
            return  # the usual case
        with self._error_guard:
            report = self._measurements.links.make_report(facts, now)
            if report is not None and not self._closed:
                self._forward(report)
                self._update_times()

    @property
    def links(self) -> tuple[LinkFacts, ...]:
        """The known links, each from a stage to the next."""
        return tuple(self._measurements.times.links)

    def _update_times(self) -> None:
        times = self._round_trips.times = self._measurements.times
        if self._bridge is not None:
            self._bridge.scheduler.set_times(times)
            memory = self._measurements.host_memory
            self._bridge.scheduler.set_host_memory(memory.blocks, memory.block_s)

    # --- to the next stage -----------------------------------------------------------------------

    def _forward(
        self,
        body: ControlMessage | LinkReport | SlowdownReport | HostMemoryReport,
        payload: Buffer | None = None,
    ) -> None:
        if self._next_stage is not None:
            self._next_stage.send_control(body, payload)
        elif isinstance(body, Release | Tombstone):
            self._on_last_stage_message(body, self._clock())

    # --- from the executor -----------------------------------------------------------------------

    def _on_step_result(self, running: RunningStep, done: StepResult) -> None:
        with self._error_guard:
            self._apply_results(running, done)
            self._run_pending()

    def _apply_results(self, running: RunningStep, done: StepResult) -> None:
        if self._closed:
            return
        now, step = self._clock(), running.step
        self._running.remove(running)
        self._interleaving.end_step(step)
        if not self._running:
            self.predicted_s = 0.0
        self._update_bubbles(now)
        self.step_log.add_step(done)
        self._predictor.add_step(running.predicted, done.seconds)
        if done.error is None and self._slowdown_meter.add_step(step.volumes, done.seconds, now):
            self._forward(self._measurements.slowdowns.make_report(self._slowdown_meter.slowdown))
            self._update_times()
        failures = self.step_log.failures
        if failures.is_exhausted or (done.error and not done.outputs):
            self._fail(f"{failures.failures} consecutive steps failed: {done.error}")
            return
        # Outputs are sent one by one: a request that waits for decode rows need not wait for
        # prefill rows.
        for result in done.outputs:
            self._send_output(step, result, now)
            self._controls.apply_controls(
                self.scoreboard.complete_volumes([result.volume.seq], now)
            )
        self._report_decode_finished(done.outputs, now)

    def _report_decode_finished(self, results: Sequence[StepOutput], now: float) -> None:
        """Report a finished decode step to the link policy, after its rows have been queued."""
        for result in results:
            if not result.volume.prefill and self._next_stage is not None:
                after = self._round_trips.on_decode_finished(result.volume, now)
                self._next_stage.handle_event(DecodeFinishedEvent(result.volume.count, after))

    def _send_output(self, step: Step, result: StepOutput, now: float) -> None:
        step_input = step.find_input(result.volume.seq)
        if result.sampled is not None:
            sent: list[tuple[LastStageMessage, bytes | None]] = [*result.pooled]
            sampled = self._samples.add_output(result.sampled, result, last=step_input.is_last)
            for body, data in (*sent, *((body, None) for body in sampled)):
                if self._next_stage is not None:
                    self._next_stage.send_control(body, data)
                else:
                    self._on_last_stage_message(body, now, data)
        elif self._next_stage is not None and result.rows is not None:
            self._send_rows(self._next_stage, step_input, result.rows)

    def _send_rows(self, next_stage: NextStage, step_input: StepInput, rows: Buffer) -> None:
        """Send rows; the first input of a volume carries the header for all its rows."""
        header = step_input.full_volume
        if step_input.first_row:
            next_stage.send_more_rows(header.seq, rows)
            return
        payload = Payload(self._shape.wire_dtype, (header.count, self._shape.hidden))
        next_stage.send_volume(msgspec.structs.replace(header, payload=payload), rows)

    # --- reports ---------------------------------------------------------------------------------

    @property
    def num_strays(self) -> int:
        """Number of messages invalid at this stage, and of token ids outside the vocabulary."""
        return self._num_strays + (self._bridge.num_invalid_ids if self._bridge is not None else 0)

    @property
    def num_requests(self) -> int:
        """Number of live requests at this stage."""
        return len(self._requests)

    @property
    def is_stuck(self) -> bool:
        """Whether the running step has taken so long that its neighbours would count it as dead."""
        running_s = self._clock() - self._step_began_at
        return bool(self._running) and running_s >= timeout_for(self.predicted_s)

    @property
    def progress(self) -> StageProgress:
        """Progress that is reported to the neighbours.

        Work that a full link blocks doesn't count as queued.
        """
        queued = self.scoreboard.num_queued
        if (
            queued
            and not self._running
            and self._next_stage is not None
            and self._next_stage.is_full
        ):
            queued = 0
        return StageProgress(
            completed_seq=self.scoreboard.last_completed_seq,
            num_queued=queued,
            has_requests=len(self._requests) > 0,
            predicted_s=self.predicted_s,
        )

    def collect_stats(self) -> tuple[dict[str, float], dict[str, float]]:
        """Counters and gauges of this epoch, by name."""
        self._update_bubbles(self._clock())
        counters = {
            "stage_steps_total": self.step_log.num_steps,
            "stage_rows_total": self.step_log.num_rows,
            "stage_compute_seconds_total": self.step_log.seconds,
            "stage_bubble_seconds_total": self.bubbles.seconds,
            "stage_failed_steps_total": self.step_log.num_failed,
            "stage_strays_total": self.num_strays,
            "stage_dropped_slices_total": self.scoreboard.counters["dropped_slices"],
            "stage_refused_total": self.scoreboard.num_refused,
        }
        gauges = {
            "stage_requests": self.num_requests,
            "stage_bubble_share": round(self.bubbles.bubble_share, 4),
            "stage_busy_share": round(self.bubbles.busy_share, 4),
            "stage_queued_volumes": self.scoreboard.num_queued,
            "stage_completed_seq": self.scoreboard.last_completed_seq,
            "stage_decode_slowdown": round(self._slowdown_meter.decode_slowdown(self._clock()), 3),
        }
        return (
            {name: float(value) for name, value in counters.items()},
            {name: float(value) for name, value in gauges.items()},
        )

    def _update_bubbles(self, now: float) -> None:
        self.bubbles.update_state(now, live=len(self._requests) > 0, computing=bool(self._running))
        self._sub_chunk_policy.busy_share = self.bubbles.busy_share
