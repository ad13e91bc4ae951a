"""Sets up relays between members that can't connect directly."""

import logging
import secrets
import time
from collections.abc import Callable

from molink.swarm.controller.events import ConnectionTriedEvent, SendMessageAction
from molink.swarm.controller.relays import RelayEvent, RelayPlanner
from molink.wire.messages.control_plane import ControlMessage

log = logging.getLogger(__name__)


class RelayService:
    """Carries out what :class:`~molink.swarm.controller.relays.RelayPlanner` decides."""

    def __init__(
        self,
        send_to_peer: Callable[[str, ControlMessage], None],
        dispatch_event: Callable[[ConnectionTriedEvent], None],
    ) -> None:
        """``dispatch_event`` receives the routes that are closed."""
        self._send_to_peer, self._dispatch_event = send_to_peer, dispatch_event
        self._relays = RelayPlanner(lambda: secrets.token_bytes(70))

    def handle(self, event: RelayEvent) -> None:
        """Handle an event and carry out the actions."""
        before = self._relays.relay_peers
        for decision in self._relays.handle(event, time.monotonic()):
            if isinstance(decision, SendMessageAction):
                self._send_to_peer(decision.peer, decision.message)
            else:
                self._dispatch_event(decision)
        routes = self._relays.relay_peers
        if routes != before:
            log.info("relays: %s", ", ".join(f"{a} to {b} by {c}" for (a, b), c in routes.items()))

    @property
    def routes(self) -> list[dict[str, str | bool]]:
        """The relayed routes, for the status."""
        punched = self._relays.punched_pairs
        return [
            {"from": pair[0], "to": pair[1], "through": through, "punched": pair in punched}
            for pair, through in self._relays.relay_peers.items()
        ]
