"""The pipelines of one deployment, and what peers are told of them.

One serves, or is to. Another may be made beside it, to take over once it is ready, and the one
before may still have its last moments. What becomes of them the reconciler decides.
"""

from collections.abc import Iterator

from molink.swarm.controller import epochs, instructions
from molink.swarm.controller.commons import Commons
from molink.swarm.controller.events import Commit, Reserve
from molink.swarm.controller.formation import Formation
from molink.swarm.controller.move import Move
from molink.swarm.controller.planner import Planner
from molink.swarm.controller.records import Desired, PipelineRecord, StageRecord
from molink.swarm.phases import Phases
from molink.swarm.placement.placement import Candidate
from molink.swarm.terms import epoch_text
from molink.wire.messages.instructions import Instruction, Unassign

#: Daemons have this long, in seconds, to connect to the next pipeline's head before the one that
#: served ends.
RETIREMENT = 1.0
WAITING = "waiting for peers"
JUST_ASKED = "the model was just asked for"


class Pipelines:
    """The state of one deployment: a model's pipeline, and the steps that change it."""

    def __init__(
        self,
        commons: Commons,
        now: float,
        desired: Desired,
        replica: int,
        pipeline: PipelineRecord | None,
    ) -> None:
        self.commons = commons
        self.registry = commons.registry
        self.planner = Planner(
            now, commons.backoff, commons.reach, commons.links.copy(), restored=pipeline is not None
        )
        self.desired = desired
        #: Which of the model's deployments this is, from 0 on.
        self.replica = replica
        #: What the story calls it; empty where it is the only one.
        self.label = ""
        #: Pipelines of the other deployments of the same model.
        self.others: tuple[str, ...] = ()
        #: The current epoch, if it is being formed or ready.
        self.formation: Formation | None = None
        #: Where a pipeline that serves goes once the files are there.
        self.move: Move | None = None
        #: What is being formed beside a pipeline that serves; it takes over once it is ready.
        self.next: Formation | None = None
        #: A pipeline that ends once its streams can go to the one that took over, and when it does.
        self.retiring: tuple[Formation, float] | None = None
        #: Why no pipeline is ready, or why a change was not followed; for a person.
        self.reason = WAITING
        #: Whether stages were handed out for what is wanted now.
        self.begun = False
        #: Its newest epoch, whether it stands or not.
        self.epoch = commons.epoch
        #: Id of the pipeline, whether it stands or not: ``p1``, ``p2`` …
        self.pipeline = pipeline.id if pipeline else commons.new_name()
        #: Rises as long as what is being formed gets on; when it last did.
        self._signs = 0
        self._sign_at = now
        #: What the last change's phases took.
        self.phases = Phases()

    @property
    def key(self) -> tuple[str, int]:
        """The model's name, and which of its deployments this is."""
        return self.desired.facts.name, self.replica

    @property
    def ready(self) -> bool:
        """Whether the pipeline can serve."""
        return self.formation is not None and self.formation.state == "ready"

    @property
    def adopting(self) -> bool:
        """Whether it was committed before this coordinator began, and may still serve."""
        return self.formation is not None and self.formation.state == "adopting"

    @property
    def used(self) -> frozenset[str]:
        """Peers that have, or are about to have, a worker of one of its pipelines."""
        retiring = self.retiring[0].peers if self.retiring is not None else ()
        planned = self.move.peers if self.move is not None else ()
        formed = [peer for one in self._formations() for peer in one.peers]
        return frozenset((*formed, *retiring, *planned))

    # --- the one that serves -----------------------------------------------------------------

    def _begin(self, stages: tuple[StageRecord, ...], now: float) -> None:
        """Commit a placement as a new epoch and hand out its stages."""
        old = self.formation
        formation = self.formation = self._new_epoch(self.pipeline, stages, now)
        self.begun = True
        self._sign(now)
        self.reason = "loading the model"
        self.commons.decide(Commit(formation.record))
        for peer in old.peers if old is not None else ():
            if peer not in formation.peers:
                self._send(peer, Unassign(pipeline=self.pipeline))
        for stage in range(len(stages)):
            self._instruct(formation, stage)

    def _new_epoch(self, pipeline: str, stages: tuple[StageRecord, ...], now: float) -> Formation:
        self.move = None
        self.epoch = self.commons.new_epoch()
        size = epochs.block_size(stages, self.desired, self.registry)
        record = PipelineRecord(
            pipeline,
            self.desired.facts.name,
            self.epoch,
            stages,
            block_size=size,
            replica=self.replica,
        )
        layout = ", ".join(
            f"{self.registry.name(stage.peer)} {stage.layers[0]}:{stage.layers[1]}"
            for stage in stages
        )
        self._note(now, f"epoch {epoch_text(record.epoch)}: {layout}")
        self.phases.reach("decided", now)
        return Formation(record, "loading", now, self.desired.facts)

    def _finish(self, formation: Formation, now: float) -> None:
        """The ring stands if all stages are in it."""
        if formation.state in ("linking", "adopting") and formation.all_ready:
            if formation.state == "adopting":
                kept = [one for one in self._candidates(now) if one.peer in formation.peers]
                self.planner.settle(tuple(kept))  # the others may have been about to join in
                self.planner.placed = True
            formation.state = "ready"
            if self.desired is not None:
                self.planner.formed(formation.record, self.desired, self.registry)
            self.phases.reach("formed", now)
            self.reason = ""
            self._note(now, f"epoch {epoch_text(formation.record.epoch)} is ready")

    def _sign(self, now: float) -> None:
        """What is being formed gets on, or may still do so: it isn't late."""
        self._signs, self._sign_at = self._signs + 1, now

    # --- the one beside it -------------------------------------------------------------------

    def _begin_beside(self, stages: tuple[StageRecord, ...], now: float) -> None:
        """Hand out the stages of a pipeline of its own; what serves goes on meanwhile."""
        formation = self.next = self._new_epoch(self.commons.new_name(), stages, now)
        self.commons.decide(Reserve(formation.record.id, self.epoch))
        for stage in range(len(stages)):
            self._instruct(formation, stage)

    def _take_over(self, new: Formation, now: float) -> None:
        """It is ready: requests go there from now on, those under way in a moment."""
        assert self.formation is not None
        self._retire(float("inf"))
        self.retiring = (self.formation, now + RETIREMENT)
        self._promoted(new)
        self.commons.decide(Commit(new.record))
        self._finish(new, now)

    def _promote(self, old: Formation, now: float) -> None:
        """What served is broken, and what was made beside it isn't: go on with that."""
        assert self.next is not None
        self._note(now, f"epoch {epoch_text(self.next.record.epoch)} goes on in its place")
        self.commons.decide(*self.registry.end_route(self.pipeline))
        self._unassign(old)
        self.commons.decide(Commit(self.next.record))
        self._promoted(self.next)
        self.reason = "loading the model"
        self._sign(now)

    def _promoted(self, new: Formation) -> None:
        self.formation, self.next, self.pipeline = new, None, new.record.id

    def _go_over_in_place(self, reason: str, now: float) -> None:
        """A device has no room for two stages: the one that serves makes room."""
        assert self.next is not None
        self._note(now, f"not beside what serves: {reason}")
        stages = tuple(StageRecord(one.peer, one.layers) for one in self.next.record.stages)
        self._drop_next()
        self._begin(stages, now)

    def _drop_next(self) -> None:
        """Give up what was made beside a pipeline that serves."""
        dropped, self.next = self.next, None
        if dropped is not None:
            self._unassign(dropped)

    def _retire(self, now: float) -> None:
        """End the pipeline whose streams have had their time to move."""
        if self.retiring is None or now < self.retiring[1]:
            return
        old, self.retiring = self.retiring[0], None
        self.commons.decide(*self.registry.end_route(old.record.id))
        self._unassign(old)

    # --- none ---------------------------------------------------------------------------------

    def dissolve(self) -> None:
        """End all that there is: the memory of its stages is free."""
        self._drop_next()
        self._retire(float("inf"))
        if self.formation is not None:
            self._unassign(self.formation)
        self.commons.decide(*self.registry.end_route(self.pipeline))

    def _abolish(self) -> None:
        """End the pipeline; the next one has a new name, so that no worker is taken over."""
        self.dissolve()
        self.pipeline = self.commons.new_name()
        self.planner.restart()

    # --- what peers are told -----------------------------------------------------------------

    def _instruct(self, formation: Formation, stage: int) -> None:
        """Tell a stage's peer what it should be doing in this epoch."""
        for known in instructions.profiles(formation, stage):
            self._send(formation.peers[stage], known)
        message = instructions.instruction(formation, stage, self.desired, self.registry)
        if message is not None:
            self._send(formation.peers[stage], message)

    def publish(self) -> None:
        """Tell every peer that is there where requests go, if it doesn't know yet."""
        formation = self.formation
        if self.adopting:
            return  # what the peers know of a running pipeline stays true meanwhile
        ready = formation.record if formation is not None and self.ready else None
        route = instructions.route(
            self.pipeline,
            self.epoch if formation is None else formation.record.epoch,
            ready,
            self.desired,
            self.registry,
            reason=self._hindrance,
            forming=self._signs if formation is not None and formation.forming else 0,
            beside=self.others,
        )
        self.commons.decide(*self.registry.publish_route(route))

    @property
    def _hindrance(self) -> str:
        """Why nothing is being formed; empty if something is, or is about to be."""
        passing = self.formation is not None or self.reason in (WAITING, JUST_ASKED)
        return "" if passing else self.reason

    def _unassign(self, formation: Formation) -> None:
        for peer in formation.peers:
            self._send(peer, Unassign(pipeline=formation.record.id))

    def _send(self, peer: str, message: Instruction) -> None:
        self.commons.send(peer, message)

    # --- small things ------------------------------------------------------------------------

    def _formations(self) -> Iterator[Formation]:
        """What serves or is to, then what is made beside it; if that is still there by then."""
        if self.formation is not None:
            yield self.formation
        if self.next is not None:
            yield self.next

    def _candidates(self, now: float) -> tuple[Candidate, ...]:
        return self.planner.candidates(self.registry, self.formation, now)

    def _note(self, now: float, text: str) -> None:
        self.commons.note(now, f"{self.label}: {text}" if self.label else text)
