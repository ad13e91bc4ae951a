"""One stage of a peer: its assignment, worker, phase and reports."""

from dataclasses import dataclass, field
from typing import Literal

from molink.facts.layer_range import format_layers, stage_number
from molink.facts.profile import Profile
from molink.swarm.agent.worker_liveness import LivenessProbe
from molink.wire.messages.instructions import Assign
from molink.wire.messages.peer_reports import StageFailed, StageLoaded, StageReady
from molink.wire.messages.worker_pipe import WorkerLoaded

StagePhase = Literal["fetching", "loading", "loaded", "ready", "failed"]
#: Phases in which a worker process exists.
PHASES_WITH_WORKER: frozenset[StagePhase] = frozenset({"loading", "loaded", "ready"})
#: Maximum characters of a failure's reason; the report's field holds 1024.
MAX_REASON_CHARS = 1000


@dataclass(slots=True)
class StageState:
    """An assignment and the worker that carries it out."""

    assignment: Assign
    generation: int
    liveness: LivenessProbe
    phase: StagePhase = "fetching"
    pid: int = 0
    loaded: WorkerLoaded | None = None
    #: Whether the worker holds other layers, and switches to these when their files have arrived.
    reuses_worker: bool = False
    #: Whether the worker, perhaps of a failed ring, must answer a ping before it is relied on.
    unverified: bool = False
    #: Epoch of the last ring that the worker was told to form.
    forming_epoch: int = -1
    #: Why the stage failed, and whether the cause was a lack of memory with another stage loaded,
    #: or of files.
    reason: str = ""
    out_of_memory: bool = False
    files_missing: bool = False
    #: Failure of a neighbour in this epoch, as reported by the worker.
    neighbour_failure: StageFailed | None = None
    #: Profiles of this epoch's stages, for the scheduler.
    profiles: dict[int, Profile] = field(default_factory=dict)

    def loaded_report(self) -> StageLoaded:
        """Create the report that the layers are loaded."""
        assert self.loaded is not None
        return StageLoaded(
            pipeline=self.assignment.pipeline,
            epoch=self.assignment.epoch,
            stage=self.assignment.stage,
            port=self.loaded.port,
            max_blocks=self.loaded.max_blocks,
            profile=self.loaded.profile,
        )

    def ready_report(self) -> StageReady:
        """Create the report that the stage is part of the ring."""
        assign = self.assignment
        return StageReady(pipeline=assign.pipeline, epoch=assign.epoch, stage=assign.stage)

    def failure_report(
        self,
        reason: str,
        *,
        next_lost: bool = False,
        previous_blocked: bool = False,
        out_of_memory: bool = False,
        files_missing: bool = False,
    ) -> StageFailed:
        """Create the report that the stage or a neighbour failed."""
        return StageFailed(
            pipeline=self.assignment.pipeline,
            epoch=self.assignment.epoch,
            stage=self.assignment.stage,
            reason=reason[:MAX_REASON_CHARS],
            next_lost=next_lost,
            previous_blocked=previous_blocked,
            out_of_memory=out_of_memory,
            files_missing=files_missing,
        )

    def own_failure_report(self) -> StageFailed:
        """Create the report of the stage's own failure."""
        return self.failure_report(
            self.reason, out_of_memory=self.out_of_memory, files_missing=self.files_missing
        )

    def current_reports(self) -> list[StageLoaded | StageReady | StageFailed]:
        """Create all reports about the current state."""
        reports: list[StageLoaded | StageReady | StageFailed] = []
        if self.loaded is not None and not self.unverified:
            reports.append(self.loaded_report())
        if self.phase == "ready":
            reports.append(self.ready_report())
        if self.phase == "failed":
            reports.append(self.own_failure_report())
        elif self.neighbour_failure is not None:
            reports.append(self.neighbour_failure)
        return reports

    def describe(self) -> str:
        """Describe the stage in a few words, for people."""
        layers = format_layers(self.assignment.layers)
        reason = f": {self.reason}" if self.phase == "failed" else ""
        return f"stage {stage_number(self.assignment.stage)} (layers {layers}) {self.phase}{reason}"
