"""Carries out the coordinator's orders about relays."""

import logging
from collections.abc import Callable

import msgspec

from molink.wire.messages.control_plane import ControlMessage
from molink.wire.messages.peer_reports import MAX_LATENCY, ReachReport
from molink.wire.messages.relay import CloseRelay, OpenRelay, RelayedRoute, RelayOpened
from molink.wire.messages.rendezvous import derive_session_secret
from molinkd.peer.membership.addresses import local_dial_host
from molinkd.peer.membership.relay_server import RelayServer
from molinkd.peer.membership.relayed_routes import RelayedRoutes, RouteEvents
from molinkd.peer.resources import Resources

log = logging.getLogger(__name__)


class RelayController:
    """Carries out the coordinator's orders about relays."""

    def __init__(
        self,
        resources: Resources,
        send: Callable[[ControlMessage], None],
        on_change: Callable[[str], None],
    ) -> None:
        """``on_change(peer)`` is called when a relayed route to a peer is added or removed."""
        self._resources, self._send = resources, send
        settings = resources.settings
        self.routes = RelayedRoutes(
            local_dial_host(settings.host),
            self._allowed_ports,
            RouteEvents(on_change, self._report_failed, self._report_tried),
            resources.me,
        )
        self._relay = RelayServer(settings.host, max(settings.member_ports, default=0))

    def on_message(self, message: ControlMessage) -> bool:
        """Handle an order; returns whether it is about relays."""
        match message:
            case OpenRelay():
                is_allowed = self._resources.settings.relay or message.is_end
                port = self._relay.open_relay(message) if is_allowed else 0
                self._send(RelayOpened(id=message.id, port=port))
            case RelayedRoute() if message.addresses:
                self.routes.on_message(message)
            case RelayedRoute():
                self._open_at_rendezvous(message)
            case CloseRelay():
                self._relay.close_relay(message.id)
                self.routes.on_message(message)
            case _:
                return False
        return True

    @property
    def rendezvous_place(self) -> str:
        """``host:port`` of the rendezvous where this PC is registered; empty without one."""
        known = self._resources.rendezvous
        return known.address.place if known is not None and known.is_registered else ""

    def _open_at_rendezvous(self, route: RelayedRoute) -> None:
        if self._resources.rendezvous is None:
            log.warning("no route to %s: this PC has no rendezvous", route.peer)
            return
        address = self._resources.rendezvous.address
        secret = derive_session_secret(address.secret, route.role, route.id)
        self.routes.on_message(
            msgspec.structs.replace(
                route, addresses=(address.host,), port=address.port, secret=secret
            )
        )

    async def close(self) -> None:
        """Close all relays and routes."""
        await self.routes.close()
        await self._relay.close()

    def _report_failed(self, peer: str, id: int) -> None:
        """Report a relay that passes nothing on."""
        report = ReachReport(peer=peer, is_reachable=False, is_relayed=True, failed_relay=id)
        self._send(report)

    def _report_tried(self, peer: str, id: int, latency: float | None) -> None:
        """Report a relay that was tried beside the used one."""
        if latency is not None:
            latency = min(latency, MAX_LATENCY)
        self._send(
            ReachReport(
                peer=peer,
                is_reachable=latency is not None,
                latency=latency,
                is_relayed=True,
                tried_relay=id,
            )
        )

    def _allowed_ports(self) -> set[int]:
        """Ports that a relayed route may reach: our sockets that every peer may dial."""
        first, last = self._resources.settings.worker_ports
        return {self._resources.server.port, *(range(first, last + 1) if first else ())}
