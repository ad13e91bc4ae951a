"""The connection on which each peer was last heard: what it is told goes there."""

import asyncio
import logging
import time
from collections.abc import Callable

from molink.swarm.membership.duplicate_peers import DuplicatePeers
from molink.wire.messages.control_plane import ControlMessage
from molink.wire.messages.instructions import KeepAlive
from molink.wire.sockets.server import Server

log = logging.getLogger(__name__)

#: From the end of a connection until its identity can't be sent to any more, in seconds.
_PROBE_DELAY = 0.1


class PeerConnections:
    """Peers that can be told something, and who of them is not connected any more."""

    def __init__(self, server: Server[ControlMessage], on_lost: Callable[[str], None]) -> None:
        """``on_lost(peer)`` is called when a peer's connection has ended."""
        self._server, self._on_lost = server, on_lost
        self._identities: dict[str, bytes] = {}
        self._duplicates = DuplicatePeers()
        self._probe_timer: asyncio.TimerHandle | None = None

    def is_duplicate(self, peer: str, identity: bytes) -> bool:
        """Whether a report comes from a second PC with this peer's key."""
        return self._duplicates.observe_connection(peer, identity, time.monotonic())

    def update_connection(self, peer: str, identity: bytes) -> bool:
        """A peer reports on a connection; whether that is another one than before."""
        is_new = self._identities.get(peer) != identity
        self._identities[peer] = identity
        return is_new

    def drop_peer(self, peer: str) -> None:
        """A peer has gone in good order, or is no member any more."""
        self._identities.pop(peer, None)
        self._duplicates.drop_peer(peer)

    def send_to_peer(
        self, peer: str, message: ControlMessage, payload: bytes | None = None
    ) -> None:
        """Send to a peer; one that can't be told is no error."""
        identity = self._identities.get(peer)
        try:
            if identity is None or not self._server.send(identity, message, payload):
                log.info("%s was not told a %s", peer, type(message).__name__)
        except Exception:
            log.exception("can't tell %s a %s", peer, type(message).__name__)

    def disconnect_peer(self, peer: str) -> None:
        """End a peer's connection; it isn't let in again."""
        self._server.drop_peer(peer)

    def on_disconnect(self) -> None:
        """A connection has ended: find out whose. Strangers' end too, so not for each at once."""
        if self._probe_timer is None:
            loop = asyncio.get_running_loop()
            self._probe_timer = loop.call_later(_PROBE_DELAY, self._probe_connections)

    def close(self) -> None:
        """Look after nobody any more."""
        if self._probe_timer is not None:
            self._probe_timer.cancel()

    def _probe_connections(self) -> None:
        self._probe_timer = None
        for peer, identity in list(self._identities.items()):
            if not self._server.send(identity, KeepAlive()):
                self.drop_peer(peer)
                self._on_lost(peer)
