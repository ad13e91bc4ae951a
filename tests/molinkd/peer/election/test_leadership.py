"""The shell of leader election: its queries and its answers."""

import asyncio
import errno
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Never

import msgspec
import pytest
import zmq.asyncio

from molink.errors import NotAuthorized, Overloaded
from molink.swarm.election.events import StartCoordinatorAction
from molink.swarm.election.replica import Replica
from molink.swarm.election.terms import MAX_ROUND
from molink.swarm.membership.membership_log import MAX_SIGNED, MembershipLog
from molink.util.token_bucket import KeyedTokenBuckets, RateLimit
from molink.wire.messages.codec import control_codec
from molink.wire.messages.election import LeaderHeartbeat, LeaderReply, LeaderRequest, LeaderView
from molink.wire.messages.instructions import PeerInfo
from molink.wire.messages.membership import (
    DepartureEntry,
    OwnershipEntry,
    SignedEntry,
    sign_entry,
)
from molink.wire.sockets.key_pair import KeyPair
from molink.wire.sockets.server import MessageSender
from molinkd.peer.election import leadership as module
from molinkd.peer.election.leadership import REQUEST_LIMIT, Leadership, ReplicaFile
from molinkd.peer.home import Home
from molinkd.peer.launch import AnyDaemonEvent, ProblemReportedEvent
from molinkd.peer.membership.membership_record import MembershipRecord
from molinkd.peer.settings import Settings
from tests.support.membership import LogBuilder, TestPeer
from tests.support.net import Net

VIEW = LeaderView(
    term=0, leader="", is_leader=False, hears_leader=True, can_lead=True, replica=(0, 1)
)


@dataclass
class Host:
    """The daemon that the leadership belongs to."""

    home: Home
    keys: KeyPair
    context: zmq.asyncio.Context
    settings: Settings = field(default_factory=lambda: Settings(name="pc"))
    events: list[AnyDaemonEvent] = field(default_factory=list)

    def announce(self, event: AnyDaemonEvent) -> None:
        self.events.append(event)


class Other:
    """Another member, which answers queries once ``may_answer`` is set."""

    def __init__(self, net: Net) -> None:
        self.asked = 0
        self.may_answer = asyncio.Event()
        self.server = net.server(control_codec(), self._handle)
        self.member = TestPeer(net.keys, "other")

    async def _handle(
        self, sender: MessageSender, message: LeaderRequest, _payload: memoryview | None
    ) -> None:
        self.asked += 1
        await self.may_answer.wait()
        self.server.send(sender.identity, LeaderReply(ref=message.ref, view=VIEW))

    def info(self, addresses: tuple[str, ...] = ("127.0.0.1",)) -> PeerInfo:
        """The peer as the replica describes it."""
        return PeerInfo(
            peer=self.member.peer,
            name="other",
            public_key=self.member.keys.public,
            addresses=addresses,
            control_port=self.server.port,
        )


def replica_of(
    members: LogBuilder, revision: int = 1, announced: tuple[PeerInfo, ...] = ()
) -> Replica:
    return Replica(
        members.log.swarm, "s", 8, 0, revision, (), members.log, announced, (), (), (0, 0)
    )


def make(net: Net, folder: Path, other: Other, **told: tuple[str, ...]) -> Leadership:
    host = Host(Home(folder).create_folders(), net.member(), net.context)
    members = LogBuilder(other.member)
    members.admit(other.member, TestPeer(host.keys))
    replica = replica_of(members, announced=(other.info(**told),))
    host.home.replica.write_bytes(replica.encode())
    membership = MembershipRecord(
        swarm=replica.swarm,
        coordinator_key=other.member.keys.public,
        addresses=("127.0.0.1:1",),
    )
    leadership = Leadership(host, ReplicaFile(host.home.replica, replica.swarm), membership)
    leadership.start()
    return leadership


async def test_a_peer_has_one_query_at_a_time(net: Net, tmp_path: Path) -> None:
    """However often others name the peer, this one sends it one query at a time."""
    other = Other(net)
    leadership = make(net, tmp_path, other)
    election, peer = leadership._election, other.member.peer
    assert election is not None
    for _ in range(100):
        leadership._query_once(peer, election)
    await net.until(lambda: other.asked == 1)
    assert sum(task.get_name().startswith("molink-ask") for task in leadership._tasks) == 1
    other.may_answer.set()
    await net.until(lambda: not leadership._querying)
    leadership._query_once(peer, election)
    await net.until(lambda: other.asked >= 2)
    await leadership.close()


async def test_queries_are_limited_and_skipped_when_obsolete(
    net: Net, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    leadership = make(net, tmp_path, Other(net))
    election = leadership._election
    assert election is not None
    wanted = [f"p{number}" for number in range(20)]
    monkeypatch.setattr(election, "is_awaiting", wanted.__contains__)
    under_way, most = set[str](), 0
    asked: list[str] = []

    async def answer_of(peer: str, _: object) -> None:
        nonlocal most
        under_way.add(peer)
        asked.append(peer)
        most = max(most, len(under_way))
        await asyncio.sleep(0)
        under_way.remove(peer)

    monkeypatch.setattr(leadership, "_request_view", answer_of)
    for peer in (*wanted, "who answers nothing that counts"):
        leadership._query_once(peer, election)
    await net.until(lambda: not leadership._querying)
    await leadership.close()
    assert asked == wanted
    assert most == 8


async def test_a_moved_peer_is_queried_at_discovered_addresses(net: Net, tmp_path: Path) -> None:
    """All known addresses are outdated, as behind a new router."""
    other = Other(net)
    other.may_answer.set()
    leadership = make(net, tmp_path, other, addresses=("127.0.0.77",))
    await net.until(lambda: leadership.has_missing_peers)
    assert other.asked == 0
    leadership.add_addresses(("127.0.0.1",))
    leadership.add_addresses(())  # a discovery without results
    await net.until(lambda: other.asked and not leadership.has_missing_peers)
    await leadership.close()


@pytest.mark.parametrize("addresses", [("[",), ("[", "a..b", "[x]"), ("x" * 64, "127.0.0.1")])
async def test_a_peer_with_addresses_of_nonsense_delays_no_election(
    net: Net, tmp_path: Path, addresses: tuple[str, ...]
) -> None:
    """It counts as one that doesn't answer, or answers at the address that is one."""
    other = Other(net)
    other.may_answer.set()
    leadership = make(net, tmp_path, other, addresses=addresses)
    if "127.0.0.1" in addresses:
        await net.until(lambda: other.asked)
    else:
        await net.until(lambda: leadership.has_missing_peers)
    await leadership.close()


async def test_a_query_of_another_swarm_is_rejected(net: Net, tmp_path: Path) -> None:
    leadership = make(net, tmp_path, Other(net))
    with pytest.raises(NotAuthorized, match="not belong to swarm x"):
        leadership.answer_request("p", LeaderRequest(ref=1, swarm="x", view=VIEW))
    swarm = leadership.target.swarm
    reply = leadership.answer_request("p", LeaderRequest(ref=1, swarm=swarm, view=VIEW))
    assert (reply.ref, reply.view.is_leader) == (1, False)
    await leadership.close()


async def test_a_peer_that_asks_endlessly_is_reported(net: Net, tmp_path: Path) -> None:
    """Requests beyond the limit have no effect."""
    leadership, reported = make(net, tmp_path, Other(net)), list[str]()
    leadership._report_misbehaviour = lambda peer, _: reported.append(peer)
    never = RateLimit(REQUEST_LIMIT.burst, 1e-9)  # never refilled, however long the test takes
    leadership._requests = KeyedTokenBuckets(never)
    for number in range(never.burst):
        leadership.answer_request(
            "p", LeaderRequest(ref=number, swarm=leadership.target.swarm, view=VIEW)
        )
    for number in range(16):
        with pytest.raises(Overloaded, match="too often"):
            leadership.answer_request(
                "p", LeaderRequest(ref=number, swarm=leadership.target.swarm, view=VIEW)
            )
    assert reported == ["p"] * 16
    leadership.answer_request("q", LeaderRequest(ref=1, swarm=leadership.target.swarm, view=VIEW))
    await leadership.close()


async def test_a_replica_of_a_later_term_than_the_leaders_is_refused(
    net: Net, tmp_path: Path
) -> None:
    """Its term would be this PC's after the next start."""
    leadership = make(net, tmp_path, Other(net))
    held = leadership.replica.replica
    assert held is not None
    far = replace(held, term=MAX_ROUND << 16)
    leadership.on_shared_state(memoryview(far.encode()))
    assert leadership.replica.version == held.version
    newer = replace(held, revision=held.revision + 1)
    leadership.on_shared_state(memoryview(newer.encode()))
    assert leadership.replica.version == newer.version
    await leadership.close()


async def test_a_heartbeat_of_a_far_term_is_not_obeyed(net: Net, tmp_path: Path) -> None:
    leadership, reported = make(net, tmp_path, Other(net)), list[str]()
    leadership._report_misbehaviour = lambda peer, _: reported.append(peer)
    first = LeaderHeartbeat(term=1 << 16, leader="p")
    assert leadership.on_heartbeat(first)
    assert not leadership.on_heartbeat(LeaderHeartbeat(term=MAX_ROUND << 16, leader="p"))
    assert (leadership.target.term, reported) == (1 << 16, ["p"])
    assert leadership.on_heartbeat(first)
    await leadership.close()


# --- the replica ---------------------------------------------------------------------------------


@dataclass
class Copy:
    """The stored state of a swarm with a founder and a member."""

    path: Path
    founder: TestPeer = field(default_factory=lambda: TestPeer(name="founder"))
    member: TestPeer = field(default_factory=lambda: TestPeer(name="member"))

    def __post_init__(self) -> None:
        self.members = LogBuilder(self.founder)
        self.members.admit(self.founder, self.member)
        self.swarm = self.members.log.swarm
        self.file = ReplicaFile(self.path, self.swarm)
        assert self.save(self.members, 1)

    def save(self, members: LogBuilder, revision: int) -> bool:
        """A coordinator sends a state with that log."""
        return self.file.save_replica(replica_of(members, revision).encode(), self.swarm, 0)

    def fork(self) -> LogBuilder:
        """A second log that starts from the current one."""
        fork = LogBuilder(self.founder)
        fork.log = self.members.log
        return fork

    @property
    def stored(self) -> Replica:
        """The stored replica, which must be the same after a restart."""
        held, again = self.file.replica, ReplicaFile(self.path, self.swarm).replica
        assert held is not None
        assert again is not None
        assert held.log.entries == again.log.entries
        assert (held.version, held.announced) == (again.version, again.announced)
        return held


@pytest.fixture
def copy(tmp_path: Path) -> Copy:
    return Copy(tmp_path / "replica.msgpack")


def test_a_replica_that_could_not_be_written_is_written_later(
    copy: Copy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise this PC's coordinator would start from an older state than its election names."""
    copy.members.admit(copy.founder, TestPeer(name="newcomer"))
    with monkeypatch.context() as patch:
        patch.setattr(module, "write_secret_bytes", fill_disk)
        assert copy.save(copy.members, 2)
        assert copy.file.version == (0, 2)
        assert not copy.file.write_replica()
    assert ReplicaFile(copy.path, copy.swarm).version == (0, 1)
    assert copy.file.write_replica()
    assert copy.stored.version == (0, 2)


async def test_a_pc_with_a_full_disk_does_not_lead(
    net: Net, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = Copy(tmp_path / "replica.msgpack")
    host = Host(Home(tmp_path), copy.member.keys, net.context)
    membership = MembershipRecord(
        swarm=copy.swarm, coordinator_key="k" * 40, addresses=("127.0.0.1:1",)
    )
    leadership = Leadership(host, copy.file, membership)
    monkeypatch.setattr(module, "write_secret_bytes", fill_disk)
    assert copy.save(copy.members, 2)
    leadership.start()
    await leadership._start_coordinator(StartCoordinatorAction(1 << 16, ""))
    (said,) = host.events
    assert isinstance(said, ProblemReportedEvent)
    assert "is the disk full?" in said.text
    assert not leadership.is_leader
    await leadership.close()


def fill_disk(*_: object) -> Never:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_coordinator_can_not_unsay_a_revocation(copy: Copy) -> None:
    before = copy.fork()
    copy.members.revoke(copy.founder, copy.member)
    assert copy.save(copy.members, 2)
    before.admit(copy.founder, newcomer := TestPeer(name="newcomer"))
    assert copy.save(before, 3)
    log = copy.stored.log
    assert log.members[copy.member.peer].standing == "revoked"
    assert log.is_member(newcomer.peer), "what is new there counts"
    assert copy.stored.revision == 3
    assert copy.file.log_digest == log.digest != before.log.digest
    assert copy.file.order == (copy.founder.peer, newcomer.peer)


def test_a_coordinator_can_not_unsay_an_end_or_a_departure(copy: Copy) -> None:
    before = copy.fork()
    guest, other = TestPeer(), TestPeer()
    keys, invitation = before.invite(copy.member, uses=2)
    before.join(keys, guest)
    before.join(keys, other)
    copy.members.log = before.log
    copy.members.end(copy.member, invitation, other)
    copy.members.leave(copy.member)
    assert copy.save(copy.members, 2)
    assert copy.save(before, 3)
    log = copy.stored.log
    assert [log.is_member(one.peer) for one in (guest, other, copy.member)] == [False, True, False]


def test_nobody_becomes_owner_but_by_an_owner(copy: Copy) -> None:
    """The leader, a member, signs itself owner, and then admits and revokes peers."""
    leader = copy.member
    forged = copy.fork()
    forged.own(leader, leader)
    forged.revoke(leader, copy.founder)
    assert copy.save(forged, 2)
    log = copy.stored.log
    assert log.owners == {copy.founder.peer}
    assert log.is_member(copy.founder.peer)
    assert not log.members[leader.peer].is_owner
    # Its own founding is of another swarm, and in the founder's name it can't sign.
    foreign = LogBuilder(leader)
    assert not copy.file.save_replica(replica_of(foreign, 3).encode(), copy.swarm, 0)
    entry = OwnershipEntry(copy.founder.verify_key, leader.peer)
    body = msgspec.msgpack.encode(entry)
    signature = sign_entry(copy.swarm, leader.keys.signer, _as_signed_by(leader, entry)).signature
    for signed in (b"", bytes(64), signature):
        entries = {one.hash: one for one in (*forged.log.entries, SignedEntry(body, signed))}
        forged.log = MembershipLog(copy.swarm, entries)
        assert not copy.save(forged, 4)
    assert copy.stored.log.owners == {copy.founder.peer}
    assert copy.stored.revision == 2


def _as_signed_by(peer: TestPeer, entry: OwnershipEntry) -> OwnershipEntry:
    return msgspec.structs.replace(entry, signer=peer.verify_key)


def test_a_member_that_signs_too_much_keeps_no_revocation_away(copy: Copy) -> None:
    """It signs some entries for one part of the swarm and some for another."""
    elsewhere, many = copy.fork(), MAX_SIGNED * 3 // 4 // 190
    for there, first in ((copy.members, 0), (elsewhere, many)):
        for number in range(first, first + many):
            there.append(copy.member.keys, DepartureEntry(copy.member.verify_key, f"{number:032x}"))
    assert copy.save(copy.members, 2)
    elsewhere.revoke(copy.founder, copy.member)
    copy.save(elsewhere, 3)
    assert copy.stored.log.members[copy.member.peer].standing == "revoked"
