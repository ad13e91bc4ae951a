"""Drives the swarm to its desired state: every model served by each of its pipelines.

A plain object that takes events and ``now`` (monotonic seconds) and returns actions to carry out in
order. :mod:`molink.swarm.placement.allocation` assigns peers to deployments; a
:class:`~molink.swarm.controller.reconciler.Reconciler` drives each deployment. After every event,
all due work is done, and every peer is sent what it does not know yet.
"""

from collections.abc import Iterable, Sequence

from molink.errors import InvariantError
from molink.swarm.controller.allocator import PeerAllocator, deployment_name
from molink.swarm.controller.context import ControllerContext
from molink.swarm.controller.events import (
    ConnectionTriedEvent,
    ControllerAction,
    ControllerEvent,
    DesiredStateChangedEvent,
    MemberAddedEvent,
    MemberRemovedEvent,
    PeerDisconnectedEvent,
    PeerReportedEvent,
    PeerStoppedEvent,
    RebalanceRequestedEvent,
    StageReportedEvent,
    TermRaisedEvent,
    TimePassedEvent,
)
from molink.swarm.controller.formation import epoch_spec
from molink.swarm.controller.reconciler import Reconciler
from molink.swarm.controller.records import DesiredModel, MemberRecord, PipelineRecord
from molink.swarm.controller.registry import PeerSession, Registry
from molink.swarm.placement.allocation import DeploymentKey
from molink.swarm.placement.links import Links
from molink.swarm.running_time import RunningTime
from molink.wire.messages.instructions import Unassign

STOPPED = "all models are stopped; start one with `molink run MODEL`"
#: Reasons for dropping a peer, for people.
_LOSSES = {
    "shut down": "is offline: molink was stopped there",
    "timed out": "is offline: it stopped responding",
    "disconnected": "is offline: the connection to it broke",
}
NO_MODEL = "no model was requested: add `--model` to `molink up` or to the first `molink join`"


class Fleet:
    """The control plane's decisions about all models of a swarm."""

    def __init__(
        self,
        swarm: str,
        members: Iterable[MemberRecord],
        now: float,
        *,
        models: Sequence[DesiredModel] = (),
        pipelines: Iterable[PipelineRecord] = (),
        last: tuple[int, int] = (0, 0),
        term: int = 0,
        lost_peer: str = "",
    ) -> None:
        """``models``, ``pipelines`` and ``last`` (pipeline number, epoch) come from the stored
        state.

        ``term`` is the coordinator's term; ``lost_peer`` is known to have left.
        """
        self.context = ControllerContext(swarm, members, now, last, term)
        self._running_time = RunningTime(now)
        self._models = tuple(models)
        self._deployments: dict[DeploymentKey, Reconciler] = {}
        self._allocator = PeerAllocator(self.context)
        #: Whether a peer has connected since the last allocation.
        self._peer_arrived = False
        #: Why nothing is served, for the user; unused while a model is desired.
        self._idle_reason = NO_MODEL
        records = {(one.model, one.replica): one for one in pipelines}
        for key, desired in _desired_deployments(models).items():
            self._deployments[key] = Reconciler(
                self.context, now, desired, key[1], records.get(key), lost_peer=lost_peer
            )
        self._allocate_peers(now)

    # --- state -------------------------------------------------------------------------------

    @property
    def registry(self) -> Registry:
        """Members, and the sessions of live ones."""
        return self.context.registry

    @property
    def story(self) -> tuple[str, ...]:
        """The last transitions, oldest first."""
        return self.context.story

    @property
    def clock(self) -> float:
        """Time of the last :class:`TimePassedEvent`, in seconds, on the clock of the transition
        log."""
        return self.context.clock

    @property
    def models(self) -> tuple[DesiredModel, ...]:
        """The desired state."""
        return self._models

    @property
    def deployments(self) -> tuple[Reconciler, ...]:
        """All deployments, in the order of :attr:`models`."""
        return tuple(self._deployments.values())

    @property
    def reason(self) -> str:
        """Return why a model is not served or a change was not applied, for the user."""
        if not self._deployments:
            return self._idle_reason
        reasons = {one.label: one.reason for one in self.deployments if one.reason}
        return "; ".join(
            f"{label}: {reason}" if label else reason for label, reason in reasons.items()
        )

    def explain_exclusion(self, peer: str) -> str:
        """Explain why a peer that offers a stage has none, for the user; empty if it has one or
        offers none.
        """
        if any(one.has_stage(peer) for one in self.deployments):
            return ""
        texts = (
            one.explain_exclusion(peer) for one in self.deployments if one.planner.may_use(peer)
        )
        return next(filter(None, texts), "")

    # --- events ------------------------------------------------------------------------------

    def handle(self, event: ControllerEvent, now: float) -> list[ControllerAction]:
        """Process an event; return the actions, in order.

        A :class:`TimePassedEvent` is expected several times a second: gaps without one don't count
        as silence of peers.
        """
        now = self._running_time.counted_time(now)
        match event:
            case (
                MemberAddedEvent()
                | MemberRemovedEvent()
                | PeerStoppedEvent()
                | PeerDisconnectedEvent()
            ):
                self._on_membership_event(event, now)
            case PeerReportedEvent():
                self._on_peer_reported(event, now)
            case ConnectionTriedEvent():
                self._on_connection_tried(event)
            case StageReportedEvent():
                for one in self.deployments:
                    one.on_stage_reported(event, now)
            case DesiredStateChangedEvent():
                self._apply_desired_state(event.models, now)
            case RebalanceRequestedEvent() | TermRaisedEvent():
                self._on_deployments_event(event, now)
            case TimePassedEvent(read_lag):
                self.context.clock = now
                self.registry.set_read_lag(read_lag)
                self._drop_peers(self.registry.find_silent(now), "timed out", now)
        self._drop_peers(
            self.registry.find_disconnected(now, self._is_doubted), "disconnected", now
        )
        if self._peer_arrived or not isinstance(
            event, PeerReportedEvent | ConnectionTriedEvent | StageReportedEvent
        ):
            self._allocate_peers(now)
        self._advance_deployments(now)
        return self.context.pop_actions()

    def _on_deployments_event(
        self, event: RebalanceRequestedEvent | TermRaisedEvent, now: float
    ) -> None:
        """Apply an event that concerns every deployment."""
        if isinstance(event, TermRaisedEvent):
            self.context.term = event.term
            for one in self.deployments:
                one.on_term_raised(now)
            return
        self.context.log_transition(
            now, "rebalancing all models as requested", "reassigning all layers, as requested"
        )
        for one in self.deployments:
            one.rebalance_ring(now)

    def _on_membership_event(
        self,
        event: MemberAddedEvent | MemberRemovedEvent | PeerStoppedEvent | PeerDisconnectedEvent,
        now: float,
    ) -> None:
        match event:
            case MemberAddedEvent(member):
                self.registry.add_member(member)
                name = member.name
                self.context.log_transition(
                    now, f"{name} ({member.peer}) joined", f"{name} joined the swarm"
                )
            case MemberRemovedEvent(peer, reason):
                self._on_member_removed(peer, reason, now)
            case PeerStoppedEvent(peer):
                if self.registry.is_live(peer):
                    self.context.backoff.drop_peer(peer)
                    self._drop_peer(peer, "shut down", now)
            case PeerDisconnectedEvent(peer):
                self.registry.mark_disconnected(peer, now)

    def _advance_deployments(self, now: float) -> None:
        """Do all due work, then update every peer."""
        for one in self.deployments:
            one.advance_state(now)
        self._roll_out(now)
        self._notify_users(now)
        self.context.add_actions(*self.registry.publish_members())
        for one in self.deployments:
            one.sibling_pipelines = tuple(
                other.pipeline
                for other in self.deployments
                if other is not one and other.key[0] == one.key[0]
            )
            one.publish_route()

    # --- peers -------------------------------------------------------------------------------

    def _is_doubted(self, peer: str, session: PeerSession) -> bool:
        return any(one.planner.is_doubted(peer, session) for one in self.deployments)

    def _on_connection_tried(self, event: ConnectionTriedEvent) -> None:
        """Record an attempt between live peers; an attempt to a PC that is off says nothing about
        its ports.
        """
        if not self.registry.all_live((event.source, event.target)):
            return
        self.context.reachability.record_attempt(event.source, event.target, event.succeeded)
        for links in self._all_links():
            links.record_measurement(
                event.source, event.target, event.latency, event.rate, event.loss
            )

    def _all_links(self) -> tuple[Links, ...]:
        """Yield all link tables: the shared one and each deployment's copy."""
        return (self.context.links, *(one.planner.links for one in self.deployments))

    def _on_member_removed(self, peer: str, reason: str, now: float) -> None:
        if peer not in self.registry.members:
            return
        name = self.registry.name_of(peer)
        self.context.log_transition(now, f"{name} ({peer}) {reason}", f"{name} {reason}")
        self.context.add_actions(*self.registry.remove_member(peer))
        self.context.backoff.drop_peer(peer)
        for one in self.deployments:
            one.on_peer_lost(peer, f"{name} {reason}", now)

    def _drop_peers(self, peers: list[str], reason: str, now: float) -> None:
        """Drop peers together, so that no deployment moves from one lost peer to another."""
        peers = [*peers, *(self.registry.find_co_located(peers, now) if peers else ())]
        for peer in peers:
            self.registry.drop_session(peer)
        for peer in peers:
            self._drop_peer(peer, reason, now)

    def _drop_peer(self, peer: str, reason: str, now: float) -> None:
        name = self.registry.name_of(peer)
        event = f"{name} {_LOSSES.get(reason, reason)}"
        self.context.log_transition(now, f"{name} ({peer}) {reason}", event)
        self.registry.drop_session(peer)
        self.context.backoff.retract_failure(peer, now)
        self.context.reachability.drop_peer(peer)
        self.context.links.drop_peer(peer)
        for one in self.deployments:
            one.planner.drop_peer(peer)
            one.on_peer_lost(peer, f"{name} {reason}", now)

    def _on_peer_reported(self, event: PeerReportedEvent, now: float) -> None:
        peer = event.peer
        if peer not in self.registry.members:
            return
        if not self.registry.is_live(peer):
            name = event.report.name
            self.context.log_transition(now, f"{name} ({peer}) connected", f"{name} is online")
            self._peer_arrived = True
        elif self.registry.sessions[peer].report.daemon_pid != event.report.daemon_pid:
            self._drop_peer(peer, "restarted", now)
        self.context.add_actions(
            *self.registry.record_report(peer, event.report, event.is_new_connection, now)
        )
        for links in self._all_links():
            links.set_primary_peer(peer, event.report.primary_peer)
        # Pending instructions may name these peers.
        self.context.add_actions(*self.registry.publish_members())
        for one in self.deployments:
            one.on_prefetch_reported(event, now)
        needed = set[str]().union(*(one.needed_pipelines(peer) for one in self.deployments))
        for worker in event.report.workers:
            if worker.pipeline not in needed:
                self.context.send_message(peer, Unassign(pipeline=worker.pipeline))
        for one in self.deployments:
            one.on_peer_reported(event, now)
        known = {one.pipeline for one in self.deployments}
        if not any(one.is_adopting for one in self.deployments):
            self.context.add_actions(*self.registry.end_stale_routes(peer, known))

    def _notify_users(self, now: float) -> None:
        """Tell users of PCs without a stage, once, what they can do about it."""
        if not self._deployments:
            return
        texts = dict.fromkeys(self.registry.sessions, "")
        for one in self.deployments:
            for peer, text in one.collect_notices().items():
                texts[peer] = texts[peer] or text
        for peer, text in texts.items():
            news = self.registry.notify_user(peer, text)
            if news and text:
                name = self.registry.name_of(peer)
                self.context.log_transition(now, f"{name} is notified: {text}", f"{name}: {text}")
            self.context.add_actions(*news)

    # --- models ------------------------------------------------------------------------------

    def _apply_desired_state(self, models: tuple[DesiredModel, ...], now: float) -> None:
        self._models = models
        wanted = _desired_deployments(models)
        for key in [key for key in self._deployments if key not in wanted]:
            removed = self._deployments.pop(key)
            text = f"{deployment_name(key)} is no longer served"
            self.context.log_transition(now, text, text)
            removed.dissolve_pipelines()
        if not wanted:
            self.context.log_transition(now, "no models to serve")
            self._idle_reason = STOPPED
        deployments: dict[DeploymentKey, Reconciler] = {}
        added: list[Reconciler] = []
        for key, desired in wanted.items():
            known = self._deployments.get(key)
            if known is None:
                known = Reconciler(self.context, now, desired, key[1])
                added.append(known)
            deployments[key] = known
        self._deployments = deployments
        self._allocate_peers(now)
        for one in added:
            one.start_serving(now)
        self._roll_out(now)

    def _roll_out(self, now: float) -> None:
        """Roll out changes: one deployment of a model after another.

        A deployment that is not ready changes at once. Other deployments of its model wait until a
        changed one is ready again, unless that one lacks peers.
        """
        for desired in self._models:
            mine = [one for one in self.deployments if one.key[0] == desired.facts.name]
            late = [one for one in mine if one.desired != desired]
            changing = any(
                not one.is_ready and (one.has_assigned or not self._allocator.lacks_room(one.key))
                for one in mine
                if one not in late
            )
            for one in late:
                differs = epoch_spec(one.desired) != epoch_spec(desired)
                one.is_deferred = one.is_ready and changing and differs
                if not one.is_deferred:
                    one.update_desired(desired, now)
                    changing = changing or not one.is_ready

    def _allocate_peers(self, now: float) -> None:
        """Allocate peers to deployments if the inputs have changed."""
        self._peer_arrived = False
        self._allocator.allocate_peers(self._deployments, now)

    def validate(self) -> None:
        """Check the invariants of the sessions and of each deployment.

        Raises:
            InvariantError: one is violated.
        """
        if not set(self.registry.sessions) <= set(self.registry.members):
            raise InvariantError("a session without a member", self.story)
        names = [one.pipeline for one in self.deployments]
        if len(set(names)) < len(names):
            raise InvariantError("two deployments have one pipeline", self.story)
        used = [one.used_peers for one in self.deployments]
        if sum(map(len, used)) > len(frozenset[str]().union(*used)):
            raise InvariantError("two deployments use one peer", self.story)
        for one in self.deployments:
            one.validate()


def _desired_deployments(models: Iterable[DesiredModel]) -> dict[DeploymentKey, DesiredModel]:
    """Return all desired deployments."""
    return {
        (desired.facts.name, replica): desired
        for desired in models
        for replica in range(desired.num_pipelines)
    }
