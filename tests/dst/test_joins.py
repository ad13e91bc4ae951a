"""PCs join while a swarm is in two parts; both are members once the parts have met."""

from random import Random

import pytest

from molink.swarm.election.leader_election import LeaderElection
from molink.swarm.membership.membership_log import MembershipLog
from molink.wire.messages.membership import AdmissionEntry, sign_entry
from tests.dst.coordinator import Coordinator
from tests.dst.daemon import Peer
from tests.dst.leadership import Membership
from tests.dst.membership import peer_of
from tests.dst.process import Failure, Pc
from tests.dst.world import World

SEEDS = range(20)
#: Seconds of the partition, and from its beginning until a PC joins each part.
BEGINS, JOINS, ENDS = 6.0, 17.0, 25.0


def join(world: World, coordinator: Coordinator, approver: str, name: str) -> Pc:
    """A member in the coordinator's part admits a PC, which starts."""
    pc = Pc(world.event_queue, name, len(world.pcs))
    signer, joiner, disk = peer_of(approver), peer_of(name), coordinator.disk
    entry = AdmissionEntry(signer.verify_key, joiner.verify_key, name, world.event_queue.now)
    signed = sign_entry(disk.log.swarm, signer.keys.signer, entry)
    coordinator.change_log(disk.log.with_entries([signed]))
    follows = Membership(coordinator.term, coordinator.leader, coordinator.key, coordinator.pc.name)
    world.pcs.append(pc)
    world.network.pcs[name] = pc
    world.peers.append(Peer(pc, joiner.keys.public, joiner.peer, follows, disk.replica()))
    world.start_daemon(pc)
    return pc


def join_both_parts(seed: int) -> World:
    """Split a swarm, have a PC join each part, and let the parts meet."""
    world = World(seed, faults=False)
    world.liars.known = []
    event_queue, network, rng = world.event_queue, world.network, Random(seed)
    far = rng.sample(world.pcs, rng.randrange(1, len(world.pcs)))
    near = [pc for pc in world.pcs if pc not in far]
    cut: list[tuple[Pc, Pc]] = []

    def keep_apart() -> None:
        pairs = [pair for one in near for pc in far for pair in ((one, pc), (pc, one))]
        added = [pair for pair in pairs if pair not in cut]
        cut.extend(added)
        network.cut(added)

    def join_each() -> None:
        leading = {one.pc: one for one in world.coordinators()}
        for number, part in enumerate((near, far)):
            (leader,) = [pc for pc in part if pc in leading]
            part.append(join(world, leading[leader], rng.choice(part).name, f"new{number}"))
        keep_apart()

    event_queue.schedule_at(BEGINS, keep_apart)
    event_queue.schedule_at(JOINS, join_each)
    event_queue.schedule_at(ENDS, lambda: network.heal(cut))
    world.faults.until, world.faults.long = ENDS, True
    world.run()
    return world


def check_members(world: World) -> None:
    """One leads, and every PC has both newcomers as members, under names of their own."""
    (coordinator,) = world.coordinators()
    newcomers = {peer_of(f"new{number}").peer for number in range(2)}
    for daemon in world.daemons.values():
        log = daemon.peer.replica.log
        assert newcomers <= log.branches.keys(), f"{daemon} of {world.seed}"
        assert log.digest == coordinator.disk.log.digest
        names = [one.name for one in log.list_members({})]
        assert len(set(names)) == len(names)
    assert newcomers <= coordinator.fleet.registry.sessions.keys()


def run_seeds() -> int:
    """Check all seeds; returns how often a leader made room for that of the other part."""
    rivals = 0
    for seed in SEEDS:
        world = join_both_parts(seed)
        check_members(world)
        rivals += world.monitor.counts["steps_down"]
    return rivals


def test_pcs_that_join_two_parts_are_members_of_the_whole() -> None:
    assert run_seeds() > len(SEEDS) // 2


def test_counting_the_other_parts_unknown_members_is_detected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Then each leader counts more followers than it has, and both keep raising their terms."""
    count = LeaderElection._count_votes

    def count_all(self: LeaderElection, leader: str, now: float, *_: object) -> int:
        return count(self, leader, now)

    monkeypatch.setattr(LeaderElection, "_count_votes", count_all)
    with pytest.raises((Failure, ValueError)):
        run_seeds()


def test_forgetting_the_other_parts_entries_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MembershipLog, "merge_log", lambda self, other: other)
    with pytest.raises((Failure, AssertionError, KeyError)):
        run_seeds()
