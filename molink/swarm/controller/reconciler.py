"""Drives a deployment to its desired state: one ready pipeline.

:mod:`molink.swarm.controller.fleet` passes on events and carries out the actions in order, so an
epoch is committed before it is announced.
"""

from molink.swarm.controller import epochs, instructions
from molink.swarm.controller.context import ControllerContext
from molink.swarm.controller.events import (
    CommitPipelineAction,
    PeerReportedEvent,
    StageReportedEvent,
)
from molink.swarm.controller.formation import Formation
from molink.swarm.controller.migration import RETRY_DELAY, Migration
from molink.swarm.controller.pipelines import JUST_REQUESTED, Pipelines
from molink.swarm.controller.planner import DEBOUNCE, LOSS_DEBOUNCE
from molink.swarm.controller.reachability import describe_unreachable
from molink.swarm.controller.records import DesiredModel, PipelineRecord, StageRecord
from molink.swarm.lack import MissingFiles
from molink.swarm.placement.placement import Candidate, Placement, Unplaceable, explain_misfit
from molink.swarm.terms import epoch_text
from molink.wire.messages.instructions import Unassign
from molink.wire.messages.peer_reports import StageFailed, StageLoaded

#: Requests that wait for a formation hear of its progress at least this often, in seconds.
PROGRESS_INTERVAL = 5.0
#: Why a peer is a spare, for the user.
SPARE_REASON = (
    "a spare: the ring is as good without it (`--min-stages` on `molink up` asks for more)"
)


class Reconciler(Pipelines):
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
        """``desired`` and ``pipeline`` come from the stored state; ``lost_peer`` is known to be
        gone."""
        super().__init__(context, now, desired, replica, pipeline)
        #: Whether a desired change waits until another deployment of the model has changed.
        self.is_deferred = False
        self._missing_files = MissingFiles(self.registry)
        self.planner.set_pins(desired.pins)
        if lost_peer:
            self.planner.waive_min_peers(placed=pipeline is not None)
        if pipeline is not None and pipeline.formed:
            formation = Formation(pipeline, "adopting", now, desired.facts)
            expected = self.registry.members.keys() - {lost_peer}
            if expected >= set(formation.peers):
                self.formation = formation
                self.reason = "this coordinator was just started: waiting for its peers' reports"

    # --- events ------------------------------------------------------------------------------

    def on_term_raised(self, now: float) -> None:
        """Restart a formation in progress: the other part may know newer epochs."""
        if self.formation is not None and self.formation.is_forming:
            self._break_formation("another part of the swarm comes back", None, now)

    def on_peer_lost(self, peer: str, reason: str, now: float) -> None:
        """A peer was lost or is no longer a member; ``reason`` names it, for the user."""
        if self.formation is not None and peer in self.formation.peers:
            self._break_formation(reason, None, now)
        self._cancel_change_to(peer, now)

    def on_peer_reported(self, event: PeerReportedEvent, now: float) -> None:
        """Update the stages of a peer from its report."""
        peer = event.peer
        for worker in event.report.workers:
            if worker.slowdown > 0 and self.is_ready and worker.pipeline == self.pipeline:
                self.planner.read_rates.record_slowdown(peer, worker.slowdown, now)
        for formation in self._formations():
            stage = formation.stage_of(peer)
            if stage is None:
                continue
            failure = formation.observe_report(peer, event.report, now)
            if failure is not None:
                blamed = None if formation.state == "adopting" else peer
                self._fail_formation(
                    formation, f"{self.registry.name_of(peer)}: {failure}", blamed, now
                )
            elif event.is_new_connection or formation.needs_resend(stage, now):
                self._send_instruction(formation, stage)

    def on_prefetch_reported(self, event: PeerReportedEvent, now: float) -> None:
        """Update a migration from a peer's report."""
        move, peer, said = self.migration, event.peer, event.report.prefetch
        if move is None:
            return
        failure = move.observe_prefetch(peer, said, now)
        if failure is not None:
            self._on_prefetch_failed(peer, failure, now)
        elif move.needs_resend(peer, said, now) or (
            event.is_new_connection and peer in move.pending_peers
        ):
            self._send_message(
                peer, instructions.build_prefetch(move, peer, self.desired, self.registry)
            )

    def _on_prefetch_failed(self, peer: str, failure: str, now: float) -> None:
        """A peer cannot get the files of a migration."""
        self._log_transition(now, f"{self.registry.name_of(peer)} can't get its files: {failure}")
        serves = self.formation is not None and peer in self.formation.peers
        if not serves:
            self.planner.backoff.record_failure(peer, failure, now)
        self._cancel_change(now, RETRY_DELAY if serves else LOSS_DEBOUNCE)

    def _cancel_change_to(self, peer: str, now: float) -> None:
        planned = self.migration.peers if self.migration is not None else ()
        if peer in planned or (self.successor is not None and peer in self.successor.peers):
            self._cancel_change(now)

    def _cancel_change(self, now: float, pause: float = LOSS_DEBOUNCE) -> None:
        """Cancel a migration or successor and plan again after a pause; the serving pipeline stays."""
        self.migration = None
        self._drop_successor()
        self.planner.schedule_placement(self._find_candidates(now), now, pause)

    def needed_pipelines(self, peer: str) -> set[str]:
        """Pipelines whose workers a peer keeps running.

        While no pipeline is formed, their loaded weights may be reused.
        """
        beside = [
            one
            for one in (self.successor, self.predecessor and self.predecessor[0])
            if one is not None
        ]
        needed = {one.record.id for one in beside if peer in one.peers}
        holds = self.formation is not None and peer in self.formation.peers
        if holds or (self.formation is None and self.planner.may_use(peer)):
            needed.add(self.pipeline)
        return needed

    def set_allocated_peers(self, peers: frozenset[str] | None) -> None:
        """Set the peers it may use; ``None``: all."""
        self.planner.allocated_peers = peers
        if self.formation is not None or peers is None:
            return
        for peer, session in self.registry.sessions.items():
            held = {worker.pipeline for worker in session.report.workers}
            if peer not in peers and self.pipeline in held:
                self._send_message(peer, Unassign(pipeline=self.pipeline))

    def on_stage_reported(self, event: StageReportedEvent, now: float) -> None:
        """Process a peer's message about an assignment, perhaps of another deployment."""
        message = event.message
        concerned = (one for one in self._formations() if one.accepts_message(event.peer, message))
        formation = next(concerned, None)
        if formation is None or not self.registry.is_live(event.peer):
            return
        if isinstance(message, StageFailed):
            peer, reason = epochs.attribute_failure(formation, message, self.registry)
            if message.files_missing and formation is self.formation:
                self._break_formation(reason, None, now)
                self._missing_files.record_missing(self.desired.facts, now)
                return
            old = self.formation.peers if self.formation is not None else ()
            serves = peer in old
            if formation is self.successor and serves and event.peer not in old:
                peer = event.peer  # of the two it is the newcomer that may be at fault
            if formation is self.successor and serves and message.out_of_memory:
                self._replace_in_place(reason, now)
            else:
                self._fail_formation(formation, reason, peer, now, doubt=peer != event.peer)
        elif isinstance(message, StageLoaded):
            if formation.state == "loading":
                formation.loaded[message.stage] = message
                self._signal_progress(now)
                epoch = epoch_text(message.epoch)
                self._log_transition(now, f"stage {message.stage} of epoch {epoch} has loaded")
        elif formation.state != "loading":
            formation.ready.add(message.stage)

    def start_serving(self, now: float) -> None:
        """Start serving a newly requested model."""
        self._log_transition(now, self._desired_text)
        self._break_formation(JUST_REQUESTED, None, now)

    def update_desired(self, desired: DesiredModel, now: float) -> None:
        """Apply a changed desired state: other options, or other files of the model."""
        old, self.desired = self.desired, desired
        if epochs.epoch_spec(old) == epochs.epoch_spec(desired):
            if self.formation is None:
                self.planner.schedule_placement(
                    self._find_candidates(now), now
                )  # ``min_peers`` may be another
            return
        self.planner.set_pins(desired.pins)
        self.has_assigned = False
        self._log_transition(now, self._desired_text)
        if old.weight_key != desired.weight_key:
            self._discard_pipeline()
        self._break_formation(JUST_REQUESTED, None, now)

    def rebalance_ring(self, now: float) -> None:
        """Place again as if nothing served; the old ring serves until the new one is up."""
        self.planner.rebalance_now(self._find_candidates(now), now)

    @property
    def _desired_text(self) -> str:
        return (
            f"serve {self.desired.facts.name} as {self.desired.dtype}, {self.desired.quantization}"
        )

    def _fail_formation(
        self,
        formation: Formation,
        reason: str,
        blamed: str | None,
        now: float,
        *,
        doubt: bool = False,
        at_once: bool = False,
    ) -> None:
        """A formation has failed: break the serving pipeline, or give up the successor."""
        if formation is not self.successor:
            self._break_formation(reason, blamed, now, doubt=doubt, at_once=at_once)
            return
        self._log_transition(
            now, f"epoch {epoch_text(formation.record.epoch)} is given up: {reason}"
        )
        serves = self.formation is not None and blamed in self.formation.peers
        if blamed is not None and not serves:
            self.planner.record_failure(blamed, reason, now, doubt=doubt, at_once=at_once)
        self._cancel_change(now, RETRY_DELAY if serves else LOSS_DEBOUNCE)

    def _break_formation(
        self,
        reason: str,
        blamed: str | None,
        now: float,
        *,
        doubt: bool = False,
        at_once: bool = False,
    ) -> None:
        """Give up the current formation.

        ``doubt``: a neighbour blames the peer, which may be gone without a report. ``at_once``:
        exclude the blamed peer even if it never failed before.
        """
        self._log_transition(now, f"not ready: {reason}")
        if blamed is not None:
            delay = self.planner.record_failure(blamed, reason, now, doubt=doubt, at_once=at_once)
            if delay:
                self._log_transition(
                    now, f"{self.registry.name_of(blamed)} is left out for {delay:.0f} s"
                )
        self.reason = reason
        self.phase_times.begin_change(reason, now)
        step = DEBOUNCE if self.formation is None else LOSS_DEBOUNCE
        old, self.formation, self.migration = self.formation, None, None
        if old is not None and self.successor is not None:
            if reason != JUST_REQUESTED and all(map(self.registry.is_live, self.successor.peers)):
                self._fail_over(old, now)
                return
            self._drop_successor()
        self.planner.schedule_placement(self._find_candidates(now), now, step=step)

    # --- what follows ------------------------------------------------------------------------

    def advance_state(self, now: float) -> None:
        """Do what is due."""
        self._check_overdue(now)
        candidates = self._find_candidates(now)
        if self._may_place(candidates, now) and self.planner.check_due(
            candidates, self.registry, now
        ):
            serving = self.formation.record.stages if self.formation and self.is_ready else ()
            placed = self.planner.place_model(self.desired, candidates, self.registry, now, serving)
            self._apply_placement(placed, now)
        self._advance_formations(now)
        formation = self.formation
        if (
            formation is not None
            and formation.is_forming
            and now - self._progress_at >= PROGRESS_INTERVAL
        ):
            self._signal_progress(now)
        self._end_predecessor(now)

    def _may_place(self, candidates: tuple[Candidate, ...], now: float) -> bool:
        """Whether to place now: a formation that is nearly done finishes first."""
        if self.is_deferred or self._missing_files.still_missing(self.desired.facts, now):
            return False
        formation = self.successor or self.formation
        if formation is None or formation.state == "ready":
            return True
        return formation.is_forming and self.planner.is_outdated(candidates, formation.peers)

    def _check_overdue(self, now: float) -> None:
        slow = self.migration.find_overdue(now) if self.migration is not None else None
        if slow is not None:
            self._on_prefetch_failed(slow, "they come too slowly", now)
        for formation in self._formations():
            late = formation.find_overdue(now)
            if late is None:
                continue
            peer = formation.peers[late[0]]
            adopting = formation.state == "adopting"
            # Part of the pipeline is there, so this is no first placement.
            self.planner.has_placed |= adopting and bool(formation.ready)
            reason, loading = (
                f"{self.registry.name_of(peer)} {late[1]}",
                formation.state == "loading",
            )
            self._fail_formation(
                formation, reason, None if adopting else peer, now, at_once=loading
            )

    def _advance_formations(self, now: float) -> None:
        """Advance each formation whose stages are all done, and start a migrated successor."""
        if self.migration is not None and not self.migration.pending_peers:
            self._start_successor(self.migration.stages, now)
        for formation in self._formations():
            if formation.state == "loading" and formation.all_loaded:
                self._start_linking(formation, now)
            elif self._is_partially_linked(formation):
                formation.start_linking(formation.record, now)
                self._send_instructions(formation)
            elif formation is self.successor and formation.all_ready:
                self._switch_over(formation, now)
            else:
                self._complete_formation(formation, now)

    def _apply_placement(self, placed: Placement | Unplaceable, now: float) -> None:
        """Apply a new placement. Without one, a serving pipeline continues and others wait."""
        self.migration = None
        if self.successor is not None:
            if isinstance(placed, Placement) and epochs.has_layout(self.successor.record, placed):
                return
            self._drop_successor()
        if isinstance(placed, Unplaceable):
            self.reason = placed.reason
            self._log_transition(now, f"not placed: {placed.reason}")
            return
        stages = tuple(StageRecord(stage.peer, stage.layers) for stage in placed.stages)
        old = self.formation
        if old is not None and epochs.stage_layout(old.record.stages) == epochs.stage_layout(
            stages
        ):
            self.reason = "" if self.is_ready else self.reason
        elif old is not None and old.state == "ready":
            self._start_migration(old, stages, now)
        else:
            self._start_epoch(stages, now)

    def _start_migration(self, old: Formation, stages: tuple[StageRecord, ...], now: float) -> None:
        """Prefetch files first; :meth:`_advance_formations` continues once they are there."""
        self.reason = "" if self.is_ready else self.reason
        self.migration = Migration(
            self.context.new_migration_id(), old.record, stages, now, self.desired.facts
        )
        self.phase_times.begin_change("another placement", now)
        names = ", ".join(self.registry.name_of(peer) for peer in self.migration.pending_peers)
        self._log_transition(now, f"the next epoch waits for files: {names or 'all are there'}")
        for peer in self.migration.pending_peers:
            self._send_message(
                peer, instructions.build_prefetch(self.migration, peer, self.desired, self.registry)
            )

    def _start_linking(self, formation: Formation, now: float) -> None:
        """All stages have loaded: tell them to form the ring."""
        loaded = [formation.loaded[stage] for stage in range(len(formation.record.stages))]
        blocks, least = min((said.max_blocks, stage) for stage, said in enumerate(loaded))
        peer, serving = formation.peers[least], self.formation
        shared = serving is not None and serving is not formation and peer in serving.peers
        if blocks < 1 and not shared:
            reason = f"{self.registry.name_of(peer)} has no memory left for KV"
            self._fail_formation(formation, reason, peer, now)
            return
        record = epochs.formed_record(formation.record, loaded, blocks, self.desired.micro_batches)
        if serving is not None and shared and record.kv_tokens < serving.record.kv_tokens:
            self._replace_in_place(f"{self.registry.name_of(peer)} has less room for KV", now)
            return
        formation.start_linking(record, now)
        self.phase_times.record_phase("loaded", now)
        epoch = epoch_text(record.epoch)
        self._log_transition(
            now, f"form epoch {epoch}: {blocks} blocks, K = {record.micro_batches}"
        )
        if formation is self.formation:
            self._signal_progress(now)
            self.reason = "forming the ring"
            self.context.add_actions(CommitPipelineAction(record))
        self._send_instructions(formation)

    def _is_partially_linked(self, formation: Formation) -> bool:
        """Whether an earlier coordinator ended before all stages were told to form their ring."""
        adopting = formation.state == "adopting" and not formation.all_ready
        return adopting and all(map(self.registry.is_live, formation.peers))

    def _send_instructions(self, formation: Formation) -> None:
        for stage in range(len(formation.record.stages)):
            self._send_instruction(formation, stage)

    # --- who gets no stage -------------------------------------------------------------------

    def collect_notices(self) -> dict[str, str]:
        """Messages to users of PCs without a stage about what they can do."""
        texts = {
            peer: self._explain_misfit(peer)
            for peer in self.registry.sessions
            if self.planner.may_use(peer)
        }
        for peer, found in self.planner.unreachable.items():
            text = self.explain_exclusion(peer)
            for told in (peer, found.target):
                if told in texts:
                    texts[told] = texts[told] or text
        return texts

    def explain_exclusion(self, peer: str) -> str:
        """Why a peer that offers a stage has none, for the user; empty if it has one."""
        if not self.registry.is_live(peer):
            return ""
        if self.formation is not None and peer in self.formation.peers:
            return ""
        why = self._explain_misfit(peer)
        if why:
            return f"left out: {why}"
        found = self.planner.unreachable.get(peer)
        if (
            found is not None
            and self.registry.is_live(found.source)
            and self.registry.is_live(found.target)
        ):
            return describe_unreachable(found, self.registry)
        why = self.planner.backoff.explain_exclusion(
            peer, self.context.clock, self.formation is not None
        )
        return why or (SPARE_REASON if self.is_ready and peer in self.planner.spare_peers else "")

    def _explain_misfit(self, peer: str) -> str:
        """Why the model lacks the layers that a peer names; empty if it has them."""
        stage = self.registry.sessions[peer].report.stage
        why = explain_misfit(stage, self.desired.facts)
        return f"--stage {stage} {why}" if why else ""
