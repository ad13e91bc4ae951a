"""Whom this peer follows, and the coordinator that runs here while it leads.

The shell of :mod:`molink.swarm.election.leader_election`: it asks other daemons over their control
sockets, starts and ends the coordinator's process, and tells its owner where to connect.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from typing import Protocol

import msgspec
import zmq.asyncio

from molink.errors import MolinkError, NotAuthorized, Unavailable, UsageError
from molink.facts.identity import derive_peer_id
from molink.swarm.election.events import (
    ConnectionLostEvent,
    CoordinatorFailedEvent,
    CoordinatorHeardEvent,
    CoordinatorStartedEvent,
    ElectionEvent,
    ElectionTimePassedEvent,
    FollowLeaderAction,
    MembershipChangedEvent,
    PeerAnsweredEvent,
    PeerTimedOutEvent,
    QueryLeaderAction,
    RaiseTermAction,
    ResignedEvent,
    StartCoordinatorAction,
    StepDownAction,
)
from molink.swarm.election.leader_election import LeaderElection
from molink.wire.messages.election import LeaderReply, LeaderRequest, LeaderView
from molink.wire.messages.instructions import PeerInfo
from molinkd.peer.election.coordinator_process import (
    CoordinatorAnnouncement,
    CoordinatorHost,
    CoordinatorProcess,
    create_coordinator_process,
)
from molinkd.peer.election.leader_query import query_leader
from molinkd.peer.election.replica_file import ReplicaFile
from molinkd.peer.launch import Announce, ProblemReportedEvent
from molinkd.peer.membership.addresses import local_dial_host
from molinkd.peer.membership.membership_record import MembershipRecord

log = logging.getLogger(__name__)

INTERVAL_S = 0.25
#: So many peers are asked at once.
_MAX_QUERIES = 8


class DaemonHost(CoordinatorHost, Protocol):
    """What leading takes of a daemon."""

    @property
    def context(self) -> zmq.asyncio.Context: ...
    @property
    def announce(self) -> Announce: ...


class Leadership:
    """One daemon's part in who leads the swarm."""

    def __init__(
        self,
        host: DaemonHost,
        replica: ReplicaFile,
        membership: MembershipRecord | None,
        on_follow: Callable[[MembershipRecord], None] = lambda _: None,
        *,
        able: bool = True,
    ) -> None:
        """``membership`` is ``None`` to found a swarm. One that isn't ``able`` never leads.

        ``on_follow`` is told where the coordinator is, whenever that is another place.
        """
        self._host = host
        self.replica = replica
        self.membership = membership
        self.on_follow = on_follow
        self._can_lead = able
        self._me = derive_peer_id(host.keys.public)
        self._process: CoordinatorProcess | None = None
        #: Addresses of the coordinator here, as others reach it.
        self._own_addresses: tuple[str, ...] = ()
        self._actions: asyncio.Queue[StartCoordinatorAction | StepDownAction | None] = (
            asyncio.Queue()
        )
        self._tasks: set[asyncio.Task[None]] = set()
        #: Peers that are being asked.
        self._querying: set[str] = set()
        self._query_slots = asyncio.Semaphore(_MAX_QUERIES)
        #: Who did not answer last time; and where all are asked beside what they have told.
        self._unresponsive: set[str] = set()
        self._extra_addresses: tuple[str, ...] = ()
        self._loop = asyncio.get_running_loop()
        #: Done once this peer leads what it founds, or can't.
        self._started: asyncio.Future[None] = self._loop.create_future()
        #: ``None`` until :meth:`start`.
        self._election: LeaderElection | None = None

    # --- life --------------------------------------------------------------------------------

    async def found_swarm(self) -> None:
        """Lead a new swarm, or one whose state nobody else has; returns once this peer does.

        Raises:
            UsageError: it can't; says why.
        """
        self.start()
        self._dispatch_event(ElectionTimePassedEvent())
        await self._started

    def save_models(self, models: Sequence[str]) -> None:
        """Remember the swarm, and what ``up`` serves here, if it does."""
        if models:
            first, *more = models
            changed = msgspec.structs.replace(self.target, model=first, extra_models=tuple(more))
            self.membership = changed
        self.target.save(self._host.home.membership)

    @property
    def is_founder(self) -> bool:
        """Whether nobody else can lead, or is known to."""
        return self.membership is None or (
            self.membership.is_founder and self.replica.replica is None
        )

    def start(self) -> None:
        """Begin to look for the leader, if that hasn't begun; the session is about to."""
        if self._election is not None:
            return
        membership = self.membership
        known = MembershipChangedEvent(self.replica.order or (self._me,), self.replica.version)
        self._election = LeaderElection(
            self._me,
            self._loop.time(),
            membership=known,
            term=0 if membership is None else max(membership.term, known.replica[0]),
            leader=self._me if self.is_founder or membership is None else membership.leader,
            can_lead=self._can_lead,
        )
        self._spawn(self._run_actions(), "molink-lead")
        self._spawn(self._run_timer(), "molink-succession")

    def resign(self) -> None:
        """This daemon ends: others need not wait for it."""
        self._dispatch_event(ResignedEvent())

    async def close(self) -> None:
        """End the coordinator, if it runs here."""
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._started.cancel()
        await self._stop_coordinator()

    @property
    def is_leader(self) -> bool:
        """Whether the coordinator runs here."""
        return self._process is not None

    @property
    def coordinator(self) -> CoordinatorAnnouncement | None:
        """What the coordinator here says of itself; ``None`` while none runs here."""
        return None if self._process is None else self._process.announcement

    @property
    def target(self) -> MembershipRecord:
        """The swarm, and where its coordinator is as far as is known."""
        assert self.membership is not None
        return self.membership

    def coordinator_location(self) -> tuple[str, tuple[str, ...]]:
        """The key of the coordinator, and the addresses at which others reach it."""
        target = self.target
        return target.coordinator_key, self._own_addresses if self.is_leader else target.addresses

    # --- who has moved -----------------------------------------------------------------------

    @property
    def swarm(self) -> str:
        """The swarm's id."""
        return self.target.swarm

    @property
    def has_missing_peers(self) -> bool:
        """Whether a member didn't answer when it was asked last, and this PC follows nobody."""
        follows = self._election is None or self._election.role == "follower"
        return not follows and not self._unresponsive.isdisjoint(self.replica.order)

    def add_addresses(self, addresses: tuple[str, ...]) -> None:
        """Ask members there too from now on."""
        if addresses and addresses != self._extra_addresses:
            log.info("the swarm is heard at %s", ", ".join(addresses))
        self._extra_addresses = addresses or self._extra_addresses

    # --- what happens ------------------------------------------------------------------------

    def on_heartbeat(self, term: int, leader: str) -> bool:
        """The coordinator has spoken; whether it is one to follow."""
        found = self._dispatch_event(CoordinatorHeardEvent(term, leader))
        if found is None or term < found.term:
            return False
        self._update_membership(term=found.term, leader=found.leader)
        return True

    def on_connection_lost(self) -> None:
        """The connection to the coordinator is lost."""
        self._dispatch_event(ConnectionLostEvent())

    def on_shared_state(self, data: memoryview) -> None:
        """The coordinator shares its state."""
        assert self.membership is not None
        if self.replica.save_replica(data, self.membership.swarm):
            self._dispatch_event(MembershipChangedEvent(self.replica.order, self.replica.version))

    def answer_request(self, peer: str, request: LeaderRequest) -> LeaderReply:
        """A peer asks whom this one follows, and says whom it follows itself.

        Raises:
            Unavailable: this daemon is still starting.
            NotAuthorized: the peer is of another swarm.
        """
        if request.swarm != self.target.swarm:
            raise NotAuthorized(f"this PC is not of swarm {request.swarm}")
        found = self._dispatch_event(PeerAnsweredEvent(peer, request.view))
        if found is None:
            raise Unavailable("this daemon is still starting")
        return LeaderReply(ref=request.ref, view=found.build_view(self._loop.time()))

    def _dispatch_event(self, event: ElectionEvent) -> LeaderElection | None:
        """Decide, and begin to carry it out; nothing happens before :meth:`start`."""
        election = self._election
        if election is None:
            return None
        role = election.role
        for decision in election.handle(event, self._loop.time()):
            match decision:
                case QueryLeaderAction(peer):
                    self._query_once(peer, election)
                case FollowLeaderAction():
                    self._follow_leader(decision)
                case RaiseTermAction(term):
                    if self._process is not None:
                        self._process.raise_term(term)
                    self._update_membership(term=term)
                case StartCoordinatorAction() | StepDownAction():
                    if self.is_leader:
                        log.warning("the coordinator here is ended: %s", election.story[-1])
                    self._actions.put_nowait(decision)
        if election.role != role:
            log.info("%s", election.story[-1])
        return election

    def _follow_leader(self, decision: FollowLeaderAction) -> None:
        addresses = decision.addresses
        if decision.leader == self._me and self._process is not None:
            addresses = (f"{local_dial_host(self._host.settings.host)}:{self._process.port}",)
        self._update_membership(
            term=decision.term,
            leader=decision.leader,
            coordinator_key=decision.coordinator_key,
            addresses=addresses,
        )
        if self.membership is not None:
            self.on_follow(self.membership)

    def _update_membership(self, **changes: object) -> None:
        if self.membership is None:
            return
        changed = msgspec.structs.replace(self.membership, **changes)
        if changed != self.membership:
            self.membership = changed
            try:
                changed.save(self._host.home.membership)
            except OSError as error:
                log.warning("can't remember where the coordinator is: %s", error)

    # --- asking ------------------------------------------------------------------------------

    def _query_once(self, peer: str, election: LeaderElection) -> None:
        """Ask, unless that is under way: questions of others must not make ever more of ours."""
        if peer not in self._querying:
            self._querying.add(peer)
            self._spawn(self._query_peer(peer, election), f"molink-ask-{peer}")

    async def _query_peer(self, peer: str, election: LeaderElection) -> None:
        async with self._query_slots:
            if not election.is_awaiting(peer):
                self._querying.discard(peer)
                return
            answer = await self._request_view(peer, election)
        self._querying.discard(peer)
        if answer is None:
            self._unresponsive.add(peer)
        else:
            self._unresponsive.discard(peer)
        self._dispatch_event(
            PeerTimedOutEvent(peer) if answer is None else PeerAnsweredEvent(peer, answer)
        )

    async def _request_view(self, peer: str, election: LeaderElection) -> LeaderView | None:
        member = self._find_peer(peer)
        if member is None or self.membership is None:
            return None
        view = election.build_view(self._loop.time())
        request = LeaderRequest(ref=0, swarm=self.membership.swarm, view=view)
        return await query_leader(self._host.context, self._host.keys, member, request)

    def _find_peer(self, peer: str) -> PeerInfo | None:
        held = self.replica.replica
        for one in () if held is None else held.members:
            if one.peer == peer and one.announced is not None and one.announced.addresses:
                addresses = dict.fromkeys((*one.announced.addresses, *self._extra_addresses))
                return msgspec.structs.replace(one.announced, addresses=tuple(addresses))
        return None

    # --- leading -----------------------------------------------------------------------------

    async def _run_actions(self) -> None:
        """Start and end the coordinator as decided, one after the other."""
        while True:
            action = await self._actions.get()
            await self._stop_coordinator()
            if isinstance(action, StartCoordinatorAction):
                await self._start_coordinator(action)

    async def _start_coordinator(self, action: StartCoordinatorAction) -> None:
        held = self.replica.path if self.replica.replica is not None else None
        process = create_coordinator_process(
            self._host, self.membership, held, action, self._me, self._on_failing
        )
        try:
            announcement = await process.start()
        except MolinkError as error:
            await process.close()
            if self.is_founder and not self._started.done():
                self._started.set_exception(UsageError(str(error)))
                return
            self._dispatch_event(CoordinatorFailedEvent())
            self._host.announce(ProblemReportedEvent(text=str(error)))
            return
        self._process, self._own_addresses = process, announcement.addresses
        if announcement.restored:
            self._host.announce(ProblemReportedEvent(text=announcement.restored))
        if self.membership is None:
            self.membership = self._founded_membership(announcement)
        self._dispatch_event(
            CoordinatorStartedEvent(
                announcement.term, announcement.public_key, tuple(announcement.addresses)
            )
        )
        if not self._started.done():
            self._started.set_result(None)

    def _founded_membership(self, announcement: CoordinatorAnnouncement) -> MembershipRecord:
        return MembershipRecord(
            swarm=announcement.swarm,
            coordinator_key=announcement.public_key,
            addresses=tuple(announcement.addresses),
            is_founder=True,
            leader=self._me,
        )

    def _on_failing(self) -> None:
        self._dispatch_event(CoordinatorFailedEvent())
        self._host.announce(
            ProblemReportedEvent(
                text="the coordinator ends again and again here: another PC is to run it"
            )
        )

    async def _stop_coordinator(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            await process.close()

    async def _run_timer(self) -> None:
        while True:
            await asyncio.sleep(INTERVAL_S)
            self._dispatch_event(ElectionTimePassedEvent())

    def _spawn(self, work: Coroutine[None, None, None], name: str) -> None:
        task = self._loop.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._on_task_done)

    def _on_task_done(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("%s failed", task.get_name(), exc_info=task.exception())
