"""The interface of congestion controls."""

from dataclasses import dataclass
from typing import Literal, Protocol, get_args

Congestion = Literal["none", "cubic", "bbr"]
#: Names of link models; ``none`` is a shared link without TCP.
CONGESTION_CONTROLS: tuple[str, ...] = get_args(Congestion)

#: Bytes of a segment (an Ethernet frame's 1500 without headers and timestamps).
SEGMENT_BYTES = 1448
#: The initial window (RFC 6928).
INITIAL_WINDOW = 10 * SEGMENT_BYTES
#: Minimum of a retransmission timeout beyond the round trip (RFC 6298; 0.2 s is Linux's).
MIN_TIMEOUT = 0.2


@dataclass(frozen=True, slots=True)
class SegmentsAcked:
    """An acknowledgement, after the connection has processed it.

    ``round_trip`` in seconds; ``delivered`` is the total of bytes that have arrived,
    ``delivered_before`` its value when these were sent. ``rate`` (bytes/s) is the delivery rate of
    draft-cheng-iccrg-delivery-rate-estimation, 0 if unknown; ``app_limited`` tells whether these
    bytes were sent with nothing more to send. ``in_flight`` excludes bytes known to be lost;
    ``lost`` bytes have just become known.
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

    ``window`` limits the bytes in flight, ``pacing_rate`` the bytes/s at which they are sent
    (infinite: unpaced).
    """

    window: float
    pacing_rate: float

    def on_restart(self, now: float, idle: float) -> None:
        """Sending resumes with nothing in flight, ``idle`` seconds after the last transmission."""

    def on_sent(self, now: float, in_flight: int, limited: bool) -> None:
        """All that may be sent has been; ``limited`` by the window rather than by lack of data."""

    def on_acked(self, acked: SegmentsAcked) -> None:
        """Bytes were acknowledged."""

    def on_loss(self, now: float, in_flight: int) -> None:
        """Losses are detected for the first time since the last recovery, which begins now."""

    def on_recovered(self, now: float) -> None:
        """Everything sent before the recovery has arrived."""

    def on_timeout(self, now: float) -> None:
        """A timeout: everything in flight counts as lost."""
