"""The stage agent, like a kubelet: carries out this peer's assignments.

It fetches files, and starts, forms and stops workers. Sans-IO: it takes the coordinator's
instructions and the reports of workers and transfers, and returns actions. Each attempt has a
*generation*, so that reports of a replaced worker are not mistaken for its successor's.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from molink.errors import InvariantError
from molink.facts.profile import UNKNOWN_PROFILE, Profile
from molink.swarm.agent.stage_state import PHASES_WITH_WORKER, StageState
from molink.swarm.agent.worker_liveness import PROBE_TIMEOUT, VERIFY_TIMEOUT, LivenessProbe
from molink.swarm.running_time import RunningTime
from molink.wire.messages.instructions import Assign, FormPipeline, StageProfile
from molink.wire.messages.peer_reports import StageFailed, StageLoaded, StageReady, WorkerState
from molink.wire.messages.worker_pipe import (
    FormRing,
    LoadStage,
    NextStageLost,
    PeerBlocked,
    Ping,
    Pong,
    RingFormed,
    WorkerFailed,
    WorkerLoaded,
)


@dataclass(frozen=True, slots=True)
class FetchFilesAction:
    """Fetch the files that the assignment needs."""

    generation: int
    assign: Assign


@dataclass(frozen=True, slots=True)
class StartWorkerAction:
    """Start a worker, whose files are on this PC."""

    generation: int
    start: LoadStage


@dataclass(frozen=True, slots=True)
class SendToWorkerAction:
    """Send a worker its next ring, the layers to switch to, or a ping."""

    generation: int
    message: FormRing | LoadStage | Ping


@dataclass(frozen=True, slots=True)
class StopWorkerAction:
    """Stop a worker, or the transfer of its files; ``kill`` an unresponsive one."""

    generation: int
    kill: bool = False


@dataclass(frozen=True, slots=True)
class SendToCoordinatorAction:
    """Send a report to the coordinator."""

    message: StageLoaded | StageReady | StageFailed


AgentAction = (
    FetchFilesAction
    | StartWorkerAction
    | SendToWorkerAction
    | StopWorkerAction
    | SendToCoordinatorAction
)
WorkerMessage = WorkerLoaded | RingFormed | Pong | WorkerFailed | NextStageLost | PeerBlocked


class StageAgent:
    """The assignments of this peer, by pipeline."""

    def __init__(self) -> None:
        self._stages: dict[str, StageState] = {}
        self._last_generation = 0
        self._running_time = RunningTime(0.0)
        #: Time of the last :meth:`check_liveness`.
        self._now = 0.0
        self._transitions: deque[str] = deque(maxlen=64)

    # --- from the coordinator ---

    def assign_stage(self, message: Assign) -> list[AgentAction]:
        """Accept an assignment, reusing the worker if possible.

        A worker with the same layers is kept. A worker with other layers of the same weights
        switches when their files have arrived, and stays in its ring until then. A reused worker
        must answer a ping first; otherwise it is replaced.
        """
        self._log_transition(
            f"assign {message.pipeline} epoch {message.epoch} layers {message.layers}"
        )
        stage = self._stages.get(message.pipeline)
        if stage is not None and message.epoch < stage.assignment.epoch:
            return []
        if (
            stage is not None
            and stage.phase != "failed"
            and _same_worker(stage.assignment, message)
        ):
            if stage.phase == "ready" and message.epoch == stage.assignment.epoch:
                return [SendToCoordinatorAction(each) for each in stage.current_reports()]
            stage.assignment, stage.neighbour_failure, stage.profiles = message, None, {}
            if stage.loaded is None:
                return []
            stage.phase = "loaded"
            return self._verify_worker(stage)
        if (
            stage is not None
            and stage.loaded is not None
            and _same_weights(stage.assignment, message)
        ):
            kept = StageState(
                message, stage.generation, stage.liveness, pid=stage.pid, reuses_worker=True
            )
            self._stages[message.pipeline] = kept
            return [*self._verify_worker(kept), FetchFilesAction(kept.generation, message)]
        if stage is not None:
            return self._replace_worker(stage, message)
        return [self._start_generation(message)]

    def record_profile(self, message: StageProfile) -> None:
        """Keep a stage's profile for the scheduler until the ring is formed."""
        stage = self._stages.get(message.pipeline)
        if stage is not None and message.epoch == stage.assignment.epoch:
            stage.profiles[message.stage] = message.profile

    def form_ring(self, message: FormPipeline) -> list[AgentAction]:
        """Have the worker join the ring of an epoch."""
        self._log_transition(f"form {message.pipeline} epoch {message.epoch}")
        stage = self._stages.get(message.pipeline)
        if stage is None or stage.loaded is None or message.epoch != stage.assignment.epoch:
            return []
        stage.forming_epoch, stage.neighbour_failure = message.epoch, None
        ring = FormRing(
            epoch=message.epoch,
            ring=message.ring,
            blocks=message.blocks,
            micro_batches=message.micro_batches,
            profiles=_profiles_by_stage(stage.profiles, len(message.ring)),
        )
        return [SendToWorkerAction(stage.generation, ring)]

    def unassign_pipeline(self, pipeline: str) -> list[AgentAction]:
        """Stop the stage of a pipeline."""
        self._log_transition(f"unassign {pipeline}")
        stage = self._stages.pop(pipeline, None)
        return [StopWorkerAction(stage.generation)] if stage is not None else []

    def _start_generation(self, message: Assign) -> FetchFilesAction:
        """Start again with a new worker."""
        self._last_generation += 1
        kept = StageState(message, self._last_generation, LivenessProbe(self._now))
        self._stages[message.pipeline] = kept
        return FetchFilesAction(kept.generation, message)

    def _replace_worker(
        self, stage: StageState, message: Assign, *, kill: bool = False
    ) -> list[AgentAction]:
        """Replace the worker of ``stage``."""
        return [StopWorkerAction(stage.generation, kill=kill), self._start_generation(message)]

    # --- liveness ---

    def check_liveness(self, now: float) -> list[AgentAction]:
        """Ping workers, and replace those that don't answer.

        Call it about twice a second with monotonic seconds.
        """
        now = self._now = self._running_time.counted_time(now)
        actions: list[AgentAction] = []
        for stage in list(self._stages.values()):
            if stage.loaded is None and not stage.unverified:
                continue
            unanswered = stage.liveness.unanswered_time(now)
            if unanswered >= (VERIFY_TIMEOUT if stage.unverified else PROBE_TIMEOUT):
                actions += self._on_worker_dead(stage, f"has not answered for {unanswered:.1f} s")
            elif stage.liveness.is_due(now):
                stage.liveness.start_probe(now)
                actions.append(SendToWorkerAction(stage.generation, Ping()))
        return actions

    def _verify_worker(self, stage: StageState) -> list[AgentAction]:
        """Require an answer of the worker before it is relied on."""
        stage.unverified = True
        return (
            [SendToWorkerAction(stage.generation, Ping())]
            if stage.liveness.start_probe(self._now)
            else []
        )

    def _on_pong(self, stage: StageState, *, stuck: bool) -> list[AgentAction]:
        stage.liveness.on_answer(self._now)
        if stuck:
            return self._on_worker_dead(stage, "is stuck in a computation")
        if not stage.unverified:
            return []
        stage.unverified = False
        return [SendToCoordinatorAction(stage.loaded_report())] if stage.loaded is not None else []

    def _on_worker_dead(self, stage: StageState, what: str) -> list[AgentAction]:
        """Replace an unverified worker, or fail the stage."""
        self._log_transition(f"generation {stage.generation} {what}")
        if stage.unverified:
            return self._replace_worker(stage, stage.assignment, kill=True)
        return self.on_failure(stage.generation, f"the worker {what}", kill=True)

    # --- from transfers and workers ---

    def on_files_fetched(self, generation: int, start: LoadStage) -> list[AgentAction]:
        """Handle the arrival of an assignment's files; ``start`` is the worker's first message."""
        stage = self._find_stage(generation)
        if stage is None or stage.phase != "fetching":
            return []
        stage.phase = "loading"
        if stage.reuses_worker:
            return [SendToWorkerAction(generation, start)]
        return [StartWorkerAction(generation, start)]

    def on_worker_started(self, generation: int, pid: int) -> None:
        """Record the worker's process id."""
        stage = self._find_stage(generation)
        if stage is not None:
            stage.pid = pid

    def on_failure(
        self,
        generation: int,
        reason: str,
        *,
        out_of_memory: bool = False,
        files_missing: bool = False,
        kill: bool = False,
    ) -> list[AgentAction]:
        """Handle a failure: missing files, or a worker that failed to start, exited or must be
        killed.

        ``out_of_memory``: too little device memory while another stage is loaded.
        ``files_missing``: no online PC has some of the files.
        """
        stage = self._find_stage(generation)
        if stage is None or stage.phase == "failed":
            return []
        self._log_transition(f"generation {generation} failed: {reason}")
        stage.phase, stage.loaded, stage.reason = "failed", None, reason
        stage.out_of_memory, stage.files_missing, stage.unverified = (
            out_of_memory,
            files_missing,
            False,
        )
        failed = stage.failure_report(
            reason, out_of_memory=out_of_memory, files_missing=files_missing
        )
        return [StopWorkerAction(generation, kill=kill), SendToCoordinatorAction(failed)]

    def on_worker_message(self, generation: int, message: WorkerMessage) -> list[AgentAction]:
        """Handle a worker's report."""
        stage = self._find_stage(generation)
        if stage is None:
            return []
        if isinstance(message, Pong):
            return self._on_pong(stage, stuck=message.is_stuck)
        if stage.phase not in PHASES_WITH_WORKER:
            return []
        self._log_transition(f"generation {generation}: {type(message).__name__}")
        match message:
            case WorkerLoaded():
                stage.phase, stage.loaded = "loaded", message
                return [SendToCoordinatorAction(stage.loaded_report())]
            case RingFormed():
                return self._on_formed(stage, message.epoch)
            case WorkerFailed():
                return self.on_failure(generation, f"{message.kind}: {message.message}")
            case NextStageLost():
                if message.epoch != stage.assignment.epoch:
                    return []
                stage.neighbour_failure = stage.failure_report(message.reason, next_lost=True)
                return [SendToCoordinatorAction(stage.neighbour_failure)]
            case PeerBlocked():
                if not message.is_previous_stage or message.epoch != stage.assignment.epoch:
                    return []
                stage.neighbour_failure = stage.failure_report(
                    message.reason, previous_blocked=True
                )
                return [SendToCoordinatorAction(stage.neighbour_failure)]

    def _on_formed(self, stage: StageState, epoch: int) -> list[AgentAction]:
        if epoch != stage.assignment.epoch or epoch != stage.forming_epoch:
            return []
        stage.phase = "ready"
        return [SendToCoordinatorAction(stage.ready_report())]

    # --- state ---

    def worker_states(
        self, transfers: Mapping[int, tuple[int, int, int]], slowdowns: Mapping[str, float]
    ) -> tuple[WorkerState, ...]:
        """Describe all assignments for the report to the coordinator.

        ``transfers`` maps generations to bytes done, total bytes, and bytes per second;
        ``slowdowns`` maps pipelines to the ratio of measured to expected step time.
        """
        none = 0, 0, 0
        return tuple(
            WorkerState(
                pid=stage.pid,
                pipeline=pipeline,
                stage=stage.assignment.stage,
                layers=stage.assignment.layers,
                state=stage.phase,
                epoch=stage.assignment.epoch,
                done=transfers.get(stage.generation, none)[0],
                total=transfers.get(stage.generation, none)[1],
                rate=transfers.get(stage.generation, none)[2],
                slowdown=slowdowns.get(pipeline, 0.0),
            )
            for pipeline, stage in self._stages.items()
        )

    def describe(self) -> str:
        """Describe all assignments in one line, for people."""
        return ", ".join(stage.describe() for stage in self._stages.values()) or "no stage"

    def resend_reports(self) -> list[SendToCoordinatorAction]:
        """Repeat all reports after the connection to the coordinator was lost."""
        return [
            SendToCoordinatorAction(each)
            for stage in self._stages.values()
            for each in stage.current_reports()
        ]

    def validate(self) -> None:
        """Check the invariants.

        Raises:
            InvariantError: one doesn't hold.
        """
        generations = [stage.generation for stage in self._stages.values()]
        if len(set(generations)) != len(generations):
            raise InvariantError("two pipelines share a worker", self._transitions)
        for pipeline, stage in self._stages.items():
            if (stage.loaded is None) == (stage.phase in ("loaded", "ready")):
                raise InvariantError(
                    f"{pipeline} is {stage.phase}, loaded or not", self._transitions
                )
            if stage.phase == "ready" and stage.forming_epoch != stage.assignment.epoch:
                raise InvariantError(f"{pipeline} is ready in another epoch", self._transitions)

    def _find_stage(self, generation: int) -> StageState | None:
        for stage in self._stages.values():
            if stage.generation == generation:
                return stage
        return None

    def _log_transition(self, text: str) -> None:
        self._transitions.append(text)


def _profiles_by_stage(profiles: Mapping[int, Profile], stages: int) -> tuple[Profile, ...]:
    if not profiles:
        return ()
    return tuple(profiles.get(stage, UNKNOWN_PROFILE) for stage in range(stages))


def _same_weights(old: Assign, new: Assign) -> bool:
    """Whether layers that both assignments contain are identical in memory."""
    kept = (old.model, old.root, old.dtype, old.quantize)
    return kept == (new.model, new.root, new.dtype, new.quantize)


def _same_worker(old: Assign, new: Assign) -> bool:
    """Whether the worker of ``old`` can serve ``new`` without loading."""
    return _worker_key(old) == _worker_key(new)


def _worker_key(assign: Assign) -> tuple[object, ...]:
    """Return the parameters with which a worker is started."""
    return (
        assign.layers,
        assign.stage,
        assign.stages,
        assign.model,
        assign.root,
        assign.dtype,
        assign.quantize,
        assign.kv_cache_dtype,
        assign.block_size,
        assign.max_model_len,
    )


def is_reportable(action: AgentAction) -> bool:
    """Whether an action changes the content of reports; a ping doesn't."""
    return not (isinstance(action, SendToWorkerAction) and isinstance(action.message, Ping))
