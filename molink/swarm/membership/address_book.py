"""The members of the swarm, as the coordinator announces them, and who may talk to this peer."""

from collections.abc import Callable

from molink.facts.identity import peer_id
from molink.wire.messages.instructions import Member
from molink.wire.messages.pipe import MemberKey, Members


class AddressBook:
    """All members but this peer itself. A member is never more than its key says it is."""

    def __init__(self, me: MemberKey) -> None:
        self._me = me
        self._members: dict[str, Member] = {}
        #: Members that the coordinator hasn't named since it welcomed us last.
        self._unconfirmed: set[str] = set()
        #: Called with a member that is new or has changed.
        self.on_member: Callable[[Member], None] = lambda _: None
        #: Called with the id of a member that is gone.
        self.on_gone: Callable[[str], None] = lambda _: None

    def add(self, member: Member) -> bool:
        """Take in an announcement; ``False`` if it is false (an id that isn't its key's)."""
        if member.peer != peer_id(member.public_key):
            return False
        self._unconfirmed.discard(member.peer)
        if member.peer != self._me.peer and self._members.get(member.peer) != member:
            self._members[member.peer] = member
            self.on_member(member)
        return True

    def remove(self, peer: str) -> None:
        """A member has left or was revoked."""
        self._unconfirmed.discard(peer)
        if self._members.pop(peer, None) is not None:
            self.on_gone(peer)

    def welcomed(self) -> None:
        """A session begins: the coordinator names all members now."""
        self._unconfirmed = set(self._members)

    def sweep(self) -> None:
        """Drop members that went while there was no session; some time after :meth:`welcomed`."""
        for peer in sorted(self._unconfirmed):
            self.remove(peer)
        self._unconfirmed.clear()

    def get(self, peer: str) -> Member | None:
        """The member with that id."""
        return self._members.get(peer)

    def name(self, peer: str) -> str:
        """What people call a member; of anything else, itself."""
        member = self._members.get(peer)
        return peer if member is None else member.name

    @property
    def peers(self) -> frozenset[str]:
        """Ids of all members, this peer included."""
        return frozenset((self._me.peer, *self._members))

    def keys(self) -> Members:
        """All members, this peer included, as workers need them."""
        others = (
            MemberKey(peer=member.peer, public_key=member.public_key)
            for member in self._members.values()
        )
        return Members(members=(self._me, *others))
