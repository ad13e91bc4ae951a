"""Members and invitations of the log may connect, not the peers that a coordinator announces."""

from pathlib import Path

import pytest
from msgspec import structs

from molink.swarm.election.replica import Replica
from molink.swarm.membership.banned_peers import BannedPeers
from molink.wire.messages.codec import control_codec
from molink.wire.messages.instructions import PeerInfo, PeerRemoved
from molinkd.coordinator.membership import is_invitation_id
from molinkd.peer.artifacts.model_repository import ModelRepository
from molinkd.peer.election.leadership import ReplicaFile
from molinkd.peer.home import Home
from molinkd.peer.membership.peer_directory import _MAX_UNPROVEN, PeerDirectory
from molinkd.peer.resources import Resources
from molinkd.peer.settings import Settings
from tests.support.membership import LogBuilder, TestPeer
from tests.support.net import Net


def info_of(peer: TestPeer, name: str = "", primary_peer: str = "") -> PeerInfo:
    """A coordinator's announcement of a peer; without addresses, so that no connection is tried."""
    return PeerInfo(
        peer=peer.peer,
        name=name or peer.name,
        public_key=peer.keys.public,
        addresses=(),
        control_port=0,
        primary_peer=primary_peer,
    )


class Scene:
    """A PC's directory, in a swarm whose founder leads."""

    def __init__(self, net: Net, folder: Path) -> None:
        self.authenticator = net.authenticator
        self.founder, self.me = TestPeer(net.keys, "founder"), TestPeer(net.member(), "me")
        self.members, self.revision = LogBuilder(self.founder), 0
        self.members.admit(self.founder, self.me)
        resources = Resources(
            settings=Settings(name="me"),
            home=Home(folder).create_folders(),
            keys=self.me.keys,
            context=net.context,
            authenticator=net.authenticator,
            server=net.server(control_codec(), lambda *_: None),
            repository=ModelRepository(),
            banned_peers=BannedPeers(),
            announce=lambda _: None,
        )
        self.replica = ReplicaFile(resources.home.replica, self.members.log.swarm)
        self.gone: list[str] = []
        self.directory = PeerDirectory(
            resources,
            self.replica,
            lambda *_: None,
            lambda: None,
            self.gone.append,
            lambda *_: None,
        )
        net.at_end(self.directory.close)

    def load(self, *announced: PeerInfo) -> None:
        """The coordinator sends its state."""
        self.revision += 1
        log = self.members.log
        replica = Replica(log.swarm, "s", 8, 0, self.revision, (), log, announced, (), (), (0, 0))
        assert self.replica.save_replica(replica.encode(), log.swarm, 0)
        self.directory.load_replica()

    def announce(self, *infos: PeerInfo) -> None:
        for info in infos:
            self.directory.on_message(info)

    @property
    def known(self) -> set[str]:
        """Peers in the address book; only these may connect."""
        found = self.directory.book.peers - {self.me.peer}
        assert all(self.authenticator.is_allowed(peer) for peer in found)
        return set(found)

    def allowed_of(self, keys: list[str]) -> list[bool]:
        """Whether holders of these invitations' keys may connect."""
        allowed = {
            one.public_key
            for one in self.members.log.list_invitations()
            if self.authenticator.is_allowed(one.id)
        }
        assert len(allowed) == sum(map(is_invitation_id, self.authenticator.peers))
        return [key in allowed for key in keys]

    def knows(self, peer: TestPeer) -> bool:
        known = peer.peer in self.known
        assert known == self.authenticator.is_allowed(peer.peer)
        return known


@pytest.fixture
async def scene(net: Net, tmp_path: Path) -> Scene:
    return Scene(net, tmp_path)


async def test_only_members_of_the_log_get_in(scene: Scene) -> None:
    """Announcements don't count, in a message or with the coordinator's state."""
    friend, stranger, guest = TestPeer(), TestPeer(), TestPeer()
    scene.members.admit(scene.founder, friend)
    forged = LogBuilder(stranger)
    forged.admit(stranger, guest)
    scene.load(info_of(stranger), info_of(guest))
    assert scene.known == set()
    scene.announce(info_of(friend), info_of(stranger), info_of(guest))
    assert scene.known == {friend.peer}
    assert not scene.knows(stranger)
    scene.load(info_of(friend), info_of(stranger), info_of(guest))
    assert scene.known == {friend.peer}
    # Entries that a stranger signed don't count.
    scene.members.admit(stranger, guest)
    scene.members.admit(guest, stranger)
    scene.load()
    assert scene.known == {friend.peer}


async def test_without_a_log_nobody_gets_in(scene: Scene) -> None:
    scene.announce(info_of(scene.founder))
    scene.directory.load_replica()
    assert scene.known == set()
    scene.load()
    assert scene.known == {scene.founder.peer}


async def test_an_announced_peer_waits_for_its_entry(scene: Scene) -> None:
    """The state comes in another message than the announcement, and may be late."""
    scene.load()
    keys, _ = scene.members.invite(scene.founder)
    early, late = TestPeer(), TestPeer()
    scene.announce(info_of(early, "old"), info_of(early, "new"), info_of(late))
    scene.load()
    assert scene.known == set()
    scene.members.join(keys, early)
    scene.load()
    assert scene.knows(early)
    assert scene.directory.book.name_of(early.peer) == "new"
    # A peer that was removed meanwhile isn't admitted by a later entry.
    scene.directory.on_message(PeerRemoved(peer=late.peer))
    scene.members.admit(scene.founder, late)
    scene.load()
    assert not scene.knows(late)


async def test_a_waiting_peer_with_another_ones_id_stays_out(scene: Scene) -> None:
    scene.load()
    friend, evil = TestPeer(), TestPeer()
    false = structs.replace(info_of(friend), public_key=evil.keys.public)
    scene.announce(false)
    scene.members.admit(scene.founder, friend)
    scene.load(false)
    assert scene.known == set()
    scene.announce(false)
    assert scene.known == set()
    scene.load(info_of(friend))
    assert scene.known == {friend.peer}
    info = scene.directory.book.get_peer(friend.peer)
    assert info is not None
    assert info.public_key == friend.keys.public


async def test_few_peers_wait(scene: Scene) -> None:
    """A coordinator that announces strangers endlessly can't fill the memory."""
    scene.load()
    many = [TestPeer() for _ in range(_MAX_UNPROVEN + 1)]
    scene.announce(*map(info_of, many))
    assert len(scene.directory._unproven) == _MAX_UNPROVEN
    scene.members.admit(scene.founder, many[0], many[-1])
    scene.load()
    assert scene.known == {many[-1].peer}


async def test_a_peer_whose_entry_ends_is_dropped(scene: Scene) -> None:
    leaver, revoked, guest, stays = (TestPeer() for _ in range(4))
    scene.members.admit(scene.founder, leaver, revoked, stays)
    scene.members.admit(revoked, guest)
    infos = [info_of(one) for one in (leaver, revoked, guest, stays)]
    scene.load(*infos)
    assert scene.known == {one.peer for one in infos}
    scene.members.leave(leaver)
    scene.members.revoke(scene.founder, revoked)
    # The coordinator may still announce them.
    scene.load(*infos)
    assert scene.known == {stays.peer}
    assert sorted(scene.gone) == sorted([leaver.peer, revoked.peer, guest.peer])
    assert not any(scene.knows(one) for one in (leaver, revoked, guest))
    scene.announce(*infos)
    assert scene.known == {stays.peer}


async def test_a_readmitted_peer_gets_in_again(scene: Scene) -> None:
    peer = TestPeer()
    scene.members.admit(scene.founder, peer)
    said = scene.members.revoke(scene.founder, peer)
    scene.load(info_of(peer))
    assert not scene.knows(peer)
    scene.members.readmit(scene.founder, said)
    scene.load(info_of(peer))
    assert scene.knows(peer)


async def test_invitations_of_the_log_may_connect(scene: Scene) -> None:
    """Their holders ask where the coordinator runs.

    Strangers' and ended invitations don't count.
    """
    stranger, keys = TestPeer(), []
    for peer in (scene.founder, scene.me, stranger):
        invited, entry = scene.members.invite(peer)
        keys.append(invited.public)
        if peer is scene.founder:
            first = entry
    scene.load()
    assert scene.allowed_of(keys) == [True, True, False]
    scene.members.end(scene.founder, first)
    scene.load()
    assert scene.allowed_of(keys) == [False, True, False]


async def test_the_devices_of_a_pc_are_listed(scene: Scene) -> None:
    devices, another = [TestPeer(), TestPeer()], TestPeer()
    keys, _ = scene.members.invite(scene.me, uses=2)
    for device in devices:
        scene.members.join(keys, device)
    scene.members.admit(scene.founder, another)
    mine = [info_of(one, primary_peer=scene.me.peer) for one in devices]
    scene.load(*mine, info_of(another, primary_peer=scene.founder.peer))
    assert scene.directory.list_devices() == tuple(sorted(one.peer for one in devices))
