"""The members of the swarm, as announced by the coordinator."""

from collections.abc import Callable

import msgspec

from molink.facts.identity import derive_peer_id
from molink.swarm.membership.sanitize import sanitize_name
from molink.wire.messages.instructions import PeerInfo
from molink.wire.messages.worker_pipe import PeerKey, PeerKeys


class AddressBook:
    """All other members. A peer's id always matches its key."""

    def __init__(self, own_key: PeerKey) -> None:
        self._own_key = own_key
        self._peers: dict[str, PeerInfo] = {}
        #: Peers that the coordinator has not announced in this session yet.
        self._unconfirmed: set[str] = set()
        #: Called with a new or changed peer.
        self.on_peer_changed: Callable[[PeerInfo], None] = lambda _: None
        #: Called with the id of a removed peer.
        self.on_peer_removed: Callable[[str], None] = lambda _: None

    def add_peer(self, info: PeerInfo) -> bool:
        """Add an announced peer under a sanitized name; ``False`` if its id isn't its key's."""
        if info.peer != derive_peer_id(info.public_key):
            return False
        info = msgspec.structs.replace(info, name=sanitize_name(info.name, info.peer))
        self._unconfirmed.discard(info.peer)
        if info.peer != self._own_key.peer and self._peers.get(info.peer) != info:
            self._peers[info.peer] = info
            self.on_peer_changed(info)
        return True

    def remove_peer(self, peer: str) -> None:
        """Remove a peer that left or was revoked."""
        self._unconfirmed.discard(peer)
        if self._peers.pop(peer, None) is not None:
            self.on_peer_removed(peer)

    def mark_unconfirmed(self) -> None:
        """Start a session, in which the coordinator announces all members again."""
        self._unconfirmed = set(self._peers)

    def drop_unconfirmed(self) -> None:
        """Remove peers that left between two sessions, some time into the new one."""
        for peer in sorted(self._unconfirmed):
            self.remove_peer(peer)
        self._unconfirmed.clear()

    def get_peer(self, peer: str) -> PeerInfo | None:
        """Return the peer with this id."""
        return self._peers.get(peer)

    def name_of(self, peer: str) -> str:
        """Return a peer's display name, or the id itself if unknown."""
        info = self._peers.get(peer)
        return peer if info is None else info.name

    @property
    def peers(self) -> frozenset[str]:
        """Ids of all members, including this peer."""
        return frozenset((self._own_key.peer, *self._peers))

    def peer_keys(self) -> PeerKeys:
        """Keys of all members, including this peer, for workers."""
        others = (PeerKey(peer=one.peer, public_key=one.public_key) for one in self._peers.values())
        return PeerKeys(peers=(self._own_key, *others))
