"""What decides how fast a TCP connection sends: congestion control, as the connection asks it."""

from dataclasses import dataclass
from typing import Literal, Protocol, get_args

Congestion = Literal["none", "cubic", "bbr"]
#: All of them; ``none`` is a link that both lanes share without any TCP.
CONGESTION_CONTROLS: tuple[str, ...] = get_args(Congestion)

#: Bytes of a segment (an Ethernet frame's 1500 without headers and timestamps).
SEGMENT_BYTES = 1448
#: The first window (RFC 6928).
INITIAL_WINDOW = 10 * SEGMENT_BYTES
#: A retransmission timeout is the round trip and this, at least (RFC 6298; 0.2 s is Linux's).
MIN_TIMEOUT = 0.2


@dataclass(frozen=True, slots=True)
class SegmentsAcked:
    """What one acknowledgement says, once the connection has taken note of it.

    ``round_trip`` in seconds; ``delivered`` is the sum of all bytes that have arrived, and
    ``delivered_before`` what it was when these left. ``rate`` in bytes/s is the delivery rate of
    draft-cheng-iccrg-delivery-rate-estimation, 0 if unknown; ``app_limited`` whether these bytes
    left while there was nothing more to send. ``in_flight`` bytes are now on the way, those that
    are known to be lost left out; ``lost`` of them have just become known.
    """

    now: float
    nbytes: int
    round_trip: float
    delivered: int
    delivered_before: int
    rate: float
    app_limited: bool
    in_flight: int
    lost: int


class CongestionController(Protocol):
    """Congestion control of one connection.

    ``window`` is how many bytes may be in flight, ``pacing_rate`` the bytes/s at which they leave
    (infinite: at once).
    """

    window: float
    pacing_rate: float

    def on_restart(self, now: float, idle: float) -> None:
        """Something is to leave, and nothing is in flight; the last left ``idle`` s ago."""

    def on_sent(self, now: float, in_flight: int, limited: bool) -> None:
        """All has left that may; ``limited`` by the window, and not for want of bytes."""

    def on_acked(self, acked: SegmentsAcked) -> None:
        """Bytes have arrived."""

    def on_loss(self, now: float, in_flight: int) -> None:
        """Losses are noticed, for the first time since the last recovery: recovery begins."""

    def on_recovered(self, now: float) -> None:
        """All has arrived that had left when recovery began."""

    def on_timeout(self, now: float) -> None:
        """No acknowledgement came for a timeout: all that was in flight counts as lost."""
