"""Relays between members of which one can't connect to the other: tells the three about them."""

import logging
import secrets
from collections.abc import Callable

from molink.swarm.controller.events import SendMessage, Tried
from molink.swarm.controller.relays import Event, Relays
from molink.wire.messages.control import ControlMessage

log = logging.getLogger(__name__)


class RelayOffice:
    """Carries out what :class:`~molink.swarm.controller.relays.Relays` decides."""

    def __init__(
        self,
        tell: Callable[[str, ControlMessage], None],
        happened: Callable[[Tried], None],
    ) -> None:
        """``happened`` is told of ways that are closed again."""
        self._tell, self._happened = tell, happened
        self._relays = Relays(lambda: secrets.token_bytes(38))

    def handle(self, event: Event) -> None:
        """Let the decider decide."""
        before = self._relays.ways
        for decision in self._relays.handle(event):
            if isinstance(decision, SendMessage):
                self._tell(decision.peer, decision.message)
            else:
                self._happened(decision)
        ways = self._relays.ways
        if ways != before:
            log.info("relays: %s", ", ".join(f"{a} to {b} by {c}" for (a, b), c in ways.items()))

    @property
    def shown(self) -> list[dict[str, str]]:
        """For the status."""
        return [
            {"from": by, "to": to, "through": through}
            for (by, to), through in self._relays.ways.items()
        ]
