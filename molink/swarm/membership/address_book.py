"""The members of the swarm, as the coordinator announces them, and who may talk to this peer."""

from collections.abc import Callable

from molink.facts.identity import derive_peer_id
from molink.wire.messages.instructions import PeerInfo
from molink.wire.messages.worker_pipe import PeerKey, PeerKeys


class AddressBook:
    """All members but this peer itself. A member is never more than its key says it is."""

    def __init__(self, own_key: PeerKey) -> None:
        self._own_key = own_key
        self._peers: dict[str, PeerInfo] = {}
        #: Members that the coordinator hasn't named since it welcomed us last.
        self._unconfirmed: set[str] = set()
        #: Called with a member that is new or has changed.
        self.on_peer_changed: Callable[[PeerInfo], None] = lambda _: None
        #: Called with the id of a member that is gone.
        self.on_peer_removed: Callable[[str], None] = lambda _: None

    def add_peer(self, member: PeerInfo) -> bool:
        """Take in an announcement; ``False`` if it is false (an id that isn't its key's)."""
        if member.peer != derive_peer_id(member.public_key):
            return False
        self._unconfirmed.discard(member.peer)
        if member.peer != self._own_key.peer and self._peers.get(member.peer) != member:
            self._peers[member.peer] = member
            self.on_peer_changed(member)
        return True

    def remove_peer(self, peer: str) -> None:
        """A member has left or was revoked."""
        self._unconfirmed.discard(peer)
        if self._peers.pop(peer, None) is not None:
            self.on_peer_removed(peer)

    def mark_unconfirmed(self) -> None:
        """A session begins: the coordinator names all members now."""
        self._unconfirmed = set(self._peers)

    def drop_unconfirmed(self) -> None:
        """Drop members that went while there was no session; some time after
        :meth:`mark_unconfirmed`."""
        for peer in sorted(self._unconfirmed):
            self.remove_peer(peer)
        self._unconfirmed.clear()

    def get_peer(self, peer: str) -> PeerInfo | None:
        """The member with that id."""
        return self._peers.get(peer)

    def name_of(self, peer: str) -> str:
        """What people call a member; of anything else, itself."""
        member = self._peers.get(peer)
        return peer if member is None else member.name

    @property
    def peers(self) -> frozenset[str]:
        """Ids of all members, this peer included."""
        return frozenset((self._own_key.peer, *self._peers))

    def peer_keys(self) -> PeerKeys:
        """All members, this peer included, as workers need them."""
        others = (
            PeerKey(peer=member.peer, public_key=member.public_key)
            for member in self._peers.values()
        )
        return PeerKeys(peers=(self._own_key, *others))
