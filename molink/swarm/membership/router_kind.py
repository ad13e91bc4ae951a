"""Determines the kind of this PC's router from the addresses that relays see it connect from."""

from collections import Counter, deque
from typing import Literal

from molink.wire.messages.relay import Address

#: ``none``: relays see the PC's own address. ``cone``: the router keeps a connection's port, which
#: direct connections need. ``symmetric``: it chooses another port. Empty: unknown.
RouterKind = Literal["", "none", "cone", "symmetric"]
#: Number of observations that count. A router that usually keeps ports can't if another PC uses the
#: same port, so a single observation proves nothing.
_NUM_OBSERVATIONS = 9


class RouterObserver:
    """Determines the router's kind by the majority of the latest observations."""

    def __init__(self) -> None:
        self._kinds: deque[RouterKind] = deque(maxlen=_NUM_OBSERVATIONS)

    def observe(self, local: Address, seen: Address) -> None:
        """Record that a relay saw a connection from ``local`` come from ``seen``."""
        if local[0] == seen[0]:
            self._kinds.append("none")
        else:
            self._kinds.append("cone" if local[1] == seen[1] else "symmetric")

    @property
    def kind(self) -> RouterKind:
        """The most frequent kind; empty without observations."""
        found = Counter(self._kinds).most_common(1)
        return found[0][0] if found else ""
