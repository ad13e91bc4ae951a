"""When a link sends bytes for no other end than that TCP keeps the bulk channel's window.

Linux takes half of a connection's congestion window away for each retransmission time-out in which
it sent nothing (RFC 2861, ``tcp_slow_start_after_idle``), and of one that sent less than the
window, half of what was not used. The next prompt then takes a round trip for each doubling.
"""

from molink.link.policies.base import LinkEstimatedEvent

#: Seconds between prompts after which it does so. A time-out is at least 0.2 s and a round trip.
IDLE_PAUSE = 0.19
#: So many seconds' worth of the link's rate are sent each time: with :data:`PAUSE`, a fortieth.
SHARE_S = 0.005
#: Bytes of one time: fewer would keep hardly more than each connection begins with (14 KB).
MIN_BYTES = 32 * 1024
MAX_BYTES = 256 * 1024
#: The least round trip, in seconds, at which a slow start is worth it.
MIN_RTT = 0.008
#: Prompts come often if the last one was no longer ago than this, in seconds.
MAX_PROMPT_GAP = 10.0


class TcpKeepWarm:
    """Keeps the window of one link's bulk channel; without I/O."""

    def __init__(self) -> None:
        self._prefill_at = self._bulk_at = float("-inf")

    def on_prefill(self, now: float) -> None:
        """Rows of a prompt go over this link."""
        self._prefill_at = now

    def on_sent(self, now: float) -> None:
        """Something leaves on the bulk channel."""
        self._bulk_at = now

    def due_bytes(self, estimate: LinkEstimatedEvent, now: float) -> int:
        """How many bytes to send now, if nothing waits there and requests live; 0 for none."""
        if now - self._bulk_at < IDLE_PAUSE or now - self._prefill_at > MAX_PROMPT_GAP:
            return 0
        nbytes = int(SHARE_S * (estimate.rate or 0.0))
        if nbytes < MIN_BYTES or estimate.min_rtt < MIN_RTT:
            return 0
        return min(nbytes, MAX_BYTES)
