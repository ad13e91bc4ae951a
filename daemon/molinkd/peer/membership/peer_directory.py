"""Whom this peer knows: who may talk to it, who can be reached, and whom it sends on."""

import asyncio
import logging
from collections.abc import Callable

from molink.swarm.membership.address_book import AddressBook
from molink.wire.messages.instructions import PeerInfo, PeerRemoved
from molink.wire.messages.worker_pipe import PeerKey
from molinkd.peer.election.replica_file import ReplicaFile
from molinkd.peer.membership.peer_prober import PeerProber
from molinkd.peer.membership.relayed_routes import RelayedRoutes
from molinkd.peer.resources import Resources

log = logging.getLogger(__name__)

#: Until a new session has named all members, in seconds.
SWEEP_S = 5.0
#: Until an answer is out, before connections are cut, in seconds.
_DISCONNECT_DELAY_S = 0.2
#: One way to a PC on the same local network, at most, in seconds; also by Wi-Fi.
MAX_NEARBY_LATENCY_S = 0.005


class PeerDirectory:
    """The members that the coordinator has named, or that the copy of its state names."""

    def __init__(
        self,
        resources: Resources,
        replica: ReplicaFile,
        on_tried: Callable[[str, bool, float | None, bool], None],
        on_change: Callable[[], None],
        on_gone: Callable[[str], None],
        relayed_routes: RelayedRoutes | None = None,
    ) -> None:
        """``on_tried`` is told of each try to reach a member, whether it was reached, its latency.

        And whether by one of the ``relayed_routes``. ``on_gone(peer)`` is called before
        ``on_change()`` when one is no member any more.
        """
        self._resources, self._replica = resources, replica
        self._on_change, self._on_removed = on_change, on_gone
        self.book = AddressBook(PeerKey(peer=resources.me, public_key=resources.keys.public))
        self.book.on_peer_changed = self._on_peer_added
        self.book.on_peer_removed = self._on_peer_removed
        self._prober = PeerProber(resources.context, resources.keys, on_tried, relayed_routes)
        self._sweep: asyncio.TimerHandle | None = None
        #: Invitations whose holders this peer sends on to the coordinator.
        self._invitations: frozenset[str] = frozenset()

    def retry_peer(self, peer: str) -> None:
        """There is another way to a member than before."""
        self._prober.retry_peer(peer)

    def on_welcome(self) -> None:
        """A session has begun: those that it does not name in time are members no more."""
        self.book.mark_unconfirmed()
        self._prober.report_all()
        if self._sweep is not None:
            self._sweep.cancel()
        self._sweep = asyncio.get_running_loop().call_later(SWEEP_S, self.book.drop_unconfirmed)

    def on_message(self, message: PeerInfo | PeerRemoved) -> None:
        """What the coordinator says of a member."""
        if isinstance(message, PeerRemoved):
            self.book.remove_peer(message.peer)
        elif not self.book.add_peer(message):
            log.warning("the coordinator announces a member by another's id")

    def load_replica(self) -> None:
        """Whom this peer knows without a coordinator, and who may be sent on to one."""
        held = self._replica.replica
        if held is None:
            return
        for member in held.members:
            known = self.book.get_peer(member.peer) is not None
            if member.standing == "member" and member.announced is not None and not known:
                self.book.add_peer(member.announced)
        invitations = {one.id: one.public_key for one in held.invitations}
        for id in self._invitations - invitations.keys():
            self._resources.authenticator.deny_peer(id)
        for id in invitations.keys() - self._invitations:
            self._resources.authenticator.allow_peer(invitations[id], id)
        self._invitations = frozenset(invitations)

    def is_nearby(self, peer: str) -> bool:
        """Whether a member is on the same local network, as far as is known: if not, it is."""
        latency = self._prober.known_latency(peer)
        return latency is None or latency <= MAX_NEARBY_LATENCY_S

    async def close(self) -> None:
        """Try no more, and forget nobody."""
        if self._sweep is not None:
            self._sweep.cancel()
        await self._prober.close()

    def _on_peer_added(self, member: PeerInfo) -> None:
        self._resources.authenticator.allow_peer(member.public_key)
        if member.peer != self._resources.me:
            self._prober.add_peer(member)
        self._on_change()

    def _on_peer_removed(self, peer: str) -> None:
        # Nothing that it sends counts any more; cutting its connection cuts all others too, and
        # the command line may wait for the answer to just this.
        self._resources.authenticator.deny_peer(peer)
        asyncio.get_running_loop().call_later(_DISCONNECT_DELAY_S, self._disconnect_peer, peer)
        self._resources.banned_peers.drop_peer(peer)
        self._on_removed(peer)
        self._prober.drop_peer(peer)
        self._on_change()

    def _disconnect_peer(self, peer: str) -> None:
        if self.book.get_peer(peer) is None:
            self._resources.server.drop_peer(peer)
