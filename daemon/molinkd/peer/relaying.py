"""This PC as a relay for others, and as an end of detours, as the coordinator says."""

from collections.abc import Callable

from molink.wire.messages.control import ControlMessage
from molink.wire.messages.relaying import CloseRelay, Detour, OpenRelay, RelayOpen
from molinkd.peer.membership.addresses import from_here
from molinkd.peer.membership.detours import Detours
from molinkd.peer.membership.relay import Relay
from molinkd.peer.resources import Resources


class Relaying:
    """Carries out what the coordinator says of relays."""

    def __init__(
        self,
        resources: Resources,
        tell: Callable[[ControlMessage], None],
        on_change: Callable[[str], None],
    ) -> None:
        """``on_change(peer)`` is called when a detour to a member comes or goes."""
        self._resources, self._tell = resources, tell
        settings = resources.settings
        self.detours = Detours(from_here(settings.host), self._ports, on_change)
        self._relay = Relay(settings.host, settings.worker_ports[1])

    def take(self, message: ControlMessage) -> bool:
        """An instruction of the coordinator; ``False`` if it is about something else."""
        match message:
            case OpenRelay():
                port = self._relay.open(message) if self._resources.settings.relay else 0
                self._tell(RelayOpen(id=message.id, port=port))
            case Detour():
                self.detours.take(message)
            case CloseRelay():
                self._relay.stop(message.id)
                self.detours.take(message)
            case _:
                return False
        return True

    async def close(self) -> None:
        """Pass on nothing more, and be reached by no detour."""
        await self.detours.close()
        await self._relay.close()

    def _ports(self) -> set[int]:
        """What a detour may lead to: those sockets of ours that every member may dial."""
        first, last = self._resources.settings.worker_ports
        return {self._resources.server.port, *(range(first, last + 1) if first else ())}
