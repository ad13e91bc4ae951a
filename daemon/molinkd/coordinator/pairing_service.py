"""Pairing at the coordinator: the listener, the membership, and the notified owners."""

import logging

from molink.errors import RequestError
from molink.facts.identity import derive_peer_id
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

#: Characters of an address in a pairing result.
_MAX_ADDRESS = 64


class PairingService:
    """Runs the pairing listener, if discovery is enabled."""

    def __init__(
        self,
        options: CoordinatorOptions,
        swarm: SwarmRecord,
        membership: Membership,
        fleet: Fleet,
        connections: PeerConnections,
    ) -> None:
        self._options, self._swarm = options, swarm
        self._membership, self._fleet, self._connections = membership, fleet, connections
        self._listener: PairingListener | None = None

    def open(self, coordinator_port: int, addresses: tuple[str, ...]) -> None:
        """Start the listener, if enabled; admitted PCs receive ``addresses``."""
        options, swarm = self._options, self._swarm
        if options.pairing_port is None:
            return
        advertised = tuple(one for one in addresses if len(one) <= _MAX_ADDRESS)
        config = PairingConfig(
            swarm.id,
            swarm.name,
            swarm.public_key,
            self._find_objection,
            lambda: (coordinator_port, advertised),
            self._publish_pending,
        )
        listener = PairingListener(config)
        try:
            listener.open(options.host, options.pairing_port)
        except OSError as error:
            log.warning("pairing is disabled: %s", error)
            return
        self._listener = listener

    async def close(self) -> None:
        """Stop the listener."""
        listener, self._listener = self._listener, None
        if listener is not None:
            await listener.close()

    def on_timer(self) -> None:
        """Expire pending requests."""
        if self._listener is not None:
            self._listener.on_timer()

    @property
    def port(self) -> int:
        """Port of the listener; 0 without one."""
        return 0 if self._listener is None else self._listener.port

    @property
    def pending_requests(self) -> list[PairingRequest]:
        """Requests that await a decision."""
        return [] if self._listener is None else self._listener.pending_requests

    def require_listener(self) -> PairingListener:
        """The listener.

        Raises:
            RequestError: pairing is disabled.
        """
        if self._listener is None:
            raise RequestError(
                "pairing is disabled: the leading PC has `discovery = false`, runs only `molink "
                "coordinator`, or had no free port. `molink invite` prints a token instead"
            )
        return self._listener

    def notify_peer(self, peer: str) -> None:
        """Send pending requests to an owner or the leader; others see them in the status."""
        if self.pending_requests:
            self._send_pending(peer)

    def _send_pending(self, peer: str) -> None:
        if self._membership.records[peer].is_owner or peer == self._options.leader:
            pairings = tuple(
                PendingPairing(name=one.name, code=one.code, address=one.address)
                for one in self.pending_requests
            )
            self._connections.send_to_peer(peer, PendingPairings(pairings=pairings))

    def _publish_pending(self) -> None:
        for peer in self._fleet.registry.sessions:
            self._send_pending(peer)

    def _find_objection(self, public_key: str) -> PairingOutcome | None:
        objection = self._membership.find_objection(public_key)
        if objection is None and self._fleet.registry.is_live(derive_peer_id(public_key)):
            return "duplicate"
        return objection
