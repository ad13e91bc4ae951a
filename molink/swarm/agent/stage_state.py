"""One stage of a peer: what it was told to hold, how far it is, and what it tells of that."""

from dataclasses import dataclass, field
from typing import Literal

from molink.facts.profile import Profile
from molink.swarm.agent.liveness import LivenessProbe
from molink.wire.messages.instructions import Assign
from molink.wire.messages.peer_reports import StageFailed, StageLoaded, StageReady
from molink.wire.messages.worker_pipe import WorkerLoaded

StagePhase = Literal["fetching", "loading", "loaded", "ready", "failed"]
#: States in which a worker process exists.
PHASES_WITH_WORKER: frozenset[StagePhase] = frozenset({"loading", "loaded", "ready"})
#: Characters of a reason in a report to the coordinator: its field holds 1024.
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
    #: Whether a worker that holds other layers is to change to these once their files are there.
    reuses_worker: bool = False
    #: Whether the worker, which was in a ring that failed perhaps, has to show that it lives.
    unverified: bool = False
    #: Epoch of the last ring that the worker was told to form.
    forming_epoch: int = -1
    #: Why it failed; whether that is for want of memory beside another stage, or of files.
    reason: str = ""
    out_of_memory: bool = False
    files_missing: bool = False
    #: What its worker said of a neighbour in this epoch.
    neighbour_failure: StageFailed | None = None
    #: What the coordinator said of this epoch's stages, by stage.
    profiles: dict[int, Profile] = field(default_factory=dict)

    # --- what the coordinator is told ---

    def loaded_report(self) -> StageLoaded:
        """Its layers are loaded; only to be called if they are."""
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
        """It has its place in the ring."""
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
        """It can't go on, or a neighbour can't."""
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

    def current_reports(self) -> list[StageLoaded | StageReady | StageFailed]:
        """All that the coordinator has been told of its present state."""
        reports: list[StageLoaded | StageReady | StageFailed] = []
        if self.loaded is not None and not self.unverified:
            reports.append(self.loaded_report())
        if self.phase == "ready":
            reports.append(self.ready_report())
        if self.phase == "failed":
            out_of_memory, files_missing = self.out_of_memory, self.files_missing
            reports.append(
                self.failure_report(
                    self.reason, out_of_memory=out_of_memory, files_missing=files_missing
                )
            )
        elif self.neighbour_failure is not None:
            reports.append(self.neighbour_failure)
        return reports

    def describe(self) -> str:
        """In a few words, for a person."""
        first, last = self.assignment.layers
        reason = f": {self.reason}" if self.phase == "failed" else ""
        return f"stage {self.assignment.stage} (layers {first}:{last}) {self.phase}{reason}"
