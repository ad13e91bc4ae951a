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
class _Heard:
    latest: bytes
    before: bytes = b""
    #: Of the two the one that came later.
    newer: bytes = b""
    returns: int = 0
    returned: float = -math.inf
    #: The PC that came later, once it is clear that there are two.
    shut: bytes = b""


class Twins:
    """Which connection of each peer counts."""

    def __init__(self) -> None:
        self._peers: dict[str, _Heard] = {}

    def heard(self, peer: str, connection: bytes, now: float) -> bool:
        """A peer reports on a connection; whether that is one of a PC that came second."""
        heard = self._peers.get(peer)
        if heard is None:
            self._peers[peer] = _Heard(connection)
            return False
        if connection == heard.shut:
            return True
        if connection == heard.latest:
            return False
        if connection == heard.before:
            if now >= heard.returned + ONCE_S:
                heard.returns, heard.returned = heard.returns + 1, now
        else:
            heard.newer, heard.returns = connection, 0
        heard.before, heard.latest = heard.latest, connection
        if heard.returns >= RETURNS:
            heard.shut = heard.newer
            heard.latest = heard.before if heard.latest == heard.newer else heard.latest
            heard.before, heard.returns = b"", 0
        return connection == heard.shut

    def forget(self, peer: str) -> None:
        """A peer has gone, with all its connections."""
        self._peers.pop(peer, None)
