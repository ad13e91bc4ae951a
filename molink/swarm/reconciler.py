"""Makes what is (peers, stages) what it should be (a model served by one ready pipeline).

A plain object: events and ``now`` (monotonic seconds) in, decisions out, to be carried out in
their order; an epoch is thus committed before it is announced. Each event ends with the same two
steps: :meth:`Reconciler._advance` moves the formation on, :meth:`Reconciler._publish` tells every
peer what it doesn't know yet.
"""

import logging
from collections import deque
from collections.abc import Iterable

from molink.swarm import epochs, instructions
from molink.swarm.events import (
    Commit,
    Decision,
    Departed,
    Event,
    MemberAdded,
    MemberRemoved,
    Reported,
    SendMessage,
    Serve,
    StageSaid,
    Tick,
)
from molink.swarm.formation import Formation
from molink.swarm.move import RETRY, Move
from molink.swarm.placement import Candidate, Placement, Unplaceable
from molink.swarm.planner import LOSS_DEBOUNCE, Planner
from molink.swarm.records import Desired, MemberRecord, PipelineRecord, StageRecord
from molink.swarm.registry import Registry
from molink.wire.messages.control import Instruction, PeerReport, StageFailed, StageLoaded, Unassign

log = logging.getLogger(__name__)

#: Ticks further apart than this, in seconds, say that this process (or PC) stood still.
STANDSTILL = 2.0
#: Transitions that are kept: those of a bad hour.
STORY_LENGTH = 200
WAITING = "waiting for peers"
JUST_ASKED = "the model was just asked for"
NO_MODEL = "no model was asked for: add `--model` to `molink up`, or to the first `molink join`"


class Reconciler:
    """The control plane's decisions about one model and its one pipeline."""

    def __init__(
        self,
        swarm: str,
        members: Iterable[MemberRecord],
        now: float,
        *,
        desired: Desired | None = None,
        pipeline: PipelineRecord | None = None,
        last: tuple[int, int] = (0, 0),
    ) -> None:
        """``desired``, ``pipeline`` and ``last`` (pipeline number, epoch) as the state has them."""
        self.registry = Registry(swarm, members)
        self.planner = Planner(now, restored=pipeline is not None)
        self.desired = desired
        #: The current epoch, if it is being formed or ready.
        self.formation: Formation | None = None
        #: Where a pipeline that serves goes once the files are there.
        self.move: Move | None = None
        self._moves = 0
        #: Why no pipeline is ready, or why a change was not followed; for a person.
        self.reason = NO_MODEL if desired is None else WAITING
        #: The newest epoch, whether it stands or not; it never falls, from one pipeline to another.
        number, self.epoch = last
        #: Id of the pipeline, whether it stands or not: ``p1``, ``p2`` …
        self.pipeline = pipeline.id if pipeline else f"p{number + 1}"
        self._ticked = now
        self._story: deque[str] = deque(maxlen=STORY_LENGTH)
        self._out: list[Decision] = []
        if desired is not None and pipeline is not None and pipeline.formed:
            formation = Formation(pipeline, "adopting", now)
            if all(peer in self.registry.members for peer in formation.peers):
                self.formation = formation
                self.reason = "this coordinator was just started: waiting for its peers' reports"

    # --- events ------------------------------------------------------------------------------

    def handle(self, event: Event, now: float) -> list[Decision]:
        """Take an event; returns what to do, in order."""
        match event:
            case MemberAdded():
                self.registry.add(event.member)
                self._note(now, f"{event.member.name} ({event.member.peer}) is a member")
            case MemberRemoved():
                self._removed(event.peer, event.why, now)
            case Departed():
                if self.registry.live(event.peer):
                    self.planner.backoff.forget(event.peer)
                    self._lost(event.peer, "has stopped", now)
            case Reported():
                self._reported(event, now)
            case StageSaid():
                self._stage_said(event, now)
            case Serve():
                self._serve(event.desired, now)
            case Tick():
                if now - self._ticked > STANDSTILL:
                    self.registry.forgive(now - self._ticked)
                self._ticked = now
                for peer in self.registry.silent(now):
                    self._lost(peer, "has not reported any more", now)
        self._advance(now)
        self._publish()
        decisions, self._out = self._out, []
        return decisions

    @property
    def story(self) -> tuple[str, ...]:
        """The last transitions, oldest first."""
        return tuple(self._story)

    @property
    def ready(self) -> bool:
        """Whether the pipeline can serve."""
        return self.formation is not None and self.formation.state == "ready"

    def _removed(self, peer: str, why: str, now: float) -> None:
        if peer not in self.registry.members:
            return
        name = self.registry.name(peer)
        self._note(now, f"{name} ({peer}) {why}")
        self._out += self.registry.remove(peer)
        self.planner.backoff.forget(peer)
        if self.formation is not None and peer in self.formation.peers:
            self._break(f"{name} {why}", None, now)
        self._stay_without(peer, now)

    def _lost(self, peer: str, why: str, now: float) -> None:
        name = self.registry.name(peer)
        self._note(now, f"{name} ({peer}) {why}")
        self.registry.drop(peer)
        if self.formation is not None and peer in self.formation.peers:
            self._break(f"{name} {why}", None, now)
        self._stay_without(peer, now)

    def _reported(self, event: Reported, now: float) -> None:
        peer = event.peer
        if peer not in self.registry.members:
            return
        if not self.registry.live(peer):
            self._note(now, f"{event.report.name} ({peer}) is there")
        self._out += self.registry.report(peer, event.report, event.fresh, now)
        self._out += self.registry.publish_members()  # whom an instruction may name
        formation = self.formation
        stage = formation.stage_of(peer) if formation is not None else None
        self._prefetched(event, now)
        self._stop_strays(peer, event.report, stage)
        if formation is None or stage is None:
            return
        failure = formation.observe(peer, event.report, now)
        if failure is not None:
            blamed = None if formation.state == "adopting" else peer
            self._break(f"{self.registry.name(peer)}: {failure}", blamed, now)
        elif event.fresh or formation.unaware(stage, now):
            self._instruct(formation, stage)

    def _prefetched(self, event: Reported, now: float) -> None:
        move, peer, said = self.move, event.peer, event.report.prefetched
        if move is None or self.desired is None:
            return
        failure = move.observe(peer, said)
        if failure is not None:
            self._note(now, f"{self.registry.name(peer)} can't get its files: {failure}")
            serves = self.formation is not None and peer in self.formation.peers
            if not serves:
                self.planner.backoff.failed(peer, failure, now)
            self._stay(now, RETRY if serves else LOSS_DEBOUNCE)
        elif move.unaware(peer, said, now) or (event.fresh and peer in move.lacking):
            self._send(peer, instructions.prefetch(move, peer, self.desired, self.registry))

    def _stay_without(self, peer: str, now: float) -> None:
        if self.move is not None and peer in self.move.peers:
            self._stay(now)

    def _stay(self, now: float, pause: float = LOSS_DEBOUNCE) -> None:
        """Give up a move; what serves was never touched. Look again after a pause."""
        self.move = None
        self.planner.again(self._candidates(now), now, pause)

    def _stop_strays(self, peer: str, report: PeerReport, stage: int | None) -> None:
        """End workers that no pipeline needs; while none is formed their weights may be of use."""
        for worker in report.workers:
            ours = worker.pipeline == self.pipeline
            if not (ours and (stage is not None or self.formation is None)):
                self._send(peer, Unassign(pipeline=worker.pipeline))

    def _stage_said(self, event: StageSaid, now: float) -> None:
        formation, message = self.formation, event.message
        known = formation is not None and self.registry.live(event.peer)
        if formation is None or not known or not formation.concerns(event.peer, message):
            return
        if isinstance(message, StageFailed):
            peer, reason = epochs.blame(formation, message, self.registry)
            self._break(reason, peer, now)
        elif isinstance(message, StageLoaded):
            if formation.state == "loading":
                formation.loaded[message.stage] = message
                self._note(now, f"stage {message.stage} of epoch {message.epoch} has loaded")
        elif formation.state != "loading":
            formation.ready.add(message.stage)

    def _serve(self, desired: Desired, now: float) -> None:
        old, self.desired = self.desired, desired
        if old is not None and epochs.content(old) == epochs.content(desired):
            if self.formation is None:
                self.planner.again(self._candidates(now), now)  # ``min_peers`` may be another
            return
        self._note(now, f"serve {desired.facts.name} as {desired.dtype}, {desired.mode}")
        if old is not None and old.weights != desired.weights:
            self._abolish()
        self._break(JUST_ASKED, None, now)

    def _abolish(self) -> None:
        """End the pipeline; the next one has a new name, so that no worker is taken over."""
        for peer in self.formation.peers if self.formation is not None else ():
            self._send(peer, Unassign(pipeline=self.pipeline))
        self._out += self.registry.end_route(self.pipeline)
        self.pipeline = f"p{int(self.pipeline.removeprefix('p')) + 1}"
        self.planner.restart()

    def _break(self, reason: str, blamed: str | None, now: float) -> None:
        """What was formed, or being formed, can't go on."""
        self._note(now, f"not ready: {reason}")
        if blamed is not None:
            delay = self.planner.backoff.failed(blamed, reason, now)
            if delay:
                self._note(now, f"{self.registry.name(blamed)} is left out for {delay:.0f} s")
        self.reason = reason
        self.formation = self.move = None
        self.planner.again(self._candidates(now), now)

    # --- what follows ------------------------------------------------------------------------

    def _advance(self, now: float) -> None:
        if self.desired is None:
            return
        self._check_late(now)
        if self.formation is None or self.formation.state != "adopting":
            candidates = self._candidates(now)
            if self.planner.due(candidates, now):
                placed = self.planner.place(self.desired, candidates, self.registry, now)
                self._follow(placed, now)
        self._move_on(now)

    def _check_late(self, now: float) -> None:
        formation = self.formation
        late = formation.overdue(now) if formation is not None else None
        if formation is None or late is None:
            return
        peer = formation.peers[late[0]]
        adopting = formation.state == "adopting"
        # Part of the pipeline is there, so this is no first placement.
        self.planner.placed |= adopting and bool(formation.ready)
        self._break(f"{self.registry.name(peer)} {late[1]}", None if adopting else peer, now)

    def _move_on(self, now: float) -> None:
        """Take the formation to its next state if all stages are there, or to the next one."""
        if self.move is not None and not self.move.lacking:
            self._begin(self.move.stages, now, fetched=True)
        formation = self.formation
        if formation is None:
            return
        if formation.state == "loading" and formation.all_loaded:
            self._form(formation, now)
        elif formation.state in ("linking", "adopting") and formation.all_ready:
            if formation.state == "adopting":
                kept = [one for one in self._candidates(now) if one.peer in formation.peers]
                self.planner.settle(tuple(kept))  # the others may have been about to join in
                self.planner.placed = True
            formation.state = "ready"
            self.reason = ""
            self._note(now, f"epoch {formation.record.epoch} is ready")

    def _follow(self, placed: Placement | Unplaceable, now: float) -> None:
        """Go over to a new placement. Without one what runs goes on, and what doesn't waits."""
        self.move = None
        if isinstance(placed, Unplaceable):
            self.reason = placed.reason
            self._note(now, f"not placed: {placed.reason}")
            return
        stages = tuple(StageRecord(stage.peer, stage.layers) for stage in placed.stages)
        old = self.formation
        if old is not None and epochs.layout(old.record.stages) == epochs.layout(stages):
            self.reason = "" if self.ready else self.reason
        elif old is not None and old.worth_keeping:
            self._prepare(old, stages, now)
        else:
            self._begin(stages, now)

    def _prepare(self, old: Formation, stages: tuple[StageRecord, ...], now: float) -> None:
        """Have the files fetched first; :meth:`_move_on` goes on once they are there."""
        assert self.desired is not None
        self.reason = "" if self.ready else self.reason
        self._moves += 1
        self.move = Move(self._moves, old.record, stages, now)
        names = ", ".join(self.registry.name(peer) for peer in self.move.lacking)
        self._note(now, f"the next epoch waits for files: {names or 'all are there'}")
        for peer in self.move.lacking:
            self._send(peer, instructions.prefetch(self.move, peer, self.desired, self.registry))

    def _begin(self, stages: tuple[StageRecord, ...], now: float, *, fetched: bool = False) -> None:
        """Commit a placement as a new epoch and hand out its stages."""
        self.move = None
        assert self.desired is not None
        old = self.formation
        self.epoch += 1
        record = PipelineRecord(
            self.pipeline,
            self.desired.facts.name,
            self.epoch,
            stages,
            block_size=epochs.block_size(stages, self.desired, self.registry),
        )
        self.formation = Formation(record, "loading", now, fetched=fetched)
        self.reason = "loading the model"
        layout = ", ".join(
            f"{self.registry.name(stage.peer)} {stage.layers[0]}:{stage.layers[1]}"
            for stage in stages
        )
        self._note(now, f"epoch {record.epoch}: {layout}")
        self._out.append(Commit(record))
        for peer in old.peers if old is not None else ():
            if peer not in self.formation.peers:
                self._send(peer, Unassign(pipeline=record.id))
        for stage in range(len(stages)):
            self._instruct(self.formation, stage)

    def _form(self, formation: Formation, now: float) -> None:
        """All have loaded: tell them to form the ring."""
        assert self.desired is not None
        record = formation.record
        loaded = [formation.loaded[stage] for stage in range(len(record.stages))]
        blocks = min(message.max_blocks for message in loaded)
        if blocks < 1:
            peer = formation.peers[[message.max_blocks for message in loaded].index(blocks)]
            self._break(f"{self.registry.name(peer)} has no memory left for KV", peer, now)
            return
        record = epochs.formed(record, loaded, blocks, self.desired.micro_batches)
        formation.linking(record, now)
        self.reason = "forming the ring"
        self._note(now, f"form epoch {record.epoch}: {blocks} blocks, K = {record.micro_batches}")
        self._out.append(Commit(record))
        for stage in range(len(record.stages)):
            self._instruct(formation, stage)

    def _instruct(self, formation: Formation, stage: int) -> None:
        """Tell a stage's peer what it should be doing in this epoch."""
        assert self.desired is not None
        for known in instructions.profiles(formation, stage):
            self._send(formation.peers[stage], known)
        message = instructions.instruction(formation, stage, self.desired, self.registry)
        if message is not None:
            self._send(formation.peers[stage], message)

    def _publish(self) -> None:
        """Tell every peer that is there what it doesn't know yet."""
        self._out += self.registry.publish_members()
        formation = self.formation
        if self.desired is None or (formation is not None and formation.state == "adopting"):
            return  # what the peers know of a running pipeline stays true meanwhile
        ready = formation.record if formation is not None and self.ready else None
        route = instructions.route(
            self.pipeline, self.epoch, ready, self.desired, self.registry, self._hindrance
        )
        self._out += self.registry.publish_route(route)

    @property
    def _hindrance(self) -> str:
        """Why nothing is being formed; empty if something is, or is about to be."""
        passing = self.formation is not None or self.reason in (WAITING, JUST_ASKED)
        return "" if passing else self.reason

    def left_out(self, peer: str) -> str:
        """Why a peer that failed has no stage, for a person; empty if that is not why."""
        if self.desired is None or not self.registry.live(peer):
            return ""
        if self.formation is not None and peer in self.formation.peers:
            return ""
        return self.planner.backoff.explain(peer, self._ticked, self.formation is not None)

    # --- small things ------------------------------------------------------------------------

    def _candidates(self, now: float) -> tuple[Candidate, ...]:
        return self.planner.candidates(self.registry, self.formation, now)

    def _send(self, peer: str, message: Instruction) -> None:
        if self.registry.live(peer):
            self._out.append(SendMessage(peer, message))

    def _note(self, now: float, text: str) -> None:
        self._story.append(f"{now:.1f} {text}")
        log.info("%s", text)
