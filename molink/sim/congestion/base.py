"""The interface of congestion controls."""

from dataclasses import dataclass
from typing import Literal, Protocol, get_args

Congestion = Literal["none", "cubic", "bbr"]
#: Names of congestion controls; ``none`` is a shared link without TCP.
CONGESTION_CONTROLS: tuple[str, ...] = get_args(Congestion)

#: Bytes of a segment: an Ethernet frame's 1500, less headers and timestamps.
SEGMENT_BYTES = 1448
#: The initial window (RFC 6928).
INITIAL_WINDOW = 10 * SEGMENT_BYTES
#: Minimum seconds of a retransmission timeout beyond the round trip (RFC 6298; Linux's value).
MIN_TIMEOUT = 0.2


@dataclass(frozen=True, slots=True)
class SegmentsAcked:
    """An acknowledgement, after the connection has processed it.

    It acknowledges ``nbytes`` bytes. ``round_trip`` is in seconds. ``delivered`` is the number of
    all bytes acknowledged so far, ``delivered_before`` its value when these bytes were sent.
    ``rate`` (bytes/s) is the delivery rate of draft-cheng-iccrg-delivery-rate-estimation, 0 if
    unknown. ``app_limited`` tells whether the application rather than the window limited the
    sending of these bytes. ``in_flight`` excludes bytes known to be lost; ``lost`` is the number of
    bytes that this acknowledgement reveals as lost.
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

    ``window`` limits the bytes in flight. ``pacing_rate`` limits the bytes/s at which they are
    sent; infinity means unpaced.
    """

    window: float
    pacing_rate: float

    def on_restart(self, now: float, idle: float) -> None:
        """Resume sending with nothing in flight, ``idle`` seconds after the last transmission."""

    def on_sent(self, now: float, in_flight: int, limited: bool) -> None:
        """Handle the end of a burst; ``limited`` tells whether the window ended it."""

    def on_acked(self, acked: SegmentsAcked) -> None:
        """Handle an acknowledgement."""

    def on_loss(self, now: float, in_flight: int) -> None:
        """Begin a recovery: the first loss since the last recovery was detected."""

    def on_recovered(self, now: float) -> None:
        """End the recovery: all bytes sent before it have arrived."""

    def on_timeout(self, now: float) -> None:
        """Handle a timeout: all bytes in flight count as lost."""
