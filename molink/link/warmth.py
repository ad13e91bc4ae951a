"""When a link sends bytes for no other end than that TCP keeps the bulk lane's window.

Linux takes half of a connection's congestion window away for each retransmission time-out in which
it sent nothing (RFC 2861, ``tcp_slow_start_after_idle``), and of one that sent less than the
window, half of what was not used. The next prompt then takes a round trip for each doubling.
"""

from molink.link.policies.base import LinkEstimate

#: Seconds between prompts after which it does so. A time-out is at least 0.2 s and a round trip.
PAUSE = 0.19
#: So many seconds' worth of the link's rate are sent each time: with :data:`PAUSE`, a fortieth.
SHARE_S = 0.005
#: Bytes of one time: fewer would keep hardly more than each connection begins with (14 KB).
LEAST = 32 * 1024
MOST = 256 * 1024
#: The least round trip, in seconds, at which a slow start is worth it.
FAR = 0.008
#: Prompts come often if the last one was no longer ago than this, in seconds.
OFTEN = 10.0


class Warmth:
    """Keeps the window of one link's bulk lane; without I/O."""

    def __init__(self) -> None:
        self._prefill_at = self._bulk_at = float("-inf")

    def prefill(self, now: float) -> None:
        """Rows of a prompt go over this link."""
        self._prefill_at = now

    def sent(self, now: float) -> None:
        """Something leaves on the bulk lane."""
        self._bulk_at = now

    def due(self, estimate: LinkEstimate, now: float) -> int:
        """How many bytes to send now, if nothing waits there and requests live; 0 for none."""
        if now - self._bulk_at < PAUSE or now - self._prefill_at > OFTEN:
            return 0
        nbytes = int(SHARE_S * (estimate.rate or 0.0))
        if nbytes < LEAST or estimate.min_rtt < FAR:
            return 0
        return min(nbytes, MOST)
