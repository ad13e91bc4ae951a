"""PCs that knock: the porch, the door that lets them in, and the people who are told of them."""

import logging
from collections.abc import Callable

from molink.errors import RequestError
from molink.facts.identity import peer_id
from molink.swarm.controller.events import Event, MemberAdded
from molink.swarm.controller.fleet import Fleet
from molink.swarm.controller.records import SwarmRecord
from molink.swarm.membership.knocks import Waiting
from molink.wire.messages.instructions import Knocking, KnockingPc
from molink.wire.messages.porch import Outcome
from molinkd.coordinator.arguments import Options
from molinkd.coordinator.connections import PeerConnections
from molinkd.coordinator.door import Door
from molinkd.coordinator.porch import House, Porch

log = logging.getLogger(__name__)

#: Characters of an address that is told to a PC which was let in.
_MAX_ADDRESS = 64


class Reception:
    """Looks after those who stand on the porch, if this coordinator has one."""

    def __init__(
        self,
        options: Options,
        swarm: SwarmRecord,
        door: Door,
        fleet: Fleet,
        connections: PeerConnections,
        happened: Callable[[Event], None],
    ) -> None:
        self._options, self._swarm = options, swarm
        self._door, self._fleet = door, fleet
        self._connections, self._happened = connections, happened
        self._porch: Porch | None = None

    def open(self, coordinator_port: int, addresses: tuple[str, ...]) -> None:
        """Let PCs knock, if that is wanted; ``addresses`` are told to those who are let in."""
        options, swarm = self._options, self._swarm
        if options.porch is None:
            return
        told = tuple(one for one in addresses if len(one) <= _MAX_ADDRESS)
        house = House(
            swarm.id,
            swarm.name,
            swarm.public_key,
            self._objection,
            self._admit,
            lambda: (coordinator_port, told),
            self._changed,
        )
        porch = Porch(house)
        try:
            porch.open(options.host, options.porch)
        except OSError as error:
            log.warning("no PC can join without a token: %s", error)
            return
        self._porch = porch

    async def close(self) -> None:
        """Send everybody away."""
        porch, self._porch = self._porch, None
        if porch is not None:
            await porch.close()

    def tick(self) -> None:
        """Time has passed."""
        if self._porch is not None:
            self._porch.tick()

    @property
    def port(self) -> int:
        """Where PCs may knock; 0 if nowhere."""
        return 0 if self._porch is None else self._porch.port

    @property
    def waiting(self) -> list[Waiting]:
        """PCs that wait for a person."""
        return [] if self._porch is None else self._porch.waiting

    def judge(self, code: str, by: str, *, refuse: bool) -> str:
        """Let the PC in that shows ``code``, or refuse it; returns its name.

        Raises:
            RequestError: nobody can knock, or there is no such PC.
            Unavailable: the swarm is full.
            Overloaded: too many join at this moment.
        """
        if self._porch is None:
            raise RequestError(
                "no PC can knock here: the PC that leads the swarm has `discovery = false`, runs "
                "`molink coordinator` alone, or had no free port. `molink invite` prints a token"
            )
        return self._porch.judge(code, by, refuse=refuse)

    def tell(self, peer: str) -> None:
        """Tell an owner, or the PC that leads, who waits; others see it in the status."""
        if self.waiting:
            self._tell(peer)

    def _tell(self, peer: str) -> None:
        if self._door.records[peer].owner or peer == self._options.leader:
            knocks = (KnockingPc(name=k.name, code=k.code, address=k.address) for k in self.waiting)
            self._connections.tell(peer, Knocking(knocks=tuple(knocks)))

    def _changed(self) -> None:
        for peer in self._fleet.registry.sessions:
            self._tell(peer)

    def _objection(self, public_key: str) -> Outcome | None:
        objection = self._door.objection(public_key)
        if objection is None and self._fleet.registry.live(peer_id(public_key)):
            return "twin"
        return objection

    def _admit(self, public_key: str, name: str, by: str) -> None:
        member = self._door.admit(public_key, name, by)
        log.info("%s (%s) knocked, and was let in by %s", member.name, member.peer, by)
        if member.peer not in self._fleet.registry.members:
            self._happened(MemberAdded(member))
