"""PCs that knock: the porch, the door that lets them in, and the people who are told of them."""

import logging
from collections.abc import Callable

from molink.errors import RequestError
from molink.facts.identity import derive_peer_id
from molink.swarm.controller.events import ControllerEvent, MemberAddedEvent
from molink.swarm.controller.fleet import Fleet
from molink.swarm.controller.records import SwarmRecord
from molink.swarm.membership.pairing import PairingRequest
from molink.wire.messages.instructions import PendingPairing, PendingPairings
from molink.wire.messages.pairing import PairingOutcome
from molinkd.coordinator.connections import PeerConnections
from molinkd.coordinator.membership import Membership
from molinkd.coordinator.options import CoordinatorOptions
from molinkd.coordinator.pairing_listener import PairingConfig, PairingListener

log = logging.getLogger(__name__)

#: Characters of an address that is told to a PC which was let in.
_MAX_ADDRESS = 64


class PairingService:
    """Looks after those who stand on the porch, if this coordinator has one."""

    def __init__(
        self,
        options: CoordinatorOptions,
        swarm: SwarmRecord,
        membership: Membership,
        fleet: Fleet,
        connections: PeerConnections,
        dispatch_event: Callable[[ControllerEvent], None],
    ) -> None:
        self._options, self._swarm = options, swarm
        self._membership, self._fleet = membership, fleet
        self._connections, self._dispatch_event = connections, dispatch_event
        self._listener: PairingListener | None = None

    def open(self, coordinator_port: int, addresses: tuple[str, ...]) -> None:
        """Let PCs knock, if that is wanted; ``addresses`` are told to those who are let in."""
        options, swarm = self._options, self._swarm
        if options.pairing_port is None:
            return
        advertised = tuple(one for one in addresses if len(one) <= _MAX_ADDRESS)
        config = PairingConfig(
            swarm.id,
            swarm.name,
            swarm.public_key,
            self._find_objection,
            self._admit_joiner,
            lambda: (coordinator_port, advertised),
            self._publish_pending,
        )
        listener = PairingListener(config)
        try:
            listener.open(options.host, options.pairing_port)
        except OSError as error:
            log.warning("no PC can join without a token: %s", error)
            return
        self._listener = listener

    async def close(self) -> None:
        """Send everybody away."""
        listener, self._listener = self._listener, None
        if listener is not None:
            await listener.close()

    def on_timer(self) -> None:
        """Time has passed."""
        if self._listener is not None:
            self._listener.on_timer()

    @property
    def port(self) -> int:
        """Where PCs may knock; 0 if nowhere."""
        return 0 if self._listener is None else self._listener.port

    @property
    def pending_requests(self) -> list[PairingRequest]:
        """PCs that wait for a person."""
        return [] if self._listener is None else self._listener.pending_requests

    def decide_request(self, code: str, approver: str, *, refuse: bool) -> str:
        """Let the PC in that shows ``code``, or refuse it; returns its name.

        Raises:
            RequestError: nobody can knock, or there is no such PC.
            Unavailable: the swarm is full.
            Overloaded: too many join at this moment.
        """
        if self._listener is None:
            raise RequestError(
                "no PC can knock here: the PC that leads the swarm has `discovery = false`, runs "
                "`molink coordinator` alone, or had no free port. `molink invite` prints a token"
            )
        return self._listener.decide_request(code, approver, refuse=refuse)

    def notify_peer(self, peer: str) -> None:
        """Tell an owner, or the PC that leads, who waits; others see it in the status."""
        if self.pending_requests:
            self._send_pending(peer)

    def _send_pending(self, peer: str) -> None:
        if self._membership.records[peer].is_owner or peer == self._options.leader:
            knocks = (
                PendingPairing(name=k.name, code=k.code, address=k.address)
                for k in self.pending_requests
            )
            self._connections.send_to_peer(peer, PendingPairings(pairings=tuple(knocks)))

    def _publish_pending(self) -> None:
        for peer in self._fleet.registry.sessions:
            self._send_pending(peer)

    def _find_objection(self, public_key: str) -> PairingOutcome | None:
        objection = self._membership.find_objection(public_key)
        if objection is None and self._fleet.registry.is_live(derive_peer_id(public_key)):
            return "twin"
        return objection

    def _admit_joiner(self, public_key: str, name: str, approver: str) -> None:
        member = self._membership.admit_peer(public_key, name, approver)
        log.info("%s (%s) knocked, and was let in by %s", member.name, member.peer, approver)
        if member.peer not in self._fleet.registry.members:
            self._dispatch_event(MemberAddedEvent(member))
