"""Drives a deployment to its desired state: one ready pipeline.

One pipeline serves or is being formed. A successor may be formed meanwhile and takes over when
ready; a predecessor may still be ending. :mod:`molink.swarm.controller.fleet` delivers events and
returns the actions in order, so an epoch is committed before it is announced.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from molink.errors import InvariantError
from molink.facts.layer_range import format_layers, stage_number
from molink.swarm.controller import instructions
from molink.swarm.controller.context import ControllerContext
from molink.swarm.controller.events import (
    CommitPipelineAction,
    PeerReportedEvent,
    ReserveEpochAction,
    StageReportedEvent,
)
from molink.swarm.controller.formation import (
    Formation,
    PhaseTimes,
    attribute_failure,
    choose_block_size,
    epoch_spec,
    formed_record,
    stage_layout,
)
from molink.swarm.controller.holdings import MissingFiles
from molink.swarm.controller.migration import RETRY_DELAY, Migration
from molink.swarm.controller.planner import DEBOUNCE, LOSS_DEBOUNCE, Planner
from molink.swarm.controller.reachability import describe_unreachable
from molink.swarm.controller.records import DesiredModel, PipelineRecord, StageRecord
from molink.swarm.election.terms import epoch_text
from molink.swarm.placement.placement import Candidate, Placement, Unplaceable, explain_misfit
from molink.wire.messages.instructions import Unassign
from molink.wire.messages.peer_reports import StageFailed, StageLoaded

#: Maximum seconds between progress updates to requests that wait for a formation.
PROGRESS_INTERVAL = 5.0
#: Seconds for which the old pipeline keeps running after a switch-over, while daemons connect to
#: the new scheduler.
SWITCH_OVER_DELAY = 1.0
WAITING_FOR_PEERS = "waiting for peers"
JUST_REQUESTED = "the model was just requested"
#: Why a peer is a spare, for the user.
SPARE_REASON = "on standby: using it would not be faster (`--min-stages` on `molink up` forces it)"


@dataclass(frozen=True, slots=True)
class _Failure:
    """Why a formation cannot continue, and the peer at fault.

    With ``doubt``, a neighbour blames the peer, which may have left without a report. With
    ``at_once``, the peer is excluded even if it never failed before.
    """

    reason: str
    blamed: str | None = None
    doubt: bool = False
    at_once: bool = False


class Reconciler:
    """The control plane's decisions about one deployment."""

    def __init__(
        self,
        context: ControllerContext,
        now: float,
        desired: DesiredModel,
        replica: int = 0,
        pipeline: PipelineRecord | None = None,
        *,
        lost_peer: str = "",
    ) -> None:
        """``desired`` and ``pipeline`` are the stored state; ``lost_peer`` has left the swarm."""
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
        #: Index of this deployment among the model's, from 0.
        self.replica = replica
        #: Name in the transition log; empty if it is the only deployment.
        self.label = ""
        #: Pipelines of the same model's other deployments.
        self.sibling_pipelines: tuple[str, ...] = ()
        #: The current epoch, if it is being formed or ready.
        self.formation: Formation | None = None
        #: The migration that the serving pipeline makes when the files have arrived.
        self.migration: Migration | None = None
        #: A successor that is formed while the pipeline serves, and takes over when ready.
        self.successor: Formation | None = None
        #: The pipeline that a successor has replaced, and the time when it ends.
        self.predecessor: tuple[Formation, float] | None = None
        #: Why no pipeline is ready, or why a change was not applied, for the user.
        self.reason = WAITING_FOR_PEERS
        #: Whether stages were assigned for the current desired state.
        self.has_assigned = False
        #: Whether a desired change must wait until another deployment of the model has changed.
        self.is_deferred = False
        #: The pipeline's newest epoch, even if it is not up.
        self.epoch = context.epoch
        #: The pipeline's id, even if it is not up: ``p1``, ``p2`` …
        self.pipeline = pipeline.id if pipeline else context.new_pipeline_id()
        #: Number that rises as long as the formation makes progress, and the time of its last
        #: change.
        self._progress_count = 0
        self._progress_at = now
        #: Durations of the last change's phases.
        self.phase_times = PhaseTimes()
        self._missing_files = MissingFiles(self.registry)
        self.planner.set_pins(desired.pins)
        if lost_peer:
            self.planner.waive_min_peers(lost_peer, placed=pipeline is not None)
        if pipeline is not None and pipeline.formed:
            formation = Formation(pipeline, "adopting", now, desired.facts)
            if self.registry.members.keys() - {lost_peer} >= set(formation.peers):
                self.formation = formation
                self.reason = "the coordinator has just started: waiting for its peers' reports"

    @property
    def key(self) -> tuple[str, int]:
        """The model's name, and the index of this deployment."""
        return self.desired.facts.name, self.replica

    @property
    def is_ready(self) -> bool:
        """Whether the pipeline can serve."""
        return self.formation is not None and self.formation.state == "ready"

    @property
    def is_adopting(self) -> bool:
        """Whether an earlier coordinator committed the pipeline, and it may still serve."""
        return self.formation is not None and self.formation.state == "adopting"

    @property
    def used_peers(self) -> frozenset[str]:
        """Peers that run, or are about to run, a worker of one of the deployment's pipelines."""
        retiring = self.predecessor[0].peers if self.predecessor is not None else ()
        planned = self.migration.peers if self.migration is not None else ()
        formed = [peer for one in self._formations() for peer in one.peers]
        return frozenset((*formed, *retiring, *planned))

    def has_stage(self, peer: str) -> bool:
        """Whether the peer has a stage in the current formation."""
        return self.formation is not None and peer in self.formation.peers

    # --- events ------------------------------------------------------------------------------

    def start_serving(self, now: float) -> None:
        """Start serving a newly requested model."""
        self._log_request(now)
        self._break_formation(_Failure(JUST_REQUESTED), now)

    def update_desired(self, desired: DesiredModel, now: float) -> None:
        """Apply a changed desired state: other options, or other files of the model."""
        old, self.desired = self.desired, desired
        if epoch_spec(old) == epoch_spec(desired):
            if self.formation is None:  # since ``min_peers`` may have changed
                self.planner.schedule_placement(self._find_candidates(now), now)
            return
        self.planner.set_pins(desired.pins)
        self.has_assigned = False
        self._log_request(now)
        if old.weight_key != desired.weight_key:
            # With a new id, no worker is reused.
            self.dissolve_pipelines()
            self.pipeline = self.context.new_pipeline_id()
            self.planner.restart_planning()
        self._break_formation(_Failure(JUST_REQUESTED), now)

    def _log_request(self, now: float) -> None:
        desired = self.desired
        text = f"serve {desired.facts.name} as {desired.dtype}, {desired.quantization}"
        self._log_transition(now, text, f"{self._subject} was requested")

    def rebalance_ring(self, now: float) -> None:
        """Place the model again as if no ring were serving; the old ring serves until the new one
        is up.
        """
        self.planner.rebalance_now(self._find_candidates(now), now)

    def on_term_raised(self, now: float) -> None:
        """Restart a formation in progress, since the other part may know newer"""
        if self.formation is not None and self.formation.is_forming:
            self._break_formation(_Failure("another part of the swarm has rejoined"), now)

    def on_peer_lost(self, peer: str, reason: str, now: float) -> None:
        """A peer was lost or is no longer a member; ``reason`` names it, for the user."""
        if self.has_stage(peer):
            self._break_formation(_Failure(reason), now)
        planned = self.migration.peers if self.migration is not None else ()
        if peer in planned or (self.successor is not None and peer in self.successor.peers):
            self._cancel_change(now)

    def on_peer_reported(self, event: PeerReportedEvent, now: float) -> None:
        """Update the stages of a peer from its report."""
        peer = event.peer
        for worker in event.report.workers:
            if self.is_ready and worker.pipeline == self.pipeline:
                self.planner.read_rates.record_slowdown(peer, worker.slowdown, now)
        for formation in self._formations():
            stage = formation.stage_of(peer)
            if stage is None:
                continue
            failure = formation.observe_report(peer, event.report, now)
            if failure is not None:
                reason = f"{self.registry.name_of(peer)}: {failure}"
                blamed = None if formation.state == "adopting" else peer
                self._fail_formation(formation, _Failure(reason, blamed), now)
            elif event.is_new_connection or formation.needs_resend(stage, now):
                self._send_instruction(formation, stage)

    def on_prefetch_reported(self, event: PeerReportedEvent, now: float) -> None:
        """Update a migration from a peer's report."""
        migration, peer, state = self.migration, event.peer, event.report.prefetch
        if migration is None:
            return
        failure = migration.observe_prefetch(peer, state, now)
        if failure is not None:
            self._on_prefetch_failed(peer, failure, now)
        elif migration.needs_resend(peer, state, now) or (
            event.is_new_connection and peer in migration.pending_peers
        ):
            self._send_prefetch(migration, peer)

    def on_stage_reported(self, event: StageReportedEvent, now: float) -> None:
        """Process a peer's message about an assignment, which may belong to another deployment."""
        message = event.message
        accepting = (one for one in self._formations() if one.accepts_message(event.peer, message))
        formation = next(accepting, None)
        if formation is None or not self.registry.is_live(event.peer):
            return
        if isinstance(message, StageFailed):
            self._on_stage_failed(formation, event.peer, message, now)
        elif isinstance(message, StageLoaded):
            if formation.state == "loading":
                formation.loaded[message.stage] = message
                self._signal_progress(now)
                stage, epoch = stage_number(message.stage), epoch_text(message.epoch)
                self._log_transition(
                    now,
                    f"stage {stage} of epoch {epoch} has loaded",
                    f"{self.registry.name_of(event.peer)} has loaded its layers",
                )
        elif formation.state != "loading":
            formation.ready.add(message.stage)

    def _on_stage_failed(
        self, formation: Formation, sender: str, message: StageFailed, now: float
    ) -> None:
        peer, reason = attribute_failure(formation, message, self.registry)
        if message.files_missing and formation is self.formation:
            self._break_formation(_Failure(reason), now)
            self._missing_files.record_missing(self.desired.facts, now)
            return
        is_serving = self.has_stage(peer)
        if formation is self.successor and is_serving and not self.has_stage(sender):
            peer = sender  # the newer peer is the likelier cause
        if formation is self.successor and is_serving and message.out_of_memory:
            self._replace_in_place(reason, now)
        else:
            self._fail_formation(formation, _Failure(reason, peer, doubt=peer != sender), now)

    def needed_pipelines(self, peer: str) -> set[str]:
        """Return the pipelines whose workers a peer must keep running.

        While no pipeline is formed, their loaded weights may be reused.
        """
        others = (self.successor, self.predecessor and self.predecessor[0])
        needed = {one.record.id for one in others if one is not None and peer in one.peers}
        if self.has_stage(peer) or (self.formation is None and self.planner.may_use(peer)):
            needed.add(self.pipeline)
        return needed

    def set_allocated_peers(self, peers: frozenset[str] | None) -> None:
        """Set the peers that the deployment may use; ``None`` means all."""
        self.planner.allocated_peers = peers
        if self.formation is not None or peers is None:
            return
        for peer, session in self.registry.sessions.items():
            held = {worker.pipeline for worker in session.report.workers}
            if peer not in peers and self.pipeline in held:
                self.context.send_message(peer, Unassign(pipeline=self.pipeline))

    # --- failures ----------------------------------------------------------------------------

    def _fail_formation(self, formation: Formation, failure: _Failure, now: float) -> None:
        """Handle a failed formation: break the serving pipeline, or give up the successor."""
        if formation is not self.successor:
            self._break_formation(failure, now)
            return
        epoch = epoch_text(formation.record.epoch)
        self._log_transition(
            now,
            f"epoch {epoch} is abandoned: {failure.reason}",
            f"layers of {self._subject} are not moved: {failure.reason}",
        )
        is_serving = failure.blamed is not None and self.has_stage(failure.blamed)
        if not is_serving:
            self._record_failure(failure, now)
        self._cancel_change(now, RETRY_DELAY if is_serving else LOSS_DEBOUNCE)

    def _break_formation(self, failure: _Failure, now: float) -> None:
        """Give up the current formation; an intact successor takes over."""
        is_news = failure.reason != JUST_REQUESTED
        self._log_transition(
            now,
            f"not ready: {failure.reason}",
            f"{self._subject} is not ready: {failure.reason}" if is_news else "",
        )
        delay = self._record_failure(failure, now)
        if delay and failure.blamed is not None:
            name = self.registry.name_of(failure.blamed)
            self._log_transition(
                now,
                f"{name} is excluded for {delay:.0f} s",
                f"{name} gets no layers for {delay:.0f} s",
            )
        self.reason = failure.reason
        self.phase_times.begin_change(failure.reason, now)
        step = DEBOUNCE if self.formation is None else LOSS_DEBOUNCE
        old, self.formation, self.migration = self.formation, None, None
        if old is not None and self.successor is not None:
            if failure.reason != JUST_REQUESTED and self.registry.all_live(self.successor.peers):
                self._fail_over(old, self.successor, now)
                return
            self._drop_successor()
        self.planner.schedule_placement(self._find_candidates(now), now, step=step)

    def _record_failure(self, failure: _Failure, now: float) -> float:
        if failure.blamed is None:
            return 0.0
        return self.planner.record_failure(
            failure.blamed, failure.reason, now, doubt=failure.doubt, at_once=failure.at_once
        )

    def _on_prefetch_failed(self, peer: str, reason: str, now: float) -> None:
        """Handle a peer that cannot get the files of a migration."""
        text = f"{self.registry.name_of(peer)} can't fetch its files: {reason}"
        self._log_transition(now, text, text)
        is_serving = self.has_stage(peer)
        if not is_serving:
            self.planner.backoff.record_failure(peer, reason, now)
        self._cancel_change(now, RETRY_DELAY if is_serving else LOSS_DEBOUNCE)

    def _cancel_change(self, now: float, pause: float = LOSS_DEBOUNCE) -> None:
        """Cancel a migration or successor, and plan again after a pause."""
        self.migration = None
        self._drop_successor()
        self.planner.schedule_placement(self._find_candidates(now), now, pause)

    # --- due work ----------------------------------------------------------------------------

    def advance_state(self, now: float) -> None:
        """Do all due work."""
        self._check_overdue(now)
        candidates = self._find_candidates(now)
        if self._may_place(candidates, now) and self.planner.check_due(
            candidates, self.registry, now
        ):
            serving = self.formation.record.stages if self.formation and self.is_ready else ()
            placed = self.planner.place_model(self.desired, candidates, self.registry, now, serving)
            self._apply_placement(placed, now)
        self._advance_formations(now)
        is_forming = self.formation is not None and self.formation.is_forming
        if is_forming and now - self._progress_at >= PROGRESS_INTERVAL:
            self._signal_progress(now)
        self._end_predecessor(now)

    def _check_overdue(self, now: float) -> None:
        slow = self.migration.find_overdue(now) if self.migration is not None else None
        if slow is not None:
            self._on_prefetch_failed(slow, "the transfer is too slow", now)
        for formation in self._formations():
            late = formation.find_overdue(now)
            if late is None:
                continue
            peer = formation.peers[late[0]]
            is_adopting, is_loading = formation.state == "adopting", formation.state == "loading"
            # If part of the pipeline runs, the next placement doesn't count as the first one.
            self.planner.has_placed |= is_adopting and bool(formation.ready)
            reason = f"{self.registry.name_of(peer)} {late[1]}"
            failure = _Failure(reason, None if is_adopting else peer, at_once=is_loading)
            self._fail_formation(formation, failure, now)

    def _may_place(self, candidates: tuple[Candidate, ...], now: float) -> bool:
        """Whether to place now; a formation that is nearly done finishes first."""
        if self.is_deferred or self._missing_files.still_missing(self.desired.facts, now):
            return False
        formation = self.successor or self.formation
        if formation is None or formation.state == "ready":
            return True
        return formation.is_forming and self.planner.is_outdated(candidates, formation.peers)

    def _apply_placement(self, placed: Placement | Unplaceable, now: float) -> None:
        """Apply a new placement. Without one, a serving pipeline continues, and one that doesn't
        serve waits.
        """
        self.migration = None
        if self.successor is not None:
            if isinstance(placed, Placement) and stage_layout(
                self.successor.record.stages
            ) == stage_layout(placed.stages):
                return
            self._drop_successor()
        if isinstance(placed, Unplaceable):
            self.reason = placed.reason
            verb = "keep their places" if self.is_ready else "have no place yet"
            self._log_transition(
                now,
                f"not placed: {placed.reason}",
                f"layers of {self._subject} {verb}: {placed.reason}",
            )
            return
        stages = tuple(StageRecord(stage.peer, stage.layers) for stage in placed.stages)
        old = self.formation
        if old is not None and stage_layout(old.record.stages) == stage_layout(stages):
            self.reason = "" if self.is_ready else self.reason
        elif old is not None and old.state == "ready":
            self._start_migration(old, stages, now)
        else:
            self._start_epoch(stages, now)

    def _advance_formations(self, now: float) -> None:
        """Advance each formation whose stages are all done; start the new epoch of a migration."""
        if self.migration is not None and not self.migration.pending_peers:
            self._start_successor(self.migration.stages, now)
        for formation in self._formations():
            if formation.state == "loading" and formation.all_loaded:
                self._start_linking(formation, now)
            elif (
                formation.state == "adopting"
                and not formation.all_ready
                and self.registry.all_live(formation.peers)
            ):
                # The earlier coordinator ended before it had told all stages to form their ring.
                formation.start_linking(formation.record, now)
                self._send_instructions(formation)
            elif formation is self.successor and formation.all_ready:
                self._switch_over(formation, now)
            else:
                self._complete_formation(formation, now)

    # --- forming an epoch --------------------------------------------------------------------

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
                self.context.send_message(peer, Unassign(pipeline=self.pipeline))
        self._send_instructions(formation)

    def _create_epoch(
        self, pipeline: str, stages: tuple[StageRecord, ...], now: float
    ) -> Formation:
        self.migration = None
        self.epoch = self.context.new_epoch()
        record = PipelineRecord(
            pipeline,
            self.desired.facts.name,
            self.epoch,
            stages,
            block_size=choose_block_size(stages, self.desired, self.registry),
            replica=self.replica,
        )
        layout = self._layers_text(stages)
        self._log_transition(
            now,
            f"epoch {epoch_text(record.epoch)}: {layout}",
            f"loading layers of {self._subject}: {layout}",
        )
        self.phase_times.record_phase("decided", now)
        return Formation(record, "loading", now, self.desired.facts)

    def _start_linking(self, formation: Formation, now: float) -> None:
        """Tell the stages, which have all loaded, to form the ring."""
        loaded = [formation.loaded[stage] for stage in range(len(formation.record.stages))]
        blocks, least = min((one.max_blocks, stage) for stage, one in enumerate(loaded))
        peer, serving = formation.peers[least], self.formation
        shared = serving is not None and serving is not formation and peer in serving.peers
        name = self.registry.name_of(peer)
        if blocks < 1 and not shared:
            failure = _Failure(f"{name} has no memory left for KV", peer)
            self._fail_formation(formation, failure, now)
            return
        record = formed_record(formation.record, loaded, blocks, self.desired.micro_batches)
        if serving is not None and shared and record.kv_tokens < serving.record.kv_tokens:
            self._replace_in_place(f"{name} has less room for KV", now)
            return
        formation.start_linking(record, now)
        self.phase_times.record_phase("loaded", now)
        shape = f"{blocks} blocks, K = {record.micro_batches}"
        self._log_transition(now, f"form epoch {epoch_text(record.epoch)}: {shape}")
        if formation is self.formation:
            self._signal_progress(now)
            self.reason = "forming the ring"
            self.context.add_actions(CommitPipelineAction(record))
        self._send_instructions(formation)

    def _complete_formation(
        self, formation: Formation, now: float, *, has_moved: bool = False
    ) -> None:
        """Mark the ring ready if all stages have joined; ``has_moved`` means that another one
        serves.
        """
        if formation.state not in ("linking", "adopting") or not formation.all_ready:
            return
        if formation.state == "adopting":
            # Other peers may have been joining the pipeline.
            kept = [one for one in self._find_candidates(now) if one.peer in formation.peers]
            self.planner.mark_settled(tuple(kept))
            self.planner.has_placed = True
        formation.state = "ready"
        self.planner.on_ring_formed(formation.record, self.desired, self.registry)
        self.phase_times.record_phase("formed", now)
        self.reason = ""
        news = f"layers of {self._subject} moved" if has_moved else f"{self._subject} is ready"
        self._log_transition(
            now,
            f"epoch {epoch_text(formation.record.epoch)} is ready",
            f"{news}: {self._layers_text(formation.record.stages)}",
        )

    def _signal_progress(self, now: float) -> None:
        """Signal that the formation makes progress, or may still make some."""
        self._progress_count, self._progress_at = self._progress_count + 1, now

    # --- replacing a serving pipeline --------------------------------------------------------

    def _start_migration(self, old: Formation, stages: tuple[StageRecord, ...], now: float) -> None:
        """Prefetch files first; :meth:`_advance_formations` continues when they have arrived."""
        self.reason = ""
        migration = self.migration = Migration(
            self.context.new_migration_id(), old.record, stages, now, self.desired.facts
        )
        self.phase_times.begin_change("a better placement", now)
        names = ", ".join(map(self.registry.name_of, migration.pending_peers)) or "none missing"
        waiting = f"; waiting for files of {names}" if migration.pending_peers else ""
        self._log_transition(
            now,
            f"the next epoch waits for files: {names}",
            f"layers of {self._subject} will move{waiting}",
        )
        for peer in migration.pending_peers:
            self._send_prefetch(migration, peer)

    def _start_successor(self, stages: tuple[StageRecord, ...], now: float) -> None:
        """Assign the stages of a separate pipeline while the current one serves."""
        successor = self.successor = self._create_epoch(self.context.new_pipeline_id(), stages, now)
        self.context.add_actions(ReserveEpochAction(successor.record.id, self.epoch))
        self._send_instructions(successor)

    def _switch_over(self, successor: Formation, now: float) -> None:
        """Switch to a ready successor: new requests immediately, running streams shortly after."""
        assert self.formation is not None
        self._end_predecessor(float("inf"))
        self.predecessor = (self.formation, now + SWITCH_OVER_DELAY)
        self._promote(successor)
        self._complete_formation(successor, now, has_moved=True)

    def _fail_over(self, old: Formation, successor: Formation, now: float) -> None:
        """Continue with the intact successor of a broken pipeline."""
        self._log_transition(
            now,
            f"epoch {epoch_text(successor.record.epoch)} takes over",
            f"{self._subject} continues: {self._layers_text(successor.record.stages)}",
        )
        self.context.add_actions(*self.registry.end_route(self.pipeline))
        self._unassign_stages(old)
        self._promote(successor)
        self.reason = "loading the model"
        self._signal_progress(now)

    def _promote(self, successor: Formation) -> None:
        self.formation, self.successor, self.pipeline = successor, None, successor.record.id
        self.context.add_actions(CommitPipelineAction(successor.record))

    def _replace_in_place(self, reason: str, now: float) -> None:
        """Replace the serving pipeline in place, since a device has no room for two stages."""
        assert self.successor is not None
        self._log_transition(
            now,
            f"replacing the pipeline in place: {reason}",
            f"{self._subject} restarts to move layers: {reason}",
        )
        stages = tuple(StageRecord(one.peer, one.layers) for one in self.successor.record.stages)
        self._drop_successor()
        self._start_epoch(stages, now)

    def _drop_successor(self) -> None:
        dropped, self.successor = self.successor, None
        if dropped is not None:
            self._unassign_stages(dropped)

    def _end_predecessor(self, now: float) -> None:
        """End the predecessor after its streams had time to move."""
        if self.predecessor is None or now < self.predecessor[1]:
            return
        old, self.predecessor = self.predecessor[0], None
        self.context.add_actions(*self.registry.end_route(old.record.id))
        self._unassign_stages(old)

    def dissolve_pipelines(self) -> None:
        """End all pipelines and free their stages' memory."""
        self._drop_successor()
        self._end_predecessor(float("inf"))
        if self.formation is not None:
            self._unassign_stages(self.formation)
        self.context.add_actions(*self.registry.end_route(self.pipeline))

    # --- messages ----------------------------------------------------------------------------

    def _send_instructions(self, formation: Formation) -> None:
        for stage in range(len(formation.record.stages)):
            self._send_instruction(formation, stage)

    def _send_instruction(self, formation: Formation, stage: int) -> None:
        """Send a stage's peer its instruction for this epoch."""
        for profile in instructions.build_profiles(formation, stage):
            self.context.send_message(formation.peers[stage], profile)
        message = instructions.build_instruction(formation, stage, self.desired, self.registry)
        if message is not None:
            self.context.send_message(formation.peers[stage], message)

    def _send_prefetch(self, migration: Migration, peer: str) -> None:
        message = instructions.build_prefetch(migration, peer, self.desired, self.registry)
        self.context.send_message(peer, message)

    def _unassign_stages(self, formation: Formation) -> None:
        for peer in formation.peers:
            self.context.send_message(peer, Unassign(pipeline=formation.record.id))

    def publish_route(self) -> None:
        """Publish the route to every live peer that does not know it yet."""
        formation = self.formation
        if self.is_adopting:
            return  # what peers know about a running pipeline remains true meanwhile
        is_forming = formation is not None and formation.is_forming
        is_waiting = self.reason in (WAITING_FOR_PEERS, JUST_REQUESTED)
        route = instructions.build_route(
            self.pipeline,
            self.epoch if formation is None else formation.record.epoch,
            formation.record if formation is not None and self.is_ready else None,
            self.desired,
            self.registry,
            reason="" if formation is not None or is_waiting else self.reason,
            forming_progress=self._progress_count if is_forming else 0,
            sibling_pipelines=self.sibling_pipelines,
        )
        self.context.add_actions(*self.registry.publish_route(route))

    def collect_notices(self) -> dict[str, str]:
        """Collect messages that tell users of PCs without a stage what they can do."""
        texts = {
            peer: self._explain_misfit(peer)
            for peer in self.registry.sessions
            if self.planner.may_use(peer)
        }
        for peer, found in self.planner.unreachable.items():
            text = self.explain_exclusion(peer)
            for concerned in (peer, found.target):
                if concerned in texts:
                    texts[concerned] = texts[concerned] or text
        return texts

    def explain_exclusion(self, peer: str) -> str:
        """Explain why a peer that offers a stage has none, for the user; empty if it has one."""
        if not self.registry.is_live(peer) or self.has_stage(peer):
            return ""
        misfit = self._explain_misfit(peer)
        if misfit:
            return f"excluded: {misfit}"
        found = self.planner.unreachable.get(peer)
        if found is not None and self.registry.all_live((found.source, found.target)):
            return describe_unreachable(found, self.registry)
        reason = self.planner.backoff.explain_exclusion(
            peer, self.context.clock, self.formation is not None
        )
        return reason or (
            SPARE_REASON if self.is_ready and peer in self.planner.spare_peers else ""
        )

    def _explain_misfit(self, peer: str) -> str:
        """Explain why the model lacks the layers that a peer names; empty if it has them."""
        stage = self.registry.sessions[peer].report.stage
        reason = explain_misfit(stage, self.desired.facts)
        return f"--stage {stage} {reason}" if reason else ""

    # --- helpers -----------------------------------------------------------------------------

    def _formations(self) -> Iterator[Formation]:
        """Yield the current formation, then the successor if it still exists at that point."""
        if self.formation is not None:
            yield self.formation
        if self.successor is not None:
            yield self.successor

    def _find_candidates(self, now: float) -> tuple[Candidate, ...]:
        return self.planner.find_candidates(self.registry, self.formation, now)

    @property
    def _subject(self) -> str:
        return self.label or self.desired.facts.name

    def _layers_text(self, stages: Sequence[StageRecord]) -> str:
        """Describe which PC holds which layers."""
        return ", ".join(
            f"{self.registry.name_of(one.peer)} {format_layers(one.layers)}" for one in stages
        )

    def _log_transition(self, now: float, text: str, event: str = "") -> None:
        text = f"{self.label}: {text}" if self.label else text
        self.context.log_transition(now, text, event)

    def validate(self) -> None:
        """Check the invariants of the formation, the successor and the migration.

        Raises:
            InvariantError: one is violated.
        """
        formation, successor, story = self.formation, self.successor, self.context.story
        if self.migration is not None:
            if formation is None:
                raise InvariantError("a migration without a serving pipeline", story)
            if not self.registry.all_live(self.migration.peers):
                raise InvariantError("a migration to a peer that is not live", story)
        if successor is not None:
            successor.validate()
            if formation is None or formation.state != "ready" or self.migration is not None:
                raise InvariantError("a successor of a pipeline that is not serving", story)
            if successor.record.id == formation.record.id or successor.record.epoch != self.epoch:
                raise InvariantError("the successor is not the newest epoch", story)
            if not self.registry.all_live(successor.peers):
                raise InvariantError("a stage's peer is not live", story)
        if formation is None:
            return
        formation.validate()
        if formation.record.epoch > self.epoch or formation.record.id != self.pipeline:
            raise InvariantError("the formation is not the newest epoch", story)
        if formation.state != "adopting" and not self.registry.all_live(formation.peers):
            raise InvariantError("a stage's peer is not live", story)
