"""An epoch of a pipeline: its formation and life from placement until it breaks, and its record."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Literal

from msgspec import structs

from molink.errors import InvariantError
from molink.facts.layer_range import stage_number
from molink.facts.model import BLOCK_SIZE, LayerRange, ModelFacts
from molink.swarm.artifacts.transfer import (
    STALL_TIMEOUT,
    TransferDeadline,
    fetched_bytes,
    stage_bytes,
)
from molink.swarm.controller.records import DesiredModel, PipelineRecord, StageRecord
from molink.swarm.controller.registry import Registry
from molink.swarm.placement.placement import PlacedStage
from molink.util.timeouts import TIMEOUTS
from molink.wire.messages.peer_reports import (
    PeerReport,
    StageFailed,
    StageLoaded,
    StageReady,
    WorkerState,
)

#: ``adopting``: committed by an earlier coordinator; not all of its peers have reported yet.
FormationState = Literal["adopting", "loading", "linking", "ready"]
#: ``decided``: stages are assigned. ``loaded``: all stages have their weights. ``formed``: the ring
#: is up.
Phase = Literal["decided", "loaded", "formed"]

#: Seconds allowed for loading weights after the files have arrived, besides the time for their
#: bytes.
LOAD_TIMEOUT = 120.0
#: Minimum accepted rate of loading, in bytes per second: an old disk.
LOAD_RATE = 16 << 20
#: Seconds allowed from :class:`FormPipeline` until the ring is up.
LINK_TIMEOUT = 60.0
#: Seconds for which a restarted coordinator waits for reports of a running pipeline's peers.
ADOPT_TIMEOUT = 8.0
#: Seconds after which a worker missing from reports counts as lost.
MISSING_TIMEOUT = TIMEOUTS.unreported_worker


class Formation:
    """Tracks which stages are loaded and ready, and which are late. States only move forward."""

    def __init__(
        self, record: PipelineRecord, state: FormationState, now: float, facts: ModelFacts
    ) -> None:
        """``facts`` are those of the model."""
        self.record = record
        #: Peers in ring order.
        self.peers = tuple(stage.peer for stage in record.stages)
        self.state: FormationState = state
        #: Stages that have loaded in this epoch.
        self.loaded: dict[int, StageLoaded] = {}
        #: Stages that have joined the ring of this epoch; all of them in state ``ready``.
        self.ready: set[int] = set()
        wait = ADOPT_TIMEOUT if state == "adopting" else STALL_TIMEOUT
        self._deadlines = [now + wait] * len(record.stages)
        self._stage_bytes = [stage_bytes(facts, stage.layers) for stage in record.stages]
        self._transfers = [
            TransferDeadline(fetched_bytes(facts, stage.layers), now) for stage in record.stages
        ]
        self._loading: set[int] = set()
        self._missing_since: dict[int, float] = {}

    # --- peers -------------------------------------------------------------------------------

    def stage_of(self, peer: str) -> int | None:
        """Return the stage that a peer runs, if any."""
        return self.peers.index(peer) if peer in self.peers else None

    def accepts_message(self, peer: str, message: StageLoaded | StageReady | StageFailed) -> bool:
        """Whether a message belongs to this epoch and comes from its stage's peer."""
        return (
            message.pipeline == self.record.id
            and message.epoch == self.record.epoch
            and message.stage == self.stage_of(peer)
        )

    @property
    def is_forming(self) -> bool:
        """Whether stages are loading or linking."""
        return self.state in ("loading", "linking")

    # --- events ------------------------------------------------------------------------------

    def start_linking(self, record: PipelineRecord, now: float) -> None:
        """Record that all stages have loaded and are told to form the ring."""
        self.record, self.state = record, "linking"
        self._deadlines = [now + LINK_TIMEOUT] * len(record.stages)

    def observe_report(self, peer: str, report: PeerReport, now: float) -> str | None:
        """Compare a peer's report with this epoch; return why the stage has failed, if it has."""
        stage = self.stage_of(peer)
        if stage is None:
            return None
        worker = self._find_worker(stage, report)
        if worker is None:
            return self._on_worker_missing(stage, now)
        self._missing_since.pop(stage, None)
        if worker.state == "failed":
            return "its worker failed"
        if worker.state == "ready" and self.state != "loading":
            self.ready.add(stage)
        self._track_progress(stage, worker, now)
        return None

    def find_overdue(self, now: float) -> tuple[int, str] | None:
        """Return the first late stage, and the step that is late."""
        done = self.loaded if self.state == "loading" else self.ready
        for stage, deadline in enumerate(self._deadlines):
            if stage not in done and now >= deadline:
                slow = "loading" if stage in self._loading else "fetching"
                what = {
                    "adopting": "did not report its stage",
                    "loading": f"made too little progress {slow} its stage",
                    "linking": "did not join the ring",
                }.get(self.state, "")
                return stage, what
        return None

    def _find_worker(self, stage: int, report: PeerReport) -> WorkerState | None:
        """Return the worker of this epoch's stage in a report."""
        for worker in report.workers:
            if (worker.pipeline, worker.stage, worker.layers, worker.epoch) == (
                self.record.id,
                stage,
                self.record.stages[stage].layers,
                self.record.epoch,
            ):
                return worker
        return None

    def _on_worker_missing(self, stage: int, now: float) -> str | None:
        """Handle a report without the worker, which is a failure only if none is being started."""
        if self.state == "adopting":
            return "it no longer runs the layers it had before the coordinator restarted"
        since = self._missing_since.setdefault(stage, now)
        if self.state == "ready" and now - since >= MISSING_TIMEOUT:
            return "its worker exited"
        return None

    def needs_resend(self, stage: int, now: float) -> bool:
        """Whether reports have lacked an assignment for so long that it must have been lost."""
        since = self._missing_since.get(stage)
        if self.state != "loading" or since is None or now - since < MISSING_TIMEOUT:
            return False
        self._missing_since[stage] = now
        return True

    def _track_progress(self, stage: int, worker: WorkerState, now: float) -> None:
        if self.state != "loading" or stage in self._loading:
            return
        if worker.state == "fetching":
            self._transfers[stage].observe_bytes(worker.done, now)
            self._deadlines[stage] = self._transfers[stage].deadline
        elif worker.state == "loading":
            self._loading.add(stage)
            self._deadlines[stage] = now + LOAD_TIMEOUT + self._stage_bytes[stage] / LOAD_RATE

    # --- invariants --------------------------------------------------------------------------

    @property
    def all_loaded(self) -> bool:
        """Whether every stage has its weights."""
        return len(self.loaded) == len(self.record.stages)

    @property
    def all_ready(self) -> bool:
        """Whether every stage has joined the ring."""
        return len(self.ready) == len(self.record.stages)

    def validate(self) -> None:
        """Check the invariants.

        Raises:
            InvariantError: one is violated.
        """
        stages = set(range(len(self.record.stages)))
        if not (set(self.loaded) <= stages and self.ready <= stages):
            raise InvariantError(f"epoch {self.record.epoch} tracks unknown stages")
        if self.state == "ready" and not self.all_ready:
            raise InvariantError(f"epoch {self.record.epoch} is ready without all of its stages")
        if self.state in ("linking", "ready") and not self.record.formed:
            raise InvariantError(
                f"epoch {self.record.epoch} is linking but its record is not formed"
            )
        if len(set(self.peers)) != len(self.peers):
            raise InvariantError(f"epoch {self.record.epoch} uses a peer twice")


class PhaseTimes:
    """Times of the last change's phases, from its detection until the ring is up."""

    def __init__(self) -> None:
        self._reason = ""
        self._noticed_at: float | None = None
        self._reached_at: dict[Phase, float] = {}

    def begin_change(self, reason: str, now: float) -> None:
        """Begin a change, or restart the phases of an unfinished one."""
        if self._noticed_at is None or "formed" in self._reached_at:
            self._reason, self._noticed_at = reason, now
        self._reached_at = {}

    def record_phase(self, phase: Phase, now: float) -> None:
        """Record the end of a phase."""
        self._reached_at.setdefault(phase, now)

    def to_status(self) -> dict[str, str | float]:
        """Return the content for ``molink status --json``, in seconds since detection."""
        if self._noticed_at is None:
            return {}
        began = self._noticed_at
        seconds = {phase: round(at - began, 3) for phase, at in self._reached_at.items()}
        return {"reason": self._reason} | seconds


# --- epochs ----------------------------------------------------------------------------------


def epoch_spec(desired: DesiredModel) -> DesiredModel:
    """Return the part of a desired model whose change requires a new pipeline or epoch."""
    facts = structs.replace(desired.facts, hub="")
    return replace(
        desired, facts=facts, source="", min_peers=1, replicas=1, applied=False, stopped=False
    )


def stage_layout(stages: Iterable[StageRecord | PlacedStage]) -> list[tuple[str, LayerRange]]:
    """Return peer and layers of each stage; epochs with equal layouts are interchangeable."""
    return [(stage.peer, stage.layers) for stage in stages]


def choose_block_size(
    stages: Iterable[StageRecord], desired: DesiredModel, registry: Registry
) -> int:
    """Choose the largest KV block size that any stage's attention requires for this model.

    Flash attention, the only one with a requirement, supports neither float32 nor capped scores.
    """
    facts, dtype = desired.facts, desired.dtype
    wide = dtype == "f32" or (dtype == "auto" and facts.element_bytes > 2)
    if wide or facts.score_heads:
        return BLOCK_SIZE
    sessions = [registry.sessions.get(stage.peer) for stage in stages]
    wanted = [one.report.device.block_size for one in sessions if one is not None]
    return max([BLOCK_SIZE, *wanted])


def formed_record(
    record: PipelineRecord, loaded: Sequence[StageLoaded], blocks: int, micro_batches: int
) -> PipelineRecord:
    """Complete ``record`` after all stages have loaded; ``micro_batches`` 0 lets the scheduler
    choose.
    """
    stages = tuple(
        replace(stage, port=one.port, max_blocks=one.max_blocks, profile=one.profile)
        for stage, one in zip(record.stages, loaded, strict=True)
    )
    return replace(
        record,
        stages=stages,
        formed=True,
        blocks=blocks,
        micro_batches=micro_batches,
    )


def attribute_failure(
    formation: Formation, message: StageFailed, registry: Registry
) -> tuple[str, str]:
    """Determine the peer at fault for a failed stage, and describe the failure for the user."""
    peers = formation.peers
    peer = peers[message.stage]
    text = f"stage {stage_number(message.stage)} on {registry.name_of(peer)}: {message.reason}"
    if message.next_lost:
        peer = peers[(message.stage + 1) % len(peers)]
        text += f" (next is {registry.name_of(peer)})"
    elif message.previous_blocked:
        peer = peers[message.stage - 1]
        text += f" (it had to cut off {registry.name_of(peer)})"
    return peer, text
