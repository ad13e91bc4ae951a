"""The coordinator's process, and the disk that outlives it."""

import hashlib
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from molink.swarm.controller.events import (
    AnnouncePeerAction,
    CommitPipelineAction,
    ConnectionTriedEvent,
    ControllerEvent,
    MemberAddedEvent,
    MemberRemovedEvent,
    PeerDisconnectedEvent,
    PeerReportedEvent,
    PeerStoppedEvent,
    ReserveEpochAction,
    SendMessageAction,
    StageReportedEvent,
    TermRaisedEvent,
    TimePassedEvent,
)
from molink.swarm.controller.fleet import Fleet
from molink.swarm.controller.records import DesiredModel, MemberRecord, PipelineRecord
from molink.swarm.election.leases import LeaseIssuer
from molink.swarm.election.replica import (
    Replica,
    ReplicaSync,
    Version,
    decode_replica,
    next_lineage,
)
from molink.swarm.election.terms import first_term
from molink.swarm.membership.duplicate_peers import DuplicatePeers
from molink.swarm.membership.membership_log import MembershipLog
from molink.wire.messages.base import Payload
from molink.wire.messages.election import LeaderHeartbeat, StateReplica, StateRequest
from molink.wire.messages.instructions import KeepAlive, PeerInfo
from molink.wire.messages.peer_reports import (
    Goodbye,
    PeerReport,
    ReachReport,
    StageFailed,
    StageLoaded,
    StageReady,
)
from tests.dst.network import Listener, Sender
from tests.dst.process import Failure, Pc, Process

if TYPE_CHECKING:
    from tests.dst.world import World

PORT = 5466
STEP_INTERVAL = 0.5
#: Seconds from the end of a connection until its peer is determined.
_CLOSING = 0.1


def _number(pipeline: str) -> int:
    return int(pipeline.removeprefix("p"))


@dataclass
class Disk:
    """Committed state, like :mod:`molinkd.coordinator.state_store`."""

    log: MembershipLog
    announced: dict[str, PeerInfo] = field(default_factory=dict)
    models: tuple[DesiredModel, ...] = ()
    pipelines: dict[tuple[str, int], PipelineRecord] = field(default_factory=dict)
    last: tuple[int, int] = (0, 0)
    version: Version = (0, 1)
    lineage: tuple[Version, ...] = ()

    @classmethod
    def restored(cls, found: Replica) -> "Disk":
        """A disk with a replica's state."""
        announced = {one.peer: one for one in found.announced}
        pipelines = {(one.model, one.replica): one for one in found.pipelines}
        return cls(
            found.log,
            announced,
            found.models,
            pipelines,
            found.last_numbers,
            found.version,
            found.lineage,
        )

    @property
    def members(self) -> dict[str, MemberRecord]:
        """All that are or were members, in order of joining."""
        return {one.peer: one for one in self.log.list_members(self.announced)}

    def replica(self) -> Replica:
        """The state as a replica."""
        pipelines = tuple(self.pipelines.values())
        return Replica(
            swarm=self.log.swarm,
            name="",
            max_peers=64,
            term=self.version[0],
            revision=self.version[1],
            lineage=self.lineage,
            log=self.log,
            announced=tuple(self.announced.values()),
            models=tuple(self.models),
            pipelines=tuple(pipelines),
            last_numbers=self.last,
        )

    def touch(self) -> None:
        """Count a change."""
        self.version = self.version[0], self.version[1] + 1

    def begin_term(self, term: int) -> None:
        before, revision = self.version
        if term < before:
            raise Failure(f"term {term} after {before}")
        if term > before:
            self.lineage = next_lineage(self.lineage, before, revision)
            self.version = term, revision + 1

    def put_log(self, log: MembershipLog) -> None:
        self.log = log
        self.touch()

    def announce(self, info: PeerInfo) -> None:
        self.announced[info.peer] = info
        self.touch()

    def commit(self, record: PipelineRecord) -> None:
        self.reserve(record.id, record.epoch)
        self.pipelines[record.model, record.replica] = record

    def reserve(self, pipeline: str, epoch: int) -> None:
        number, newest = self.last
        self.last = max(number, _number(pipeline)), max(epoch, newest)
        self.touch()


class Coordinator(Process):
    """One run of a coordinator on a PC."""

    def __init__(
        self, world: "World", pc: Pc, leader: str, disk: Disk, term: int, lost: str
    ) -> None:
        super().__init__(pc, "coordinator")
        self.world = world
        self.disk = disk
        self.key = f"coordinator of {leader}"
        self.leader = leader
        disk.begin_term(first_term(term, disk.version[0], leader))
        self.term = disk.version[0]
        world.monitor.leads(leader, self.term)
        world.note(f"{self} begins in term {self.term}")
        self.fleet = Fleet(
            disk.log.swarm,
            disk.members.values(),
            self.time(),
            models=disk.models,
            pipelines=disk.pipelines.values(),
            last=disk.last,
            term=self.term,
            lost_peer=lost,
        )
        run = f"{self.key} {world.network.next_number()}".encode()
        seed = hashlib.blake2b(run, digest_size=20).hexdigest()
        self._leases = LeaseIssuer(leader, seed, self.time())
        self._replication = ReplicaSync()
        self._shared: tuple[Version, bytes] = ((-1, -1), b"")
        self._connections: dict[str, bytes] = {}
        self._twins = DuplicatePeers()
        #: Unread messages, and since when there are any.
        self._unread: deque[tuple[Sender, Any, Any]] = deque()
        self._unread_since = 0.0
        #: Delay of reading, and until when it lasts.
        self._late, self._late_until = 0.0, 0.0
        self.listener = Listener(
            world.network, self, PORT, self.key, self._on_message, self._admits
        )
        self.listener.on_disconnect = self._probe_soon
        self.on_death.append(lambda: world.network.died(self))
        self.on_death.append(lambda: world.monitor.stopped_leading(leader))
        self.later(STEP_INTERVAL, self._step)

    def raise_term(self, term: int) -> None:
        """Continue in a higher term."""
        self.disk.begin_term(term)
        self.term = term
        self.world.monitor.leads(self.leader, term)
        self._on_event(TermRaisedEvent(term))

    def _admits(self, user: str) -> bool:
        return self.disk.log.is_member(user)

    # --- administration --------------------------------------------------------------------------

    def change_log(self, log: MembershipLog) -> None:
        """Store a changed log, announce it, and disconnect peers that are no longer members."""
        before, present = self.disk.log.branches, log.branches
        self.disk.put_log(log)
        self._send_state(*self._connections)
        for peer in [one for one in present if one not in before]:
            self._on_event(MemberAddedEvent(self.disk.members[peer]))
        for peer in [one for one in before if one not in present]:
            self._drop_peer(peer)
            why = "was revoked" if log.members[peer].standing == "revoked" else "left"
            self._on_event(MemberRemovedEvent(peer, why))
            self.listener.expel(peer)

    # --- messages --------------------------------------------------------------------------------

    def read_late(self, late: float, seconds: float) -> None:
        """Read messages late but keep timers: the CPU is busy."""
        self._late, self._late_until = late, self.time() + seconds

    def _on_message(self, sender: Sender, message: Any, payload: Any) -> None:
        """Read a message once all earlier ones are read."""
        if not self._unread:
            if self.time() >= self._late_until:
                self._handle(sender, message, payload)
                return
            self._unread_since = self.time()
        self._unread.append((sender, message, payload))
        self.later(self._late, self._read)

    def _read(self) -> None:
        sender, message, payload = self._unread.popleft()
        if self._admits(sender.peer_id):
            self._handle(sender, message, payload)

    def _step(self) -> None:
        self._on_event(TimePassedEvent(self.time() - self._unread_since if self._unread else 0.0))
        self.later(STEP_INTERVAL, self._step)

    def _probe_soon(self) -> None:
        self.later(_CLOSING, self._probe_leaders)

    def _probe_leaders(self) -> None:
        for peer, identity in list(self._connections.items()):
            if not self.listener.send(identity, KeepAlive()):
                self._drop_peer(peer)
                self._on_event(PeerDisconnectedEvent(peer))

    def _handle(self, sender: Sender, message: Any, payload: Any) -> None:
        peer = sender.peer_id
        match message:
            case PeerReport():
                # No PC has a copy of another one's state folder.
                assert not self._twins.observe_connection(peer, sender.identity, self.time())
                fresh = self._connections.get(peer) != sender.identity
                self._connections[peer] = sender.identity
                if fresh:
                    self._replication.drop_peer(peer)
                self._send(peer, self._leader_heartbeat())
                self._on_event(PeerReportedEvent(peer, message, fresh))
                self._share(peer, message.replica, message.log_digest)
            case StateReplica():
                # One that was asked over an earlier connection too is refused.
                if self._replication.accept_answer(peer):
                    self._merge(decode_replica(payload, self.disk.log))
            case ReachReport():
                self._on_event(
                    ConnectionTriedEvent(
                        peer, message.peer, message.is_reachable, message.latency, message.rate
                    )
                )
            case StageLoaded() | StageReady() | StageFailed():
                self._on_event(StageReportedEvent(peer, message))
            case Goodbye():
                self._drop_peer(peer)
                self._on_event(PeerStoppedEvent(peer))

    def _leader_heartbeat(self) -> LeaderHeartbeat:
        lease = self._leases.issue_lease(self.term, self.time())
        self.world.liars.leases.append(lease)
        return LeaderHeartbeat(
            term=self.term,
            leader=self.leader,
            lease=lease,
            verify_key=self._leases.verify_key,
        )

    def _drop_peer(self, peer: str) -> None:
        self._connections.pop(peer, None)
        self._twins.drop_peer(peer)

    def _send(self, peer: str, message: Any, payload: Any = None) -> None:
        identity = self._connections.get(peer)
        if identity is not None:
            self.listener.send(identity, message, payload)

    def _share(self, peer: str, held: Version, digest: str) -> None:
        ours = self.disk.version, self.disk.log.digest
        lineage = self.disk.lineage
        due = self._replication.plan_sync(peer, (held, digest), ours, lineage, self.time())
        if due == "ask":
            self._send(peer, StateRequest())
        elif due == "send":
            self._send_state(peer)

    def _send_state(self, *peers: str) -> None:
        if self._shared[0] != self.disk.version:
            self._shared = self.disk.version, self.disk.replica().encode()
        data = self._shared[1]
        for peer in peers:
            self._send(peer, StateReplica(payload=Payload("u8", (len(data),))), data)

    def _merge(self, theirs: Replica) -> None:
        """Merge what a peer recorded while another coordinator led its part."""
        log = self.disk.log.merge_log(theirs.log)
        if log.digest != self.disk.log.digest:
            self.change_log(log)
        self.disk.touch()

    def _on_event(self, event: ControllerEvent) -> None:
        for decision in self.fleet.handle(event, self.time()):
            match decision:
                case CommitPipelineAction(record):
                    self.disk.commit(record)
                    self.world.monitor.committed(self, record)
                case ReserveEpochAction(pipeline, epoch):
                    self.disk.reserve(pipeline, epoch)
                case AnnouncePeerAction(member):
                    self.disk.announce(member)
                case SendMessageAction(peer, message):
                    self._send(peer, message)
        if not isinstance(event, PeerReportedEvent):
            self.fleet.validate()
