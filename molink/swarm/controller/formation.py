"""One epoch of a pipeline, from placement until it breaks."""

from typing import Literal

from molink.errors import InvariantError
from molink.facts.model import ModelFacts
from molink.swarm.artifacts.transfer import (
    STALL_TIMEOUT,
    TransferDeadline,
    fetched_bytes,
    stage_bytes,
)
from molink.swarm.controller.records import PipelineRecord
from molink.wire.messages.peer_reports import (
    PeerReport,
    StageFailed,
    StageLoaded,
    StageReady,
    WorkerState,
)

#: ``adopting``: committed by an earlier coordinator; not all of its peers have reported yet.
FormationState = Literal["adopting", "loading", "linking", "ready"]

#: Allowance for loading weights once the files are there, in seconds, beside the time for their
#: bytes.
LOAD_TIMEOUT = 120.0
#: Slowest loading that is accepted, in bytes per second: an old disk.
LOAD_RATE = 16 << 20
#: Allowance from :class:`FormPipeline` until the ring is up, in seconds.
LINK_TIMEOUT = 60.0
#: How long a restarted coordinator waits for reports of a running pipeline's peers, in seconds.
ADOPT_TIMEOUT = 8.0
#: A worker missing from reports for this long, in seconds, is gone: reports may lag.
MISSING_TIMEOUT = 3.0


class Formation:
    """Tracks which stages are loaded and ready, and which are late. States only move forward."""

    def __init__(
        self, record: PipelineRecord, state: FormationState, now: float, facts: ModelFacts
    ) -> None:
        """``facts`` are the model's."""
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

    # --- who ---------------------------------------------------------------------------------

    def stage_of(self, peer: str) -> int | None:
        """The stage that a peer runs, if any."""
        return self.peers.index(peer) if peer in self.peers else None

    def accepts_message(self, peer: str, message: StageLoaded | StageReady | StageFailed) -> bool:
        """Whether a message belongs to this epoch and comes from that stage's peer."""
        return (
            message.pipeline == self.record.id
            and message.epoch == self.record.epoch
            and message.stage == self.stage_of(peer)
        )

    @property
    def is_forming(self) -> bool:
        """Whether stages are loading or linking."""
        return self.state in ("loading", "linking")

    # --- what happens ------------------------------------------------------------------------

    def start_linking(self, record: PipelineRecord, now: float) -> None:
        """All stages have loaded and are told to form the ring."""
        self.record, self.state = record, "linking"
        self._deadlines = [now + LINK_TIMEOUT] * len(record.stages)

    def observe_report(self, peer: str, report: PeerReport, now: float) -> str | None:
        """Compare a peer's report with this epoch; returns why the stage has failed, if it has."""
        stage = self.stage_of(peer)
        if stage is None:
            return None
        worker = self._find_worker(stage, report)
        if worker is None:
            return self._on_worker_missing(stage, now)
        self._missing_since.pop(stage, None)
        if worker.state == "failed":
            return "its worker has failed"
        if worker.state == "ready" and self.state != "loading":
            self.ready.add(stage)
        self._track_progress(stage, worker, now)
        return None

    def find_overdue(self, now: float) -> tuple[int, str] | None:
        """The first late stage, and what it is late with."""
        done = self.loaded if self.state == "loading" else self.ready
        for stage, deadline in enumerate(self._deadlines):
            if stage not in done and now >= deadline:
                slow = "loading" if stage in self._loading else "fetching"
                what = {
                    "adopting": "did not report its stage",
                    "loading": f"made too little progress with {slow} its stage",
                    "linking": "did not take its place in the ring",
                }.get(self.state, "")
                return stage, what
        return None

    def _find_worker(self, stage: int, report: PeerReport) -> WorkerState | None:
        """The worker of this epoch's stage in a report."""
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
        """Handle a report without the worker: a failure only if none is being started."""
        if self.state == "adopting":
            return "it no longer runs the layers that it had before this coordinator started"
        since = self._missing_since.setdefault(stage, now)
        if self.state == "ready" and now - since >= MISSING_TIMEOUT:
            return "its worker is gone"
        return None

    def needs_resend(self, stage: int, now: float) -> bool:
        """Whether reports have lacked an assignment for so long that it must be lost."""
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
            raise InvariantError(f"epoch {self.record.epoch} has stages that it hasn't")
        if self.state == "ready" and not self.all_ready:
            raise InvariantError(f"epoch {self.record.epoch} is ready without all of its stages")
        if self.state in ("linking", "ready") and not self.record.formed:
            raise InvariantError(f"epoch {self.record.epoch} was formed but not committed so")
        if len(set(self.peers)) != len(self.peers):
            raise InvariantError(f"epoch {self.record.epoch} has a peer twice")
