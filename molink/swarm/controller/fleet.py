"""Makes what is (peers, stages) what it should be: all models served, each by its pipelines.

A plain object: events and ``now`` (monotonic seconds) in, decisions out, to be carried out in
their order. It knows who is there; :mod:`molink.swarm.placement.allotment` says which peers are for
which deployment, and a :class:`~molink.swarm.controller.reconciler.Reconciler` for each sees to its
one pipeline. Each event ends with the same steps: what is due is done, and every peer is told what
it doesn't know yet.
"""

from collections.abc import Iterable, Sequence

from molink.swarm.controller import epochs
from molink.swarm.controller.commons import Commons
from molink.swarm.controller.events import (
    Decision,
    Departed,
    Disconnected,
    Event,
    MemberAdded,
    MemberRemoved,
    Rebalanced,
    Reported,
    Serve,
    StageSaid,
    TermRaised,
    Tick,
    Tried,
)
from molink.swarm.controller.reconciler import Reconciler
from molink.swarm.controller.records import Desired, MemberRecord, PipelineRecord
from molink.swarm.controller.registry import PeerSession, Registry
from molink.swarm.controller.shares import Shares, called
from molink.swarm.placement.allotment import Key
from molink.swarm.placement.links import Links
from molink.swarm.running_time import RunningTime
from molink.wire.messages.instructions import Unassign

STOPPED = "no model is served since `molink stop`; `molink run MODEL` has one served"
NO_MODEL = "no model was asked for: add `--model` to `molink up`, or to the first `molink join`"


class Fleet:
    """The control plane's decisions about all models of a swarm."""

    def __init__(
        self,
        swarm: str,
        members: Iterable[MemberRecord],
        now: float,
        *,
        models: Sequence[Desired] = (),
        pipelines: Iterable[PipelineRecord] = (),
        last: tuple[int, int] = (0, 0),
        term: int = 0,
        lost: str = "",
    ) -> None:
        """``models``, ``pipelines`` and ``last`` (pipeline number, epoch) as the state has them.

        ``term`` is that of the coordinator; ``lost`` is a peer that is known not to be there.
        """
        self.commons = Commons(swarm, members, now, last, term)
        self._running = RunningTime(now)
        self._models = tuple(models)
        self._deployments: dict[Key, Reconciler] = {}
        self._shares = Shares(self.commons)
        #: Whether somebody has come since the peers were last shared out.
        self._arrived = False
        #: Why nothing is served, for a person; of no meaning while something is to be.
        self._nothing = NO_MODEL
        records = {(one.model, one.replica): one for one in pipelines}
        for key, desired in _wanted(models).items():
            self._deployments[key] = Reconciler(
                self.commons, now, desired, key[1], records.get(key), lost=lost
            )
        self._allot(now)

    # --- what there is -----------------------------------------------------------------------

    @property
    def registry(self) -> Registry:
        """Who is a member, and who is there."""
        return self.commons.registry

    @property
    def story(self) -> tuple[str, ...]:
        """The last transitions, oldest first."""
        return self.commons.story

    @property
    def clock(self) -> float:
        """The time of the last tick, in seconds, by which the story is told."""
        return self.commons.clock

    @property
    def models(self) -> tuple[Desired, ...]:
        """What is to be served."""
        return self._models

    @property
    def deployments(self) -> tuple[Reconciler, ...]:
        """All, in the order of :attr:`models`."""
        return tuple(self._deployments.values())

    @property
    def reason(self) -> str:
        """Why something isn't served, or why a change was not followed; for a person."""
        if not self._deployments:
            return self._nothing
        reasons = {one.label: one.reason for one in self.deployments if one.reason}
        return "; ".join(f"{label}: {why}" if label else why for label, why in reasons.items())

    def left_out(self, peer: str) -> str:
        """Why a peer has no stage though it offers to run one; empty if that is not so."""
        if any(
            one.formation is not None and peer in one.formation.peers for one in self.deployments
        ):
            return ""
        texts = (one.left_out(peer) for one in self.deployments if one.planner.may_use(peer))
        return next(filter(None, texts), "")

    # --- events ------------------------------------------------------------------------------

    def handle(self, event: Event, now: float) -> list[Decision]:
        """Take an event; returns what to do, in order.

        A :class:`Tick` is to come several times a second: time without any is nobody's silence.
        """
        now = self._running.at(now)
        match event:
            case MemberAdded() | MemberRemoved() | Departed() | Disconnected():
                self._came_or_went(event, now)
            case Reported():
                self._reported(event, now)
            case Tried():
                self._tried(event)
            case StageSaid():
                for one in self.deployments:
                    one.stage_said(event, now)
            case Serve():
                self._serve(event.models, now)
            case Rebalanced() | TermRaised():
                self._tell_all(event, now)
            case Tick(behind):
                self.commons.clock = now
                self.registry.heard(behind)
                self._lose(self.registry.silent(now), "has not reported any more", now)
        self._lose(self.registry.cut_off(now, self._doubted), "is not connected any more", now)
        if self._arrived or not isinstance(event, Reported | Tried | StageSaid):
            self._allot(now)
        self._follow(now)
        return self.commons.take()

    def _tell_all(self, event: Rebalanced | TermRaised, now: float) -> None:
        """What is so for all deployments."""
        if isinstance(event, TermRaised):
            self.commons.term = event.term
            for one in self.deployments:
                one.term_raised(now)
            return
        self._note(now, "all is placed anew, as asked for")
        for one in self.deployments:
            one.rebalance(now)

    def _came_or_went(
        self, event: MemberAdded | MemberRemoved | Departed | Disconnected, now: float
    ) -> None:
        match event:
            case MemberAdded(member):
                self.registry.add(member)
                self._note(now, f"{member.name} ({member.peer}) is a member")
            case MemberRemoved(peer, why):
                self._removed(peer, why, now)
            case Departed(peer):
                if self.registry.live(peer):
                    self.commons.backoff.forget(peer)
                    self._lost(peer, "has stopped", now)
            case Disconnected(peer):
                self.registry.disconnected(peer, now)

    def _follow(self, now: float) -> None:
        """Do what is due, and tell everybody."""
        for one in self.deployments:
            one.advance(now)
        self._roll(now)
        self._notify(now)
        self.commons.decide(*self.registry.publish_members())
        for one in self.deployments:
            one.others = tuple(
                other.pipeline
                for other in self.deployments
                if other is not one and other.key[0] == one.key[0]
            )
            one.publish()

    def _note(self, now: float, text: str) -> None:
        self.commons.note(now, text)

    # --- peers -------------------------------------------------------------------------------

    def _doubted(self, peer: str, session: PeerSession) -> bool:
        return any(one.planner.doubted(peer, session) for one in self.deployments)

    def _tried(self, event: Tried) -> None:
        """What was tried of a PC that is off says nothing of its ports."""
        if not (self.registry.live(event.by) and self.registry.live(event.to)):
            return
        self.commons.reach.tried(event.by, event.to, event.ok)
        for links in self._links():
            links.measured(event.by, event.to, event.latency, event.rate)

    def _links(self) -> tuple[Links, ...]:
        """What is known of the ways between peers: each deployment has its own."""
        return (self.commons.links, *(one.planner.links for one in self.deployments))

    def _removed(self, peer: str, why: str, now: float) -> None:
        if peer not in self.registry.members:
            return
        name = self.registry.name(peer)
        self._note(now, f"{name} ({peer}) {why}")
        self.commons.decide(*self.registry.remove(peer))
        self.commons.backoff.forget(peer)
        for one in self.deployments:
            one.gone(peer, f"{name} {why}", now)

    def _lose(self, peers: list[str], why: str, now: float) -> None:
        """They are gone at once: nothing goes on with one of them for the loss of another."""
        peers = [*peers, *(self.registry.lost_with(peers, now) if peers else ())]
        for peer in peers:
            self.registry.drop(peer)
        for peer in peers:
            self._lost(peer, why, now)

    def _lost(self, peer: str, why: str, now: float) -> None:
        name = self.registry.name(peer)
        self._note(now, f"{name} ({peer}) {why}")
        self.registry.drop(peer)
        self.commons.backoff.lost(peer, now)
        self.commons.reach.forget(peer)
        self.commons.links.forget(peer)
        for one in self.deployments:
            one.planner.lost(peer)
            one.gone(peer, f"{name} {why}", now)

    def _reported(self, event: Reported, now: float) -> None:
        peer = event.peer
        if peer not in self.registry.members:
            return
        if not self.registry.live(peer):
            self._note(now, f"{event.report.name} ({peer}) is there")
            self._arrived = True
        elif self.registry.sessions[peer].report.daemon_pid != event.report.daemon_pid:
            self._lost(peer, "was started anew", now)
        self.commons.decide(*self.registry.report(peer, event.report, event.fresh, now))
        for links in self._links():
            links.located(peer, event.report.pc)
        # First whom an instruction may name.
        self.commons.decide(*self.registry.publish_members())
        for one in self.deployments:
            one.prefetched(event, now)
        needed = set[str]().union(*(one.needed(peer) for one in self.deployments))
        for worker in event.report.workers:
            if worker.pipeline not in needed:
                self.commons.send(peer, Unassign(pipeline=worker.pipeline))
        for one in self.deployments:
            one.reported(event, now)
        known = {one.pipeline for one in self.deployments}
        if not any(one.adopting for one in self.deployments):
            self.commons.decide(*self.registry.end_stale_routes(peer, known))

    def _notify(self, now: float) -> None:
        """Tell the people at PCs that get no stage what they can do about it, once."""
        if not self._deployments:
            return
        texts = dict.fromkeys(self.registry.sessions, "")
        for one in self.deployments:
            for peer, text in one.notices().items():
                texts[peer] = texts[peer] or text
        for peer, text in texts.items():
            news = self.registry.notify(peer, text)
            if news and text:
                self._note(now, f"{self.registry.name(peer)} is told: {text}")
            self.commons.decide(*news)

    # --- models ------------------------------------------------------------------------------

    def _serve(self, models: tuple[Desired, ...], now: float) -> None:
        self._models = models
        wanted = _wanted(models)
        for key in [key for key in self._deployments if key not in wanted]:
            gone = self._deployments.pop(key)
            self._note(now, f"{called(key)} is not served any more")
            gone.dissolve()
        if not wanted:
            self._note(now, "serve nothing")
            self._nothing = STOPPED
        deployments: dict[Key, Reconciler] = {}
        begun: list[Reconciler] = []
        for key, desired in wanted.items():
            known = self._deployments.get(key)
            if known is None:
                known = Reconciler(self.commons, now, desired, key[1])
                begun.append(known)
            deployments[key] = known
        self._deployments = deployments
        self._allot(now)
        for one in begun:
            one.begin(now)
        self._roll(now)

    def _roll(self, now: float) -> None:
        """Have deployments serve what is wanted: of one model, one after the other.

        One that doesn't stand has nothing to lose. While one that was changed isn't ready, the
        others of its model go on as they are, unless it only lacks peers to begin with.
        """
        for desired in self._models:
            mine = [one for one in self.deployments if one.key[0] == desired.facts.name]
            late = [one for one in mine if one.desired != desired]
            changing = any(
                not one.ready and (one.begun or not self._shares.lacks(one.key))
                for one in mine
                if one not in late
            )
            for one in late:
                differs = epochs.content(one.desired) != epochs.content(desired)
                one.lags = one.ready and changing and differs
                if not one.lags:
                    one.serve(desired, now)
                    changing = changing or not one.ready

    def _allot(self, now: float) -> None:
        """Share the peers out anew, if there is another reason than before to do so."""
        self._arrived = False
        self._shares.allot(self._deployments, now)


def _wanted(models: Iterable[Desired]) -> dict[Key, Desired]:
    """All deployments that there are to be."""
    return {
        (desired.facts.name, replica): desired
        for desired in models
        for replica in range(desired.pipelines)
    }
