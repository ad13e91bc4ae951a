"""Each peer's latest connection, over which messages are sent to it."""

import asyncio
import logging
import time
from collections.abc import Callable

from molink.swarm.membership.duplicate_peers import DuplicatePeers
from molink.wire.messages.control_plane import ControlMessage
from molink.wire.messages.instructions import KeepAlive
from molink.wire.sockets.server import Server

log = logging.getLogger(__name__)

#: Seconds from the end of a connection until sending to its identity fails.
_PROBE_DELAY = 0.1


class PeerConnections:
    """Sends messages to peers, and detects lost connections."""

    def __init__(self, server: Server[ControlMessage], on_lost: Callable[[str], None]) -> None:
        """``on_lost(peer)`` is called after a peer's connection has ended."""
        self._server, self._on_lost = server, on_lost
        self._identities: dict[str, bytes] = {}
        self._duplicates = DuplicatePeers()
        self._probe_timer: asyncio.TimerHandle | None = None

    def is_duplicate(self, peer: str, identity: bytes) -> bool:
        """Whether a report comes from another PC with this peer's key."""
        return self._duplicates.observe_connection(peer, identity, time.monotonic())

    def update_connection(self, peer: str, identity: bytes) -> bool:
        """Record the connection of a report; returns whether it is a new one."""
        is_new = self._identities.get(peer) != identity
        self._identities[peer] = identity
        return is_new

    def drop_peer(self, peer: str) -> None:
        """Drop a peer that said goodbye or is no longer a member."""
        self._identities.pop(peer, None)
        self._duplicates.drop_peer(peer)

    def send_to_peer(
        self, peer: str, message: ControlMessage, payload: bytes | None = None
    ) -> None:
        """Send to a peer; failures are only logged."""
        identity = self._identities.get(peer)
        try:
            if identity is None or not self._server.send(identity, message, payload):
                log.info("not connected: %s did not get a %s", peer, type(message).__name__)
        except Exception:
            log.exception("failed to send %s a %s", peer, type(message).__name__)

    def disconnect_peer(self, peer: str) -> None:
        """Disconnect a peer and refuse its key."""
        self._server.drop_peer(peer)

    def on_disconnect(self) -> None:
        """Schedule a check of whose connection ended.

        It runs a little later, since strangers' connections may end in large numbers.
        """
        if self._probe_timer is None:
            loop = asyncio.get_running_loop()
            self._probe_timer = loop.call_later(_PROBE_DELAY, self._probe_connections)

    def close(self) -> None:
        """Stop the timer."""
        if self._probe_timer is not None:
            self._probe_timer.cancel()

    def _probe_connections(self) -> None:
        self._probe_timer = None
        for peer, identity in list(self._identities.items()):
            if not self._server.send(identity, KeepAlive()):
                self.drop_peer(peer)
                self._on_lost(peer)
