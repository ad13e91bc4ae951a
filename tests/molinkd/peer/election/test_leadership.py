"""The shell of leader election: its queries and its answers."""

import asyncio
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import zmq.asyncio

from molink.errors import NotAuthorized, Overloaded
from molink.facts.identity import derive_peer_id
from molink.swarm.controller.records import MemberRecord
from molink.swarm.election.replica import Replica
from molink.swarm.election.terms import MAX_ROUND
from molink.util.token_bucket import KeyedTokenBuckets, RateLimit
from molink.wire.messages.codec import control_codec
from molink.wire.messages.election import LeaderHeartbeat, LeaderReply, LeaderRequest, LeaderView
from molink.wire.messages.instructions import PeerInfo
from molink.wire.sockets.key_pair import KeyPair
from molink.wire.sockets.server import MessageSender
from molinkd.peer.election.leadership import REQUEST_LIMIT, Leadership, ReplicaFile
from molinkd.peer.home import Home
from molinkd.peer.launch import AnyDaemonEvent
from molinkd.peer.membership.membership_record import MembershipRecord
from molinkd.peer.settings import Settings
from tests.support.net import Net

VIEW = LeaderView(
    term=0, leader="", is_leader=False, hears_leader=True, can_lead=True, replica=(0, 1)
)


@dataclass
class Host:
    """The daemon that a leadership is a part of."""

    home: Home
    keys: KeyPair
    context: zmq.asyncio.Context
    settings: Settings = field(default_factory=lambda: Settings(name="pc"))
    events: list[AnyDaemonEvent] = field(default_factory=list)

    def announce(self, event: AnyDaemonEvent) -> None:
        self.events.append(event)


class Other:
    """Another member, which answers once it is told to."""

    def __init__(self, net: Net) -> None:
        self.asked = 0
        self.may_answer = asyncio.Event()
        self.server = net.server(control_codec(), self._handle)
        self.key = net.keys.public

    async def _handle(
        self, sender: MessageSender, message: LeaderRequest, _payload: memoryview | None
    ) -> None:
        self.asked += 1
        await self.may_answer.wait()
        self.server.send(sender.identity, LeaderReply(ref=message.ref, view=VIEW))

    def record(self, addresses: tuple[str, ...] = ("127.0.0.1",)) -> MemberRecord:
        """As the replica has it."""
        peer = derive_peer_id(self.key)
        told = PeerInfo(
            peer=peer,
            name="other",
            public_key=self.key,
            addresses=addresses,
            control_port=self.server.port,
        )
        return MemberRecord(peer, self.key, "other", announced=told)


def make(net: Net, folder: Path, other: Other, **told: tuple[str, ...]) -> Leadership:
    host = Host(Home(folder).create_folders(), net.member(), net.context)
    me = MemberRecord(derive_peer_id(host.keys.public), host.keys.public, "pc")
    replica = Replica("s", "s", 8, 0, 1, (), (other.record(**told), me), (), (), (), (0, 0))
    host.home.replica.write_bytes(replica.encode())
    membership = MembershipRecord(swarm="s", coordinator_key=other.key, addresses=("127.0.0.1:1",))
    leadership = Leadership(host, ReplicaFile(host.home.replica, "s"), membership)
    leadership.start()
    return leadership


async def test_a_peer_has_one_query_at_a_time(net: Net, tmp_path: Path) -> None:
    """However often others name it: their questions make no flood of ours."""
    other = Other(net)
    leadership = make(net, tmp_path, other)
    election, peer = leadership._election, other.record().peer
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
    """All addresses that were known are others now, as behind a new router."""
    other = Other(net)
    other.may_answer.set()
    leadership = make(net, tmp_path, other, addresses=("127.0.0.77",))
    await net.until(lambda: leadership.has_missing_peers)
    assert other.asked == 0
    leadership.add_addresses(("127.0.0.1",))
    leadership.add_addresses(())  # a look that found nothing
    await net.until(lambda: other.asked and not leadership.has_missing_peers)
    await leadership.close()


async def test_a_query_of_another_swarm_is_rejected(net: Net, tmp_path: Path) -> None:
    leadership = make(net, tmp_path, Other(net))
    with pytest.raises(NotAuthorized, match="not belong to swarm x"):
        leadership.answer_request("p", LeaderRequest(ref=1, swarm="x", view=VIEW))
    reply = leadership.answer_request("p", LeaderRequest(ref=1, swarm="s", view=VIEW))
    assert (reply.ref, reply.view.is_leader) == (1, False)
    await leadership.close()


async def test_a_peer_that_asks_endlessly_is_reported(net: Net, tmp_path: Path) -> None:
    """What it says beyond the limit has no effect."""
    leadership, reported = make(net, tmp_path, Other(net)), list[str]()
    leadership._report_misbehaviour = lambda peer, _: reported.append(peer)
    never = RateLimit(REQUEST_LIMIT.burst, 1e-9)  # the test may take long
    leadership._requests = KeyedTokenBuckets(never)
    for number in range(never.burst):
        leadership.answer_request("p", LeaderRequest(ref=number, swarm="s", view=VIEW))
    for number in range(16):
        with pytest.raises(Overloaded, match="too often"):
            leadership.answer_request("p", LeaderRequest(ref=number, swarm="s", view=VIEW))
    assert reported == ["p"] * 16
    leadership.answer_request("q", LeaderRequest(ref=1, swarm="s", view=VIEW))
    await leadership.close()


async def test_a_replica_of_a_later_term_than_the_leaders_is_refused(
    net: Net, tmp_path: Path
) -> None:
    """Its term would become this PC's at the next start."""
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
