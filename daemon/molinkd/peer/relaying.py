"""This PC as a relay, and as an end of relayed routes."""

from collections.abc import Callable

from molink.wire.messages.control_plane import ControlMessage
from molink.wire.messages.relay import CloseRelay, OpenRelay, RelayedRoute, RelayOpened
from molinkd.peer.membership.addresses import local_dial_host
from molinkd.peer.membership.relay_server import RelayServer
from molinkd.peer.membership.relayed_routes import RelayedRoutes
from molinkd.peer.resources import Resources


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
        self.routes = RelayedRoutes(local_dial_host(settings.host), self._allowed_ports, on_change)
        self._relay = RelayServer(settings.host, settings.worker_ports[1])

    def on_message(self, message: ControlMessage) -> bool:
        """Handle an order; returns whether it is about relays."""
        match message:
            case OpenRelay():
                port = self._relay.open_relay(message) if self._resources.settings.relay else 0
                self._send(RelayOpened(id=message.id, port=port))
            case RelayedRoute():
                self.routes.on_message(message)
            case CloseRelay():
                self._relay.close_relay(message.id)
                self.routes.on_message(message)
            case _:
                return False
        return True

    async def close(self) -> None:
        """Close all relays and routes."""
        await self.routes.close()
        await self._relay.close()

    def _allowed_ports(self) -> set[int]:
        """Ports that a relayed route may reach: our sockets that every peer may dial."""
        first, last = self._resources.settings.worker_ports
        return {self._resources.server.port, *(range(first, last + 1) if first else ())}
