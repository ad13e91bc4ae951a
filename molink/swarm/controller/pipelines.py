"""The pipelines of one deployment, and what peers are told about them.

One serves or is being formed. A successor may be formed beside it and takes over once ready; a
predecessor may still be ending. The reconciler decides between them.
"""

from collections.abc import Iterator

from molink.swarm.controller import epochs, instructions
from molink.swarm.controller.context import ControllerContext
from molink.swarm.controller.events import CommitPipelineAction, ReserveEpochAction
from molink.swarm.controller.formation import Formation
from molink.swarm.controller.migration import Migration
from molink.swarm.controller.planner import Planner
from molink.swarm.controller.records import DesiredModel, PipelineRecord, StageRecord
from molink.swarm.phases import PhaseTimes
from molink.swarm.placement.placement import Candidate
from molink.swarm.terms import epoch_text
from molink.wire.messages.instructions import Instruction, Unassign

#: How long the old pipeline keeps running after a switch-over, in seconds: daemons connect to the
#: new scheduler meanwhile.
SWITCH_OVER_DELAY = 1.0
WAITING_FOR_PEERS = "waiting for peers"
JUST_REQUESTED = "the model was just asked for"


class Pipelines:
    """State of one deployment: a model's pipeline and the steps that change it."""

    def __init__(
        self,
        context: ControllerContext,
        now: float,
        desired: DesiredModel,
        replica: int,
        pipeline: PipelineRecord | None,
    ) -> None:
        self.context = context
        self.registry = context.registry
        self.planner = Planner(
            now,
            context.backoff,
            context.reachability,
            context.links.copy(),
            restored=pipeline is not None,
        )
        self.desired = desired
        #: Which of the model's deployments this is, from 0.
        self.replica = replica
        #: Name in the transition log; empty if it is the only deployment.
        self.label = ""
        #: Pipelines of the same model's other deployments.
        self.sibling_pipelines: tuple[str, ...] = ()
        #: The current epoch, if it is being formed or ready.
        self.formation: Formation | None = None
        #: Where the serving pipeline moves once the files are there.
        self.migration: Migration | None = None
        #: A formation beside the serving pipeline; it takes over once ready.
        self.successor: Formation | None = None
        #: The pipeline that a successor has replaced, and when it ends.
        self.predecessor: tuple[Formation, float] | None = None
        #: Why no pipeline is ready, or why a change was not applied, for the user.
        self.reason = WAITING_FOR_PEERS
        #: Whether stages were assigned for the current desired state.
        self.has_assigned = False
        #: Its newest epoch, whether it is up or not.
        self.epoch = context.epoch
        #: Id of the pipeline, whether it is up or not: ``p1``, ``p2`` …
        self.pipeline = pipeline.id if pipeline else context.new_pipeline_id()
        #: Rises as long as the formation makes progress; and when it last did.
        self._progress_count = 0
        self._progress_at = now
        #: Durations of the last change's phases.
        self.phase_times = PhaseTimes()

    @property
    def key(self) -> tuple[str, int]:
        """The model's name, and which of its deployments this is."""
        return self.desired.facts.name, self.replica

    @property
    def is_ready(self) -> bool:
        """Whether the pipeline can serve."""
        return self.formation is not None and self.formation.state == "ready"

    @property
    def is_adopting(self) -> bool:
        """Whether an earlier coordinator committed it and it may still serve."""
        return self.formation is not None and self.formation.state == "adopting"

    @property
    def used_peers(self) -> frozenset[str]:
        """Peers that run, or are about to run, a worker of one of its pipelines."""
        retiring = self.predecessor[0].peers if self.predecessor is not None else ()
        planned = self.migration.peers if self.migration is not None else ()
        formed = [peer for one in self._formations() for peer in one.peers]
        return frozenset((*formed, *retiring, *planned))

    # --- the one that serves -----------------------------------------------------------------

    def _start_epoch(self, stages: tuple[StageRecord, ...], now: float) -> None:
        """Commit a placement as a new epoch and assign its stages."""
        old = self.formation
        formation = self.formation = self._create_epoch(self.pipeline, stages, now)
        self.has_assigned = True
        self._signal_progress(now)
        self.reason = "loading the model"
        self.context.add_actions(CommitPipelineAction(formation.record))
        for peer in old.peers if old is not None else ():
            if peer not in formation.peers:
                self._send_message(peer, Unassign(pipeline=self.pipeline))
        for stage in range(len(stages)):
            self._send_instruction(formation, stage)

    def _create_epoch(
        self, pipeline: str, stages: tuple[StageRecord, ...], now: float
    ) -> Formation:
        self.migration = None
        self.epoch = self.context.new_epoch()
        size = epochs.choose_block_size(stages, self.desired, self.registry)
        record = PipelineRecord(
            pipeline,
            self.desired.facts.name,
            self.epoch,
            stages,
            block_size=size,
            replica=self.replica,
        )
        layout = ", ".join(
            f"{self.registry.name_of(stage.peer)} {stage.layers[0]}:{stage.layers[1]}"
            for stage in stages
        )
        self._log_transition(now, f"epoch {epoch_text(record.epoch)}: {layout}")
        self.phase_times.record_phase("decided", now)
        return Formation(record, "loading", now, self.desired.facts)

    def _complete_formation(self, formation: Formation, now: float) -> None:
        """Mark the ring ready if all stages have joined."""
        if formation.state in ("linking", "adopting") and formation.all_ready:
            if formation.state == "adopting":
                kept = [one for one in self._find_candidates(now) if one.peer in formation.peers]
                self.planner.mark_settled(tuple(kept))  # the others may have been about to join in
                self.planner.has_placed = True
            formation.state = "ready"
            if self.desired is not None:
                self.planner.on_ring_formed(formation.record, self.desired, self.registry)
            self.phase_times.record_phase("formed", now)
            self.reason = ""
            self._log_transition(now, f"epoch {epoch_text(formation.record.epoch)} is ready")

    def _signal_progress(self, now: float) -> None:
        """Signal that the formation makes progress, or may still do so."""
        self._progress_count, self._progress_at = self._progress_count + 1, now

    # --- the one beside it -------------------------------------------------------------------

    def _start_successor(self, stages: tuple[StageRecord, ...], now: float) -> None:
        """Assign the stages of a separate pipeline while the current one serves."""
        formation = self.successor = self._create_epoch(self.context.new_pipeline_id(), stages, now)
        self.context.add_actions(ReserveEpochAction(formation.record.id, self.epoch))
        for stage in range(len(stages)):
            self._send_instruction(formation, stage)

    def _switch_over(self, new: Formation, now: float) -> None:
        """Switch to a ready successor: new requests at once, running streams shortly after."""
        assert self.formation is not None
        self._end_predecessor(float("inf"))
        self.predecessor = (self.formation, now + SWITCH_OVER_DELAY)
        self._promote_successor(new)
        self.context.add_actions(CommitPipelineAction(new.record))
        self._complete_formation(new, now)

    def _fail_over(self, old: Formation, now: float) -> None:
        """Continue with the intact successor of a broken pipeline."""
        assert self.successor is not None
        self._log_transition(
            now, f"epoch {epoch_text(self.successor.record.epoch)} goes on in its place"
        )
        self.context.add_actions(*self.registry.end_route(self.pipeline))
        self._unassign_stages(old)
        self.context.add_actions(CommitPipelineAction(self.successor.record))
        self._promote_successor(self.successor)
        self.reason = "loading the model"
        self._signal_progress(now)

    def _promote_successor(self, new: Formation) -> None:
        self.formation, self.successor, self.pipeline = new, None, new.record.id

    def _replace_in_place(self, reason: str, now: float) -> None:
        """Replace the serving pipeline in place: a device has no room for two stages."""
        assert self.successor is not None
        self._log_transition(now, f"not beside what serves: {reason}")
        stages = tuple(StageRecord(one.peer, one.layers) for one in self.successor.record.stages)
        self._drop_successor()
        self._start_epoch(stages, now)

    def _drop_successor(self) -> None:
        """Give up the successor."""
        dropped, self.successor = self.successor, None
        if dropped is not None:
            self._unassign_stages(dropped)

    def _end_predecessor(self, now: float) -> None:
        """End the predecessor once its streams had time to move."""
        if self.predecessor is None or now < self.predecessor[1]:
            return
        old, self.predecessor = self.predecessor[0], None
        self.context.add_actions(*self.registry.end_route(old.record.id))
        self._unassign_stages(old)

    # --- none ---------------------------------------------------------------------------------

    def dissolve_pipelines(self) -> None:
        """End all pipelines and free their stages' memory."""
        self._drop_successor()
        self._end_predecessor(float("inf"))
        if self.formation is not None:
            self._unassign_stages(self.formation)
        self.context.add_actions(*self.registry.end_route(self.pipeline))

    def _discard_pipeline(self) -> None:
        """End the pipeline; the next one gets a new id, so that no worker is reused."""
        self.dissolve_pipelines()
        self.pipeline = self.context.new_pipeline_id()
        self.planner.restart_planning()

    # --- what peers are told -----------------------------------------------------------------

    def _send_instruction(self, formation: Formation, stage: int) -> None:
        """Tell a stage's peer what it should do in this epoch."""
        for known in instructions.build_profiles(formation, stage):
            self._send_message(formation.peers[stage], known)
        message = instructions.build_instruction(formation, stage, self.desired, self.registry)
        if message is not None:
            self._send_message(formation.peers[stage], message)

    def publish_route(self) -> None:
        """Publish the route to every live peer that does not know it yet."""
        formation = self.formation
        if self.is_adopting:
            return  # what the peers know of a running pipeline stays true meanwhile
        ready = formation.record if formation is not None and self.is_ready else None
        route = instructions.build_route(
            self.pipeline,
            self.epoch if formation is None else formation.record.epoch,
            ready,
            self.desired,
            self.registry,
            reason=self._blocking_reason,
            forming_progress=self._progress_count
            if formation is not None and formation.is_forming
            else 0,
            sibling_pipelines=self.sibling_pipelines,
        )
        self.context.add_actions(*self.registry.publish_route(route))

    @property
    def _blocking_reason(self) -> str:
        """Why nothing is being formed; empty if something is, or is about to be."""
        passing = self.formation is not None or self.reason in (WAITING_FOR_PEERS, JUST_REQUESTED)
        return "" if passing else self.reason

    def _unassign_stages(self, formation: Formation) -> None:
        for peer in formation.peers:
            self._send_message(peer, Unassign(pipeline=formation.record.id))

    def _send_message(self, peer: str, message: Instruction) -> None:
        self.context.send_message(peer, message)

    # --- small things ------------------------------------------------------------------------

    def _formations(self) -> Iterator[Formation]:
        """The current formation, then the successor if it still exists by then."""
        if self.formation is not None:
            yield self.formation
        if self.successor is not None:
            yield self.successor

    def _find_candidates(self, now: float) -> tuple[Candidate, ...]:
        return self.planner.find_candidates(self.registry, self.formation, now)

    def _log_transition(self, now: float, text: str) -> None:
        self.context.log_transition(now, f"{self.label}: {text}" if self.label else text)
