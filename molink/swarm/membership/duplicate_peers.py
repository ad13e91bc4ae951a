"""Detects two PCs that run with one key, after a state folder was copied.

Each report of one would displace the other. A connection on which a report arrives after one on
another connection of the same peer is still open, so both PCs run. Reports that were queued when a
peer reconnected look the same for a moment, so the alternation must last for seconds.
"""

import math
from dataclasses import dataclass

#: Number of alternations after which both connections count as running, and minimum seconds between
#: two counted alternations; a peer reports twice a second.
MIN_ALTERNATIONS = 6
ALTERNATION_INTERVAL_S = 0.5


@dataclass(slots=True)
class _ConnectionHistory:
    latest: bytes
    previous: bytes = b""
    #: The later connection of the two.
    second: bytes = b""
    alternations: int = 0
    alternated_at: float = -math.inf
    #: Connection of the duplicate, if detected.
    rejected: bytes = b""


class DuplicatePeers:
    """Decides which connection of each peer counts."""

    def __init__(self) -> None:
        self._peers: dict[str, _ConnectionHistory] = {}

    def observe_connection(self, peer: str, connection: bytes, now: float) -> bool:
        """Record a report on a connection; return whether it comes from a duplicate."""
        history = self._peers.get(peer)
        if history is None:
            self._peers[peer] = _ConnectionHistory(connection)
            return False
        if connection == history.rejected:
            return True
        if connection == history.latest:
            return False
        if connection == history.previous:
            if now >= history.alternated_at + ALTERNATION_INTERVAL_S:
                history.alternations, history.alternated_at = history.alternations + 1, now
        else:
            history.second, history.alternations = connection, 0
        history.previous, history.latest = history.latest, connection
        if history.alternations >= MIN_ALTERNATIONS:
            history.rejected = history.second
            if history.latest == history.second:
                history.latest = history.previous
            history.previous, history.alternations = b"", 0
        return connection == history.rejected

    def drop_peer(self, peer: str) -> None:
        """Drop a peer and all its connections."""
        self._peers.pop(peer, None)
