"""Makes what is (peers, stages) what it should be (a deployment served by one ready pipeline).

:mod:`molink.swarm.controller.fleet` tells each deployment's what happens and carries on what they
decide; an epoch is thus committed before it is announced.
"""

from molink.swarm.controller import epochs, instructions
from molink.swarm.controller.commons import Commons
from molink.swarm.controller.events import Commit, Reported, StageSaid
from molink.swarm.controller.formation import Formation
from molink.swarm.controller.move import RETRY, Move
from molink.swarm.controller.pipelines import JUST_ASKED, Pipelines
from molink.swarm.controller.planner import DEBOUNCE, LOSS_DEBOUNCE
from molink.swarm.controller.reach import closed
from molink.swarm.controller.records import Desired, PipelineRecord, StageRecord
from molink.swarm.lack import Lack
from molink.swarm.placement.placement import Candidate, Placement, Unplaceable, misfit
from molink.swarm.terms import epoch_text
from molink.wire.messages.instructions import Unassign
from molink.wire.messages.reports import StageFailed, StageLoaded

#: Who waits for what is being formed hears at least this often, in seconds, that it gets on.
SIGN_INTERVAL = 5.0
#: Why a peer is a spare, for a person.
NOT_NEEDED = "a spare: the ring is as good without it (`--min-stages` on `molink up` asks for more)"


class Reconciler(Pipelines):
    """The control plane's decisions about one deployment and its one pipeline."""

    def __init__(
        self,
        commons: Commons,
        now: float,
        desired: Desired,
        replica: int = 0,
        pipeline: PipelineRecord | None = None,
        *,
        lost: str = "",
    ) -> None:
        """``desired`` and ``pipeline`` as the state has them.

        ``lost`` is a peer that is known not to be there.
        """
        super().__init__(commons, now, desired, replica, pipeline)
        #: Whether it goes on as it is though another model, or another way of serving, is wanted:
        #: another deployment of the model changes first.
        self.lags = False
        self._lack = Lack(self.registry)
        self.planner.pin(desired.pins)
        if lost:
            self.planner.not_waiting(placed=pipeline is not None)
        if pipeline is not None and pipeline.formed:
            formation = Formation(pipeline, "adopting", now, desired.facts)
            expected = self.registry.members.keys() - {lost}
            if expected >= set(formation.peers):
                self.formation = formation
                self.reason = "this coordinator was just started: waiting for its peers' reports"

    # --- events ------------------------------------------------------------------------------

    def term_raised(self, now: float) -> None:
        """What is still being formed begins anew: the other part may know newer epochs."""
        if self.formation is not None and self.formation.forming:
            self._break("another part of the swarm comes back", None, now)

    def gone(self, peer: str, reason: str, now: float) -> None:
        """A peer is not there any more, or no member; ``reason`` names it, for a person."""
        if self.formation is not None and peer in self.formation.peers:
            self._break(reason, None, now)
        self._stay_without(peer, now)

    def reported(self, event: Reported, now: float) -> None:
        """A peer's report is news of its stages."""
        peer = event.peer
        for worker in event.report.workers:
            if worker.pace > 0 and self.ready and worker.pipeline == self.pipeline:
                self.planner.paces.told(peer, worker.pace, now)
        for formation in self._formations():
            stage = formation.stage_of(peer)
            if stage is None:
                continue
            failure = formation.observe(peer, event.report, now)
            if failure is not None:
                blamed = None if formation.state == "adopting" else peer
                self._fail(formation, f"{self.registry.name(peer)}: {failure}", blamed, now)
            elif event.fresh or formation.unaware(stage, now):
                self._instruct(formation, stage)

    def prefetched(self, event: Reported, now: float) -> None:
        """A peer's report says how far it is with files for a move."""
        move, peer, said = self.move, event.peer, event.report.prefetched
        if move is None:
            return
        failure = move.observe(peer, said, now)
        if failure is not None:
            self._cannot_fetch(peer, failure, now)
        elif move.unaware(peer, said, now) or (event.fresh and peer in move.lacking):
            self._send(peer, instructions.prefetch(move, peer, self.desired, self.registry))

    def _cannot_fetch(self, peer: str, failure: str, now: float) -> None:
        """A peer doesn't get the files for a move."""
        self._note(now, f"{self.registry.name(peer)} can't get its files: {failure}")
        serves = self.formation is not None and peer in self.formation.peers
        if not serves:
            self.planner.backoff.failed(peer, failure, now)
        self._stay(now, RETRY if serves else LOSS_DEBOUNCE)

    def _stay_without(self, peer: str, now: float) -> None:
        planned = self.move.peers if self.move is not None else ()
        if peer in planned or (self.next is not None and peer in self.next.peers):
            self._stay(now)

    def _stay(self, now: float, pause: float = LOSS_DEBOUNCE) -> None:
        """Give up a move; what serves was never touched. Look again after a pause."""
        self.move = None
        self._drop_next()
        self.planner.again(self._candidates(now), now, pause)

    def needed(self, peer: str) -> set[str]:
        """Pipelines whose workers a peer goes on with.

        While none is formed their weights may be of use.
        """
        beside = [one for one in (self.next, self.retiring and self.retiring[0]) if one is not None]
        needed = {one.record.id for one in beside if peer in one.peers}
        holds = self.formation is not None and peer in self.formation.peers
        if holds or (self.formation is None and self.planner.may_use(peer)):
            needed.add(self.pipeline)
        return needed

    def allot(self, peers: frozenset[str] | None) -> None:
        """It may use these peers; ``None``: all."""
        self.planner.allotted = peers
        if self.formation is not None or peers is None:
            return
        for peer, session in self.registry.sessions.items():
            held = {worker.pipeline for worker in session.report.workers}
            if peer not in peers and self.pipeline in held:
                self._send(peer, Unassign(pipeline=self.pipeline))

    def stage_said(self, event: StageSaid, now: float) -> None:
        """A peer says what became of an assignment; it may be one of another deployment."""
        message = event.message
        concerned = (one for one in self._formations() if one.concerns(event.peer, message))
        formation = next(concerned, None)
        if formation is None or not self.registry.live(event.peer):
            return
        if isinstance(message, StageFailed):
            peer, reason = epochs.blame(formation, message, self.registry)
            if message.no_files and formation is self.formation:
                self._break(reason, None, now)
                self._lack.found(self.desired.facts, now)
                return
            old = self.formation.peers if self.formation is not None else ()
            serves = peer in old
            if formation is self.next and serves and event.peer not in old:
                peer = event.peer  # of the two it is the newcomer that may be at fault
            if formation is self.next and serves and message.no_room:
                self._go_over_in_place(reason, now)
            else:
                self._fail(formation, reason, peer, now, doubt=peer != event.peer)
        elif isinstance(message, StageLoaded):
            if formation.state == "loading":
                formation.loaded[message.stage] = message
                self._sign(now)
                epoch = epoch_text(message.epoch)
                self._note(now, f"stage {message.stage} of epoch {epoch} has loaded")
        elif formation.state != "loading":
            formation.ready.add(message.stage)

    def begin(self, now: float) -> None:
        """It was just asked for."""
        self._note(now, self._wish)
        self._break(JUST_ASKED, None, now)

    def serve(self, desired: Desired, now: float) -> None:
        """Serve this from now on: another way of serving the model, or other bytes of it."""
        old, self.desired = self.desired, desired
        if epochs.content(old) == epochs.content(desired):
            if self.formation is None:
                self.planner.again(self._candidates(now), now)  # ``min_peers`` may be another
            return
        self.planner.pin(desired.pins)
        self.begun = False
        self._note(now, self._wish)
        if old.weights != desired.weights:
            self._abolish()
        self._break(JUST_ASKED, None, now)

    def rebalance(self, now: float) -> None:
        """Place it anew, as if nothing served it; what does goes on until the next ring stands."""
        self.planner.rebalance(self._candidates(now), now)

    @property
    def _wish(self) -> str:
        return f"serve {self.desired.facts.name} as {self.desired.dtype}, {self.desired.mode}"

    def _fail(
        self,
        formation: Formation,
        reason: str,
        blamed: str | None,
        now: float,
        *,
        doubt: bool = False,
        at_once: bool = False,
    ) -> None:
        """A formation can't go on: what serves breaks, what is made beside it is given up."""
        if formation is not self.next:
            self._break(reason, blamed, now, doubt=doubt, at_once=at_once)
            return
        self._note(now, f"epoch {epoch_text(formation.record.epoch)} is given up: {reason}")
        serves = self.formation is not None and blamed in self.formation.peers
        if blamed is not None and not serves:
            self.planner.failed(blamed, reason, now, doubt=doubt, at_once=at_once)
        self._stay(now, RETRY if serves else LOSS_DEBOUNCE)

    def _break(
        self,
        reason: str,
        blamed: str | None,
        now: float,
        *,
        doubt: bool = False,
        at_once: bool = False,
    ) -> None:
        """What was formed, or being formed, can't go on.

        ``doubt``: a neighbour blames the peer, which may be gone without our knowledge.
        ``at_once``: the others are tried without the one to blame, even if it never failed before.
        """
        self._note(now, f"not ready: {reason}")
        if blamed is not None:
            delay = self.planner.failed(blamed, reason, now, doubt=doubt, at_once=at_once)
            if delay:
                self._note(now, f"{self.registry.name(blamed)} is left out for {delay:.0f} s")
        self.reason = reason
        self.phases.begin(reason, now)
        step = DEBOUNCE if self.formation is None else LOSS_DEBOUNCE
        old, self.formation, self.move = self.formation, None, None
        if old is not None and self.next is not None:
            if reason != JUST_ASKED and all(map(self.registry.live, self.next.peers)):
                self._promote(old, now)
                return
            self._drop_next()
        self.planner.again(self._candidates(now), now, step=step)

    # --- what follows ------------------------------------------------------------------------

    def advance(self, now: float) -> None:
        """Do what is due by now."""
        self._check_late(now)
        candidates = self._candidates(now)
        if self._may_place(candidates, now) and self.planner.due(candidates, self.registry, now):
            serving = self.formation.record.stages if self.formation and self.ready else ()
            placed = self.planner.place(self.desired, candidates, self.registry, now, serving)
            self._follow(placed, now)
        self._move_on(now)
        formation = self.formation
        if formation is not None and formation.forming and now - self._sign_at >= SIGN_INTERVAL:
            self._sign(now)
        self._retire(now)

    def _may_place(self, candidates: tuple[Candidate, ...], now: float) -> bool:
        """What is nearly done is finished first, and then improved."""
        if self.lags or self._lack.lasts(self.desired.facts, now):
            return False
        formation = self.next or self.formation
        if formation is None or formation.state == "ready":
            return True
        return formation.forming and self.planner.outdated(candidates, formation.peers)

    def _check_late(self, now: float) -> None:
        slow = self.move.overdue(now) if self.move is not None else None
        if slow is not None:
            self._cannot_fetch(slow, "they come too slowly", now)
        for formation in self._formations():
            late = formation.overdue(now)
            if late is None:
                continue
            peer = formation.peers[late[0]]
            adopting = formation.state == "adopting"
            # Part of the pipeline is there, so this is no first placement.
            self.planner.placed |= adopting and bool(formation.ready)
            reason, loading = f"{self.registry.name(peer)} {late[1]}", formation.state == "loading"
            self._fail(formation, reason, None if adopting else peer, now, at_once=loading)

    def _move_on(self, now: float) -> None:
        """Take each formation to its next state if all stages are there, or to the next one."""
        if self.move is not None and not self.move.lacking:
            self._begin_beside(self.move.stages, now)
        for formation in self._formations():
            if formation.state == "loading" and formation.all_loaded:
                self._form(formation, now)
            elif self._half_told(formation):
                formation.linking(formation.record, now)
                self._form_ring(formation)
            elif formation is self.next and formation.all_ready:
                self._take_over(formation, now)
            else:
                self._finish(formation, now)

    def _follow(self, placed: Placement | Unplaceable, now: float) -> None:
        """Go over to a new placement. Without one what runs goes on, and what doesn't waits."""
        self.move = None
        if self.next is not None:
            if isinstance(placed, Placement) and epochs.same_layout(self.next.record, placed):
                return
            self._drop_next()
        if isinstance(placed, Unplaceable):
            self.reason = placed.reason
            self._note(now, f"not placed: {placed.reason}")
            return
        stages = tuple(StageRecord(stage.peer, stage.layers) for stage in placed.stages)
        old = self.formation
        if old is not None and epochs.layout(old.record.stages) == epochs.layout(stages):
            self.reason = "" if self.ready else self.reason
        elif old is not None and old.state == "ready":
            self._prepare(old, stages, now)
        else:
            self._begin(stages, now)

    def _prepare(self, old: Formation, stages: tuple[StageRecord, ...], now: float) -> None:
        """Have the files fetched first; :meth:`_move_on` goes on once they are there."""
        self.reason = "" if self.ready else self.reason
        self.move = Move(self.commons.new_move(), old.record, stages, now, self.desired.facts)
        self.phases.begin("another placement", now)
        names = ", ".join(self.registry.name(peer) for peer in self.move.lacking)
        self._note(now, f"the next epoch waits for files: {names or 'all are there'}")
        for peer in self.move.lacking:
            self._send(peer, instructions.prefetch(self.move, peer, self.desired, self.registry))

    def _form(self, formation: Formation, now: float) -> None:
        """All have loaded: tell them to form the ring."""
        loaded = [formation.loaded[stage] for stage in range(len(formation.record.stages))]
        blocks, least = min((said.max_blocks, stage) for stage, said in enumerate(loaded))
        peer, serving = formation.peers[least], self.formation
        shared = serving is not None and serving is not formation and peer in serving.peers
        if blocks < 1 and not shared:
            reason = f"{self.registry.name(peer)} has no memory left for KV"
            self._fail(formation, reason, peer, now)
            return
        record = epochs.formed(formation.record, loaded, blocks, self.desired.micro_batches)
        if serving is not None and shared and record.tokens < serving.record.tokens:
            self._go_over_in_place(f"{self.registry.name(peer)} has less room for KV", now)
            return
        formation.linking(record, now)
        self.phases.reach("loaded", now)
        epoch = epoch_text(record.epoch)
        self._note(now, f"form epoch {epoch}: {blocks} blocks, K = {record.micro_batches}")
        if formation is self.formation:
            self._sign(now)
            self.reason = "forming the ring"
            self.commons.decide(Commit(record))
        self._form_ring(formation)

    def _half_told(self, formation: Formation) -> bool:
        """Whether the coordinator before this one ended before all had heard of their ring."""
        adopting = formation.state == "adopting" and not formation.all_ready
        return adopting and all(map(self.registry.live, formation.peers))

    def _form_ring(self, formation: Formation) -> None:
        for stage in range(len(formation.record.stages)):
            self._instruct(formation, stage)

    # --- who gets no stage -------------------------------------------------------------------

    def notices(self) -> dict[str, str]:
        """What to tell the people at PCs that get no stage about what they can do."""
        texts = {
            peer: self._misfit(peer)
            for peer in self.registry.sessions
            if self.planner.may_use(peer)
        }
        for peer, found in self.planner.unreachable.items():
            text = self.left_out(peer)
            for told in (peer, found.to):
                if told in texts:
                    texts[told] = texts[told] or text
        return texts

    def left_out(self, peer: str) -> str:
        """Why a peer has no stage though it offers to run one; empty if that is not so."""
        if not self.registry.live(peer):
            return ""
        if self.formation is not None and peer in self.formation.peers:
            return ""
        why = self._misfit(peer)
        if why:
            return f"left out: {why}"
        found = self.planner.unreachable.get(peer)
        if found is not None and self.registry.live(found.by) and self.registry.live(found.to):
            return closed(found, self.registry)
        why = self.planner.backoff.explain(peer, self.commons.clock, self.formation is not None)
        return why or (NOT_NEEDED if self.ready and peer in self.planner.spares else "")

    def _misfit(self, peer: str) -> str:
        """Why the layers that a peer has named can't be of the model; empty if they can."""
        stage = self.registry.sessions[peer].report.stage
        why = misfit(stage, self.desired.facts)
        return f"--stage {stage} {why}" if why else ""
