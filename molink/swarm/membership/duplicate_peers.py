"""Two PCs with one key: a state folder was copied, and both run.

Each would take the other's place with every report. A connection that is heard again after
another of the same peer is still there, so both are. For a moment that may be words that waited to
be read when a peer came back by a new connection; so it has to go on for seconds.
"""

import math
from dataclasses import dataclass

#: So often an earlier connection is heard again before both count as running, and what counts as
#: once, in seconds: a peer reports twice a second.
RETURNS, ONCE_S = 6, 0.5


@dataclass(slots=True)
class _ConnectionHistory:
    latest: bytes
    previous: bytes = b""
    #: Of the two the one that came later.
    second: bytes = b""
    alternations: int = 0
    alternated_at: float = -math.inf
    #: The PC that came later, once it is clear that there are two.
    rejected: bytes = b""


class DuplicatePeers:
    """Which connection of each peer counts."""

    def __init__(self) -> None:
        self._peers: dict[str, _ConnectionHistory] = {}

    def observe_connection(self, peer: str, connection: bytes, now: float) -> bool:
        """A peer reports on a connection; whether that is one of a PC that came second."""
        history = self._peers.get(peer)
        if history is None:
            self._peers[peer] = _ConnectionHistory(connection)
            return False
        if connection == history.rejected:
            return True
        if connection == history.latest:
            return False
        if connection == history.previous:
            if now >= history.alternated_at + ONCE_S:
                history.alternations, history.alternated_at = history.alternations + 1, now
        else:
            history.second, history.alternations = connection, 0
        history.previous, history.latest = history.latest, connection
        if history.alternations >= RETURNS:
            history.rejected = history.second
            history.latest = (
                history.previous if history.latest == history.second else history.latest
            )
            history.previous, history.alternations = b"", 0
        return connection == history.rejected

    def drop_peer(self, peer: str) -> None:
        """A peer has gone, with all its connections."""
        self._peers.pop(peer, None)
