"""One stage of a peer: what it was told to hold, how far it is, and what it tells of that."""

from dataclasses import dataclass, field
from typing import Literal

from molink.facts.profile import Profile
from molink.swarm.agent.pulse import Pulse
from molink.wire.messages.instructions import Assign
from molink.wire.messages.pipe import Loaded
from molink.wire.messages.reports import StageFailed, StageLoaded, StageReady

StageState = Literal["fetching", "loading", "loaded", "ready", "failed"]
#: States in which a worker process exists.
WITH_WORKER: frozenset[StageState] = frozenset({"loading", "loaded", "ready"})
#: Characters of a reason in a report to the coordinator: its field holds 1024.
MAX_REASON = 1000


@dataclass(slots=True)
class KeptStage:
    """An assignment and the worker that carries it out."""

    assign: Assign
    generation: int
    pulse: Pulse
    state: StageState = "fetching"
    pid: int = 0
    loaded: Loaded | None = None
    #: Whether a worker that holds other layers is to change to these once their files are there.
    reused: bool = False
    #: Whether the worker, which was in a ring that failed perhaps, has to show that it lives.
    unsure: bool = False
    #: Epoch of the last ring that the worker was told to form.
    forming: int = -1
    #: Why it failed; whether that is for want of memory beside another stage, or of files.
    reason: str = ""
    no_room: bool = False
    no_files: bool = False
    #: What its worker said of a neighbour in this epoch.
    neighbour: StageFailed | None = None
    #: What the coordinator said of this epoch's stages, by stage.
    profiles: dict[int, Profile] = field(default_factory=dict)

    # --- what the coordinator is told ---

    def now_loaded(self) -> StageLoaded:
        """Its layers are loaded; only to be called if they are."""
        assert self.loaded is not None
        return StageLoaded(
            pipeline=self.assign.pipeline,
            epoch=self.assign.epoch,
            stage=self.assign.stage,
            port=self.loaded.port,
            max_blocks=self.loaded.max_blocks,
            profile=self.loaded.profile,
        )

    def now_ready(self) -> StageReady:
        """It has its place in the ring."""
        assign = self.assign
        return StageReady(pipeline=assign.pipeline, epoch=assign.epoch, stage=assign.stage)

    def now_failed(
        self,
        reason: str,
        *,
        next_lost: bool = False,
        previous_blocked: bool = False,
        no_room: bool = False,
        no_files: bool = False,
    ) -> StageFailed:
        """It can't go on, or a neighbour can't."""
        return StageFailed(
            pipeline=self.assign.pipeline,
            epoch=self.assign.epoch,
            stage=self.assign.stage,
            reason=reason[:MAX_REASON],
            next_lost=next_lost,
            previous_blocked=previous_blocked,
            no_room=no_room,
            no_files=no_files,
        )

    def repeated(self) -> list[StageLoaded | StageReady | StageFailed]:
        """All that the coordinator has been told of its present state."""
        told: list[StageLoaded | StageReady | StageFailed] = []
        if self.loaded is not None and not self.unsure:
            told.append(self.now_loaded())
        if self.state == "ready":
            told.append(self.now_ready())
        if self.state == "failed":
            no_room, no_files = self.no_room, self.no_files
            told.append(self.now_failed(self.reason, no_room=no_room, no_files=no_files))
        elif self.neighbour is not None:
            told.append(self.neighbour)
        return told

    def describe(self) -> str:
        """In a few words, for a person."""
        first, last = self.assign.layers
        reason = f": {self.reason}" if self.state == "failed" else ""
        return f"stage {self.assign.stage} (layers {first}:{last}) {self.state}{reason}"
