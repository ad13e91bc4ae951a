"""A member that lies about the leader, in its answers and unasked."""

from collections import deque
from random import Random
from typing import TYPE_CHECKING

from molink.swarm.election.events import PeerAnsweredEvent
from molink.swarm.election.terms import MAX_ROUND
from molink.wire.messages.election import LeaderView, Lease

if TYPE_CHECKING:
    from tests.dst.daemon import Daemon
    from tests.dst.world import World

#: Seconds between two unasked lies.
_INTERVAL = (0.02, 0.5)


class Liars:
    """The PCs that lie at times, all of one branch. What they compute is correct."""

    def __init__(self, world: "World") -> None:
        self._world = world
        self._rng = Random(world.seed * 9001)
        #: All that ever lie: one or two PCs in a third of the seeds.
        self.known = self._rng.sample(world.pcs, self._rng.choice((1, 1, 2)))
        if world.seed % 3 != 2:
            self.known = []
        self._are_lying = False
        #: Whether all say now that the first of them leads.
        self._are_agreed = False
        #: Leases of all coordinators, which liars collect.
        self.leases: deque[Lease] = deque(maxlen=300)

    def start(self) -> None:
        """Let them lie."""
        self._are_lying = True
        self._speak()

    def stop(self) -> None:
        """End all lies."""
        self._are_lying = False

    def view_of(self, daemon: "Daemon", to: "Daemon", honest: LeaderView) -> LeaderView:
        """What a PC says: ``honest``, unless it lies."""
        if self._are_lying and daemon.pc in self.known:
            return self._lie(daemon, to)
        return honest

    def _speak(self) -> None:
        world = self._world
        if not self._are_lying:
            return
        daemons = [*world.daemons.values()]
        if self._rng.random() < 0.1:
            self._are_agreed = not self._are_agreed
        liars = [one for one in daemons if one.pc in self.known]
        for liar in liars:
            other = self._rng.choice(daemons)
            if other is not liar and not world.network.broken(liar.pc, other.pc):
                lie = PeerAnsweredEvent(liar.peer.id, self._lie(liar, other))
                other.run(other.leadership.on_view, lie)
        event_queue = world.event_queue
        event_queue.schedule_at(event_queue.now + self._rng.uniform(*_INTERVAL), self._speak)

    def _lie(self, liar: "Daemon", to: "Daemon") -> LeaderView:
        rng, peer = self._rng, liar.peer
        known = to.leadership.election
        term = known.term
        agreed = next(one.id for one in self._world.peers if one.pc is self.known[0])
        leader = rng.choice((peer.id, known.leader, agreed, rng.choice(self._world.peers).id))
        leases: list[Lease | None] = [None]
        leases.append(Lease(term=term, leader=leader, clock=1 << 20, signature=b"?" * 64))
        if self.leases:
            leases += [self.leases[-1], rng.choice(self.leases)]
        lease = rng.choice(leases)
        if lease is not None and rng.random() < 0.3:
            leader = lease.leader
        said = rng.choice((0, term, term, term + rng.randrange(1 << 19), MAX_ROUND << 16))
        leads, hears = rng.random() < 0.4, rng.random() < 0.7
        if self._are_agreed:
            leader, said = agreed, term + (1 << 16)
            leads, hears = peer.id == agreed, peer.id != agreed
            lease = Lease(term=said, leader=agreed, clock=0, signature=b"?" * 64)
        return LeaderView(
            term=said,
            leader=leader,
            is_leader=leads,
            hears_leader=hears,
            can_lead=rng.random() < 0.8,
            replica=(rng.choice((0, term, MAX_ROUND << 16)), rng.randrange(100)),
            coordinator_key=f"coordinator of {peer.id}",
            addresses=(peer.pc.name,),
            lease=lease,
        )
