"""What kind of router this PC is behind, by the addresses that relays have seen it connect from."""

from collections import Counter, deque
from typing import Literal

from molink.wire.messages.relay import Address

#: ``none``: the PC's own address is seen. ``cone``: the router keeps a connection's port, which
#: direct connections need. ``symmetric``: it chooses another one. Empty if nothing was seen yet.
RouterKind = Literal["", "none", "cone", "symmetric"]
#: Latest observations that count: a router that keeps ports can't if another PC has the same one.
_NUM_OBSERVATIONS = 9


class RouterObserver:
    """Judges a router by the latest observations."""

    def __init__(self) -> None:
        self._kinds: deque[RouterKind] = deque(maxlen=_NUM_OBSERVATIONS)

    def observe(self, local: Address, seen: Address) -> None:
        """Record that a connection from ``local`` was seen to come from ``seen``."""
        if local[0] == seen[0]:
            self._kinds.append("none")
        else:
            self._kinds.append("cone" if local[1] == seen[1] else "symmetric")

    @property
    def kind(self) -> RouterKind:
        """What most observations say."""
        found = Counter(self._kinds).most_common(1)
        return found[0][0] if found else ""
