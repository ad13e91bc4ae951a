"""The known peers: who may connect, who is reachable, and pending invitations."""

import asyncio
import logging
from collections.abc import Callable

from molink.facts.identity import derive_peer_id
from molink.swarm.membership.address_book import AddressBook
from molink.swarm.placement.links import MAX_NEARBY_LATENCY
from molink.wire.messages.instructions import PeerInfo, PeerRemoved, StageAddress
from molink.wire.messages.worker_pipe import PeerKey
from molink.wire.sockets.create_socket import endpoints
from molinkd.peer.election.leadership import ReplicaFile
from molinkd.peer.membership.peer_prober import PeerProber, ProbeResult
from molinkd.peer.membership.relayed_routes import RelayedRoutes
from molinkd.peer.resources import Resources

log = logging.getLogger(__name__)

#: Time for a new session to list all peers, in seconds.
SWEEP_S = 5.0
#: Announced peers that wait for their entry in the membership log.
_MAX_UNPROVEN = 64
#: Delay of disconnecting, so that a pending reply is sent, in seconds.
_DISCONNECT_DELAY_S = 0.2


class PeerDirectory:
    """The peers listed by the coordinator, or by the replica of its state."""

    def __init__(
        self,
        resources: Resources,
        replica: ReplicaFile,
        on_tried: Callable[[str, ProbeResult], None],
        on_change: Callable[[], None],
        on_gone: Callable[[str], None],
        on_loss: Callable[[str, float], None],
        relayed_routes: RelayedRoutes | None = None,
    ) -> None:
        """``on_tried`` gets a peer and how it was reached.

        ``on_gone(peer)`` is called before ``on_change()`` when a peer was removed. ``on_loss`` gets
        a peer and the share of packets lost on the way to it.
        """
        self._resources, self._replica = resources, replica
        self._on_change, self._on_removed = on_change, on_gone
        self.book = AddressBook(PeerKey(peer=resources.me, public_key=resources.keys.public))
        self.book.on_peer_changed = self._on_peer_added
        self.book.on_peer_removed = self._on_peer_removed
        self._prober = PeerProber(
            resources.context,
            resources.keys,
            on_tried,
            on_loss,
            relayed_routes,
            lambda: endpoints(resources.addresses, resources.server.port),
        )
        self._sweep: asyncio.TimerHandle | None = None
        #: Invitations whose holders are redirected to the coordinator.
        self._invitations: frozenset[str] = frozenset()
        #: Announced peers that are no members by the log of this PC, which may be late.
        self._unproven: dict[str, PeerInfo] = {}

    def retry_peer(self, peer: str) -> None:
        """Probe a peer again, whose route has changed."""
        self._prober.retry_peer(peer)

    def on_welcome(self) -> None:
        """Start a session: peers that it does not list in time are removed."""
        self.book.mark_unconfirmed()
        self._prober.report_all()
        if self._sweep is not None:
            self._sweep.cancel()
        self._sweep = asyncio.get_running_loop().call_later(SWEEP_S, self.book.drop_unconfirmed)

    def on_message(self, message: PeerInfo | PeerRemoved) -> None:
        """Handle the coordinator's message about a peer."""
        if isinstance(message, PeerRemoved):
            self._unproven.pop(message.peer, None)
            self.book.remove_peer(message.peer)
        elif not self._is_member(message.peer):
            self._unproven[message.peer] = message
            if len(self._unproven) > _MAX_UNPROVEN:
                del self._unproven[next(iter(self._unproven))]
        elif not self.book.add_peer(message):
            log.warning("the coordinator announced a peer with a mismatched id")

    def _is_member(self, peer: str) -> bool:
        held = self._replica.replica
        return held is not None and held.log.is_member(peer)

    def is_member_stage(self, stage: StageAddress) -> bool:
        """Whether a stage is of this PC or of a member, under that member's own key."""
        return stage.peer == derive_peer_id(stage.public_key) and (
            stage.peer == self._resources.me or self._is_member(stage.peer)
        )

    def list_devices(self) -> tuple[str, ...]:
        """The further devices of this PC, which are peers too."""
        others = self.book.peers - {self._resources.me}
        infos = (self.book.get_peer(peer) for peer in sorted(others))
        return tuple(
            one.peer for one in infos if one is not None and one.primary_peer == self._resources.me
        )

    def load_replica(self) -> None:
        """Follow the replica: its members and invitations may connect, nobody else."""
        held = self._replica.replica
        if held is None:
            return
        for peer in self.book.peers - {self._resources.me}:
            if not held.log.is_member(peer):
                self.book.remove_peer(peer)
        for peer in list(self._unproven):
            if held.log.is_member(peer):
                self.book.add_peer(self._unproven.pop(peer))
        for member in held.members:
            known = self.book.get_peer(member.peer) is not None
            if member.standing == "member" and member.announced is not None and not known:
                self.book.add_peer(member.announced)
        invitations = {one.id: one.public_key for one in held.log.list_invitations()}
        for id in self._invitations - invitations.keys():
            self._resources.authenticator.deny_peer(id)
        for id in invitations.keys() - self._invitations:
            self._resources.authenticator.allow_peer(invitations[id], id)
        self._invitations = frozenset(invitations)

    def is_nearby(self, peer: str) -> bool:
        """Whether a peer is on the local network, or its latency is unknown."""
        latency = self._prober.known_latency(peer)
        return latency is None or latency <= MAX_NEARBY_LATENCY

    async def close(self) -> None:
        """Stop probing."""
        if self._sweep is not None:
            self._sweep.cancel()
        await self._prober.close()

    def _on_peer_added(self, info: PeerInfo) -> None:
        self._resources.authenticator.allow_peer(info.public_key)
        if info.peer != self._resources.me:
            self._prober.add_peer(info)
        self._on_change()

    def _on_peer_removed(self, peer: str) -> None:
        # Its messages are rejected at once. Disconnecting is delayed: it resets all connections,
        # and the command line may wait for a reply about this very removal.
        self._resources.authenticator.deny_peer(peer)
        asyncio.get_running_loop().call_later(_DISCONNECT_DELAY_S, self._disconnect_peer, peer)
        self._resources.banned_peers.drop_peer(peer)
        self._on_removed(peer)
        self._prober.drop_peer(peer)
        self._on_change()

    def _disconnect_peer(self, peer: str) -> None:
        if self.book.get_peer(peer) is None:
            self._resources.server.drop_peer(peer)
