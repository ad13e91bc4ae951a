"""Whom this peer knows: who may talk to it, who can be reached, and whom it sends on."""

import asyncio
import logging
from collections.abc import Callable

from molink.swarm.membership.address_book import AddressBook
from molink.wire.messages.instructions import Member, MemberGone
from molink.wire.messages.pipe import MemberKey
from molinkd.peer.election.replica_file import ReplicaFile
from molinkd.peer.membership.detours import Detours
from molinkd.peer.membership.probe import Prober
from molinkd.peer.resources import Resources

log = logging.getLogger(__name__)

#: Until a new session has named all members, in seconds.
SWEEP_S = 5.0
#: Until an answer is out, before connections are cut, in seconds.
_CUT_DELAY_S = 0.2
#: One way to a PC on the same local network, at most, in seconds; also by Wi-Fi.
NEAR_S = 0.005


class KnownMembers:
    """The members that the coordinator has named, or that the copy of its state names."""

    def __init__(
        self,
        resources: Resources,
        replica: ReplicaFile,
        on_tried: Callable[[str, bool, float | None, bool], None],
        on_change: Callable[[], None],
        on_gone: Callable[[str], None],
        detours: Detours | None = None,
    ) -> None:
        """``on_tried`` is told of each try to reach a member, whether it was reached, its latency.

        And whether by one of the ``detours``. ``on_gone(peer)`` is called before ``on_change()``
        when one is no member any more.
        """
        self._resources, self._replica = resources, replica
        self._on_change, self._on_gone = on_change, on_gone
        self.book = AddressBook(MemberKey(peer=resources.me, public_key=resources.keys.public))
        self.book.on_member = self._came
        self.book.on_gone = self._went
        self._prober = Prober(resources.context, resources.keys, on_tried, detours)
        self._sweep: asyncio.TimerHandle | None = None
        #: Invitations whose holders this peer sends on to the coordinator.
        self._invitations: frozenset[str] = frozenset()

    def retry(self, peer: str) -> None:
        """There is another way to a member than before."""
        self._prober.again(peer)

    def welcomed(self) -> None:
        """A session has begun: those that it does not name in time are members no more."""
        self.book.welcomed()
        self._prober.repeat()
        if self._sweep is not None:
            self._sweep.cancel()
        self._sweep = asyncio.get_running_loop().call_later(SWEEP_S, self.book.sweep)

    def take(self, message: Member | MemberGone) -> None:
        """What the coordinator says of a member."""
        if isinstance(message, MemberGone):
            self.book.remove(message.peer)
        elif not self.book.add(message):
            log.warning("the coordinator announces a member by another's id")

    def remember(self) -> None:
        """Whom this peer knows without a coordinator, and who may be sent on to one."""
        held = self._replica.held
        if held is None:
            return
        for member in held.members:
            known = self.book.get(member.peer) is not None
            if member.standing == "member" and member.announced is not None and not known:
                self.book.add(member.announced)
        invitations = {one.id: one.public_key for one in held.invitations}
        for id in self._invitations - invitations.keys():
            self._resources.gatekeeper.deny(id)
        for id in invitations.keys() - self._invitations:
            self._resources.gatekeeper.allow(invitations[id], id)
        self._invitations = frozenset(invitations)

    def near(self, peer: str) -> bool:
        """Whether a member is on the same local network, as far as is known: if not, it is."""
        away = self._prober.away(peer)
        return away is None or away <= NEAR_S

    async def close(self) -> None:
        """Try no more, and forget nobody."""
        if self._sweep is not None:
            self._sweep.cancel()
        await self._prober.close()

    def _came(self, member: Member) -> None:
        self._resources.gatekeeper.allow(member.public_key)
        if member.peer != self._resources.me:
            self._prober.member(member)
        self._on_change()

    def _went(self, peer: str) -> None:
        # Nothing that it sends counts any more; cutting its connection cuts all others too, and
        # the command line may wait for the answer to just this.
        self._resources.gatekeeper.deny(peer)
        asyncio.get_running_loop().call_later(_CUT_DELAY_S, self._cut, peer)
        self._resources.offenders.forget(peer)
        self._on_gone(peer)
        self._prober.forget(peer)
        self._on_change()

    def _cut(self, peer: str) -> None:
        if self.book.get(peer) is None:
            self._resources.server.deny(peer)
