"""Runs leader election on this PC, and the coordinator while it leads.

Shell of :mod:`molink.swarm.election.leader_election`: queries other daemons, starts and stops the
coordinator process, and reports the current coordinator.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import msgspec
import zmq.asyncio

from molink.errors import (
    MolinkError,
    NotAuthorized,
    Overloaded,
    StateError,
    Unavailable,
    UsageError,
    WireError,
)
from molink.facts.identity import derive_peer_id
from molink.facts.model import AdapterFolders
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
    ReportMisbehaviourAction,
    ResignedEvent,
    StartCoordinatorAction,
    StepDownAction,
)
from molink.swarm.election.leader_election import LeaderElection
from molink.swarm.election.replica import Replica, Version, decode_replica
from molink.swarm.membership.membership_log import MembershipLog
from molink.util.token_bucket import KeyedTokenBuckets, RateLimit
from molink.wire.messages.codec import control_codec
from molink.wire.messages.control_plane import ControlMessage
from molink.wire.messages.election import (
    LeaderHeartbeat,
    LeaderReply,
    LeaderRequest,
    LeaderView,
)
from molink.wire.messages.instructions import PeerInfo
from molink.wire.messages.rendezvous import CONTROL
from molink.wire.sockets.client import Client, is_refused
from molink.wire.sockets.create_socket import endpoints
from molink.wire.sockets.key_pair import KeyPair
from molink.wire.sockets.secrets import write_secret_bytes
from molinkd.coordinator.replica_file import read_replica
from molinkd.peer.election.coordinator_process import (
    CoordinatorAnnouncement,
    CoordinatorHost,
    CoordinatorProcess,
    create_coordinator_process,
)
from molinkd.peer.launch import Announce, ProblemReportedEvent
from molinkd.peer.membership.addresses import local_dial_host
from molinkd.peer.membership.membership_record import MembershipRecord
from molinkd.peer.membership.rendezvous_client import RendezvousClient
from molinkd.tasks import cancel_tasks

log = logging.getLogger(__name__)

#: Reply timeout, in seconds.
REPLY_TIMEOUT_S = 1.0
#: A rendezvous is spared if a peer answers directly within this time, in seconds.
CALL_DELAY_S = 0.2
#: Leader queries that a peer may send: four a second to each of eight addresses.
REQUEST_LIMIT = RateLimit(burst=256, per_second=32.0)


async def query_leader(
    context: zmq.asyncio.Context,
    keys: KeyPair,
    info: PeerInfo,
    request: LeaderRequest,
    rendezvous: RendezvousClient | None = None,
) -> LeaderView | None:
    """The first reply from any of the peer's addresses, or by a call; ``None`` without one."""
    asking = [
        asyncio.ensure_future(
            _query_address(context, keys, info, one, request, REPLY_TIMEOUT_S, is_refused(one))
        )
        for one in endpoints(info.addresses, info.control_port)
    ]
    calling = None
    if rendezvous is not None:
        calling = asyncio.ensure_future(_call_peer(context, keys, info, request, rendezvous))
        asking.append(calling)
    answer: LeaderView | None = None
    try:
        for done in asyncio.as_completed(asking):
            answer = await done
            if answer is not None:
                break
        if rendezvous is not None and answer is not None:
            by_call = calling is not None and calling.done() and calling.result() is answer
            rendezvous.record_reached(info.peer, by_call=by_call)
    finally:
        await cancel_tasks(*asking)
    return answer


async def _call_peer(
    context: zmq.asyncio.Context,
    keys: KeyPair,
    info: PeerInfo,
    request: LeaderRequest,
    rendezvous: RendezvousClient,
) -> LeaderView | None:
    """The reply to a call at the rendezvous; ``None`` without one."""
    await asyncio.sleep(CALL_DELAY_S)
    address = rendezvous.local_endpoint(info.peer, CONTROL)
    if not address:
        return None
    timeout = rendezvous.stretch_timeout(REPLY_TIMEOUT_S)
    refused = rendezvous.wait_failed(info.peer)
    return await _query_address(context, keys, info, address, request, timeout, refused)


async def _query_address(
    context: zmq.asyncio.Context,
    keys: KeyPair,
    info: PeerInfo,
    address: str,
    request: LeaderRequest,
    timeout: float,
    refused: Coroutine[None, None, object],
) -> LeaderView | None:
    """The reply from one address; ``None`` without one, or once ``refused`` returns true."""
    client: Client[ControlMessage] = Client(
        context, keys, control_codec(), info.public_key, (address,), name=info.name
    )
    try:
        client.start()
        asking = asyncio.ensure_future(client.send_request(request, timeout=timeout))
        refusing = asyncio.ensure_future(refused)
        try:
            await asyncio.wait((asking, refusing), return_when=asyncio.FIRST_COMPLETED)
            if not asking.done() and refusing.result():
                return None  # no need to wait
            reply, _ = await asking
        finally:
            await cancel_tasks(asking, refusing)
        if not isinstance(reply, LeaderReply):
            raise WireError(f"unexpected reply {type(reply).__name__} instead of a leader")
    except MolinkError as error:
        log.debug("%s at %s: %s", info.name, address, error)
        return None
    else:
        return reply.view
    finally:
        await client.close()


class ReplicaFile:
    """``replica.msgpack`` in a daemon's home."""

    def __init__(self, path: Path, swarm: str | None) -> None:
        """A replica of another swarm than ``swarm`` is ignored."""
        self.path = path
        found = read_replica(path)
        self.replica: Replica | None = found if found is not None and found.swarm == swarm else None
        #: What could not be written yet.
        self._unwritten = b""

    @property
    def version(self) -> Version:
        """Version of the replica; (0, 0) without one."""
        return (0, 0) if self.replica is None else self.replica.version

    @property
    def log(self) -> MembershipLog | None:
        """The membership log; ``None`` without a replica."""
        return None if self.replica is None else self.replica.log

    def name_of(self, peer: str, default: str) -> str:
        """A member's unique name; ``default`` if the log isn't known yet."""
        member = None if self.log is None else self.log.members.get(peer)
        return default if member is None else member.name

    @property
    def log_digest(self) -> str:
        """Digest of the membership log; empty without one."""
        return "" if self.replica is None else self.replica.log.digest

    @property
    def order(self) -> tuple[str, ...]:
        """Peers in the order in which they become leader."""
        return () if self.replica is None else self.replica.order

    @property
    def branches(self) -> Mapping[str, str]:
        """The branch of each peer, which has one vote in an election; others have their own."""
        return {} if self.replica is None else self.replica.log.branches

    @property
    def known_membership(self) -> MembershipChangedEvent:
        """The members for an election."""
        return MembershipChangedEvent(self.order, self.version, self.branches)

    @property
    def age(self) -> float:
        """Seconds since a coordinator last sent a replica; 0 without one."""
        try:
            return max(0.0, time.time() - self.path.stat().st_mtime)
        except OSError:
            return 0.0

    def save_replica(self, data: bytes | memoryview, swarm: str, term: int) -> bool:
        """Store a replica; returns whether it is valid, of ``swarm``, and not after ``term``.

        Entries of the membership log that were known before stay.
        """
        known = self.log
        try:
            replica = decode_replica(data, known)
            if replica.swarm != swarm:
                raise StateError(f"it belongs to swarm {replica.swarm}")
            if replica.term > term:
                raise StateError(f"it is of term {replica.term}, after {term}")
            if known is not None:
                merged = known.merge_log(replica.log).without_expired(time.time())
                replica = replace(replica, log=merged)
                data = replica.encode()
        except StateError as error:
            log.warning("the coordinator sent an invalid replica of its state: %s", error)
            return False
        self.replica, self._unwritten = replica, bytes(data)
        self.write_replica()
        return True

    def write_replica(self) -> bool:
        """Write what is not written yet; returns whether the file holds :attr:`replica`."""
        try:
            if self._unwritten:
                write_secret_bytes(self.path, self._unwritten)
        except OSError as error:
            log.warning("can't store the replica of the swarm's state in %s: %s", self.path, error)
            return False
        self._unwritten = b""
        return True


INTERVAL_S = 0.25
#: Maximum number of concurrent queries.
_MAX_QUERIES = 8


class DaemonHost(CoordinatorHost, Protocol):
    """What leader election needs from its daemon."""

    @property
    def context(self) -> zmq.asyncio.Context: ...
    @property
    def announce(self) -> Announce: ...


class Leadership:
    """One daemon's part in leader election."""

    def __init__(
        self,
        host: DaemonHost,
        replica: ReplicaFile,
        membership: MembershipRecord | None,
        on_follow: Callable[[MembershipRecord], None] = lambda _: None,
        *,
        able: bool = True,
        on_misbehaviour: Callable[[str, str], None] = lambda _peer, _reason: None,
        rendezvous: RendezvousClient | None = None,
    ) -> None:
        """``membership`` is ``None`` to found a swarm. Without ``able`` this PC never leads.

        ``on_follow`` is called whenever the coordinator's location changes,
        ``on_misbehaviour(peer, reason)`` for each violation of a peer.
        """
        self._host = host
        self.replica = replica
        self.membership = membership
        self.on_follow = on_follow
        self._can_lead = able
        self._rendezvous = rendezvous
        self._report_misbehaviour = on_misbehaviour
        self._requests = KeyedTokenBuckets(REQUEST_LIMIT)
        self._me = derive_peer_id(host.keys.public)
        self._process: CoordinatorProcess | None = None
        #: Addresses of this PC's coordinator, for other PCs.
        self._own_addresses: tuple[str, ...] = ()
        self._actions: asyncio.Queue[StartCoordinatorAction | StepDownAction | None] = (
            asyncio.Queue()
        )
        self._tasks: set[asyncio.Task[None]] = set()
        #: Peers with a query in progress.
        self._querying: set[str] = set()
        self._query_slots = asyncio.Semaphore(_MAX_QUERIES)
        #: Peers that did not reply to the last query, and discovered addresses to try for all
        #: peers.
        self._unresponsive: set[str] = set()
        self._extra_addresses: tuple[str, ...] = ()
        self._loop = asyncio.get_running_loop()
        #: Done once the founded swarm's coordinator runs, or failed to start.
        self._started: asyncio.Future[None] = self._loop.create_future()
        #: ``None`` until :meth:`start`.
        self._election: LeaderElection | None = None

    # --- lifecycle ---

    async def found_swarm(self) -> None:
        """Lead a new swarm, or one whose state no other peer has. Waits for the coordinator.

        Raises:
            UsageError: The coordinator can't start.
        """
        self.start()
        self._dispatch_event(ElectionTimePassedEvent())
        await self._started

    def save_models(
        self, models: Sequence[str], adapters: Mapping[str, AdapterFolders] | None = None
    ) -> None:
        """Store the membership and the models that ``up`` serves.

        ``adapters`` are those of applied models; without them, models keep theirs.
        """
        if models:
            first, *more = models
            known = self.target.adapters if adapters is None else adapters
            self.membership = msgspec.structs.replace(
                self.target,
                model=first,
                extra_models=tuple(more),
                adapters={name: known[name] for name in models if known.get(name)},
            )
        self.target.save(self._host.home.membership)

    @property
    def is_founder(self) -> bool:
        """Whether no other peer is known to be able to lead."""
        return self.membership is None or (
            self.membership.is_founder and self.replica.replica is None
        )

    def start(self) -> None:
        """Start leader election, unless it runs already."""
        if self._election is not None:
            return
        membership = self.membership
        known = self.replica.known_membership
        self._election = LeaderElection(
            self._me,
            self._loop.time(),
            membership=known if known.order else MembershipChangedEvent((self._me,), known.replica),
            term=0 if membership is None else max(membership.term, known.replica[0]),
            leader=self._me if self.is_founder or membership is None else membership.leader,
            can_lead=self._can_lead,
            rest=self.replica.age,
        )
        self._spawn(self._run_actions(), "molink-lead")
        self._spawn(self._run_timer(), "molink-election")

    def resign(self) -> None:
        """Announce that this daemon stops, so that another peer takes over without a timeout."""
        self._dispatch_event(ResignedEvent())

    async def close(self) -> None:
        """Stop the coordinator, if it runs on this PC."""
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._started.cancel()
        await self._stop_coordinator()

    @property
    def is_leader(self) -> bool:
        """Whether the coordinator runs on this PC."""
        return self._process is not None

    @property
    def coordinator(self) -> CoordinatorAnnouncement | None:
        """Announcement of this PC's coordinator; ``None`` if none runs."""
        return None if self._process is None else self._process.announcement

    @property
    def coordinator_port(self) -> int:
        """Port of this PC's coordinator; 0 if none runs."""
        return 0 if self._process is None else self._process.port

    @property
    def target(self) -> MembershipRecord:
        """The swarm and the last known location of its coordinator."""
        assert self.membership is not None
        return self.membership

    def coordinator_location(self) -> tuple[str, tuple[str, ...], str]:
        """Public key and addresses of the coordinator, and the peer where it runs."""
        target = self.target
        if self.is_leader:
            return target.coordinator_key, self._own_addresses, self._me
        return target.coordinator_key, target.addresses, target.leader

    # --- missing peers ---

    @property
    def swarm(self) -> str:
        """The swarm's id."""
        return self.target.swarm

    @property
    def has_missing_peers(self) -> bool:
        """Whether this PC follows no leader and some peer did not reply to the last query."""
        follows = self._election is None or self._election.role == "follower"
        return not follows and not self._unresponsive.isdisjoint(self.replica.order)

    def add_addresses(self, addresses: tuple[str, ...]) -> None:
        """Also try these addresses for all peers."""
        if addresses and addresses != self._extra_addresses:
            log.info("discovered the swarm at %s", ", ".join(addresses))
        self._extra_addresses = addresses or self._extra_addresses

    # --- events ---

    def on_heartbeat(self, message: LeaderHeartbeat) -> bool:
        """Handle the coordinator's heartbeat; returns whether to follow that coordinator."""
        found = self._dispatch_event(
            CoordinatorHeardEvent(message.term, message.leader, message.lease, message.verify_key)
        )
        if found is None or not found.obeys(message.term, message.leader):
            return False
        self._update_membership(term=found.term, leader=found.leader)
        return True

    def on_connection_lost(self) -> None:
        """Handle the loss of the connection to the coordinator."""
        self._dispatch_event(ConnectionLostEvent())

    def on_shared_state(self, data: memoryview) -> None:
        """Store a replica of the coordinator's state."""
        assert self.membership is not None
        before = self.replica.order
        term = self.membership.term if self._election is None else self._election.term
        if self.replica.save_replica(data, self.membership.swarm, term):
            for removed in set(before) - set(self.replica.order):
                self._requests.drop_key(removed)
            self._dispatch_event(self.replica.known_membership)

    def answer_request(self, peer: str, request: LeaderRequest) -> LeaderReply:
        """Answer a peer's leader query, and take note of the peer's own view.

        Raises:
            Unavailable: This daemon is still starting.
            NotAuthorized: The peer belongs to another swarm.
            Overloaded: It asks too often.
        """
        if request.swarm != self.target.swarm:
            raise NotAuthorized(f"this PC does not belong to swarm {request.swarm}")
        if not self._requests.try_take(peer, self._loop.time()):
            self._report_misbehaviour(peer, "it asks for the leader too often")
            raise Overloaded("this PC was asked for the leader too often")
        found = self._dispatch_event(PeerAnsweredEvent(peer, request.view))
        if found is None:
            raise Unavailable("this daemon is still starting")
        return LeaderReply(ref=request.ref, view=found.build_view(self._loop.time()))

    def _dispatch_event(self, event: ElectionEvent) -> LeaderElection | None:
        """Decide and carry out the actions; ignored before :meth:`start`."""
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
                case ReportMisbehaviourAction(peer, reason):
                    self._report_misbehaviour(peer, reason)
                case StartCoordinatorAction() | StepDownAction():
                    if self.is_leader:
                        log.warning("stopping this PC's coordinator: %s", election.story[-1])
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
                log.warning("can't store the coordinator's location: %s", error)

    # --- queries ---

    def _query_once(self, peer: str, election: LeaderElection) -> None:
        """Query a peer, unless a query is in progress: peers' queries must not multiply ours."""
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
        info = self._find_peer(peer)
        if info is None or self.membership is None:
            return None
        view = election.build_view(self._loop.time())
        request = LeaderRequest(ref=0, swarm=self.membership.swarm, view=view)
        host = self._host
        return await query_leader(host.context, host.keys, info, request, self._rendezvous)

    def _find_peer(self, peer: str) -> PeerInfo | None:
        held = self.replica.replica
        for one in () if held is None else held.members:
            if one.peer == peer and one.announced is not None and one.announced.addresses:
                addresses = dict.fromkeys((*one.announced.addresses, *self._extra_addresses))
                return msgspec.structs.replace(one.announced, addresses=tuple(addresses))
        return None

    # --- coordinator process ---

    async def _run_actions(self) -> None:
        """Start and stop the coordinator, one action at a time."""
        while True:
            action = await self._actions.get()
            await self._stop_coordinator()
            if isinstance(action, StartCoordinatorAction):
                await self._start_coordinator(action)

    async def _start_coordinator(self, action: StartCoordinatorAction) -> None:
        if not self.replica.write_replica():
            # Its coordinator would start from an older state.
            self._fail_to_lead(f"{self.replica.path} can't be written: is the disk full?")
            return
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
            self._fail_to_lead(str(error))
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
            rendezvous="" if self._rendezvous is None else str(self._rendezvous.address),
        )

    def _on_failing(self) -> None:
        self._fail_to_lead("the coordinator keeps failing on this PC; another PC takes over")

    def _fail_to_lead(self, reason: str) -> None:
        self._dispatch_event(CoordinatorFailedEvent())
        self._host.announce(ProblemReportedEvent(text=reason))

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
