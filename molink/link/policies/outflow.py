"""Predicts when sent data will have left this end of the link."""

from collections import deque

import msgspec

from molink.link.policies.base import (
    ChannelReconnectedEvent,
    LinkEstimatedEvent,
    LinkEvent,
    MessageAcknowledgedEvent,
    MessageSentEvent,
)

#: A correction is the minimum over this many acknowledgements, which may be late for other reasons.
CORRECTIONS = 4
#: Maximum correction in seconds. Larger delays are caused by TCP on this PC, which must keep
#: getting data, or its window would never grow.
MAX_CORRECTION = 0.008
#: Weight of an acknowledgement in :attr:`Outflow.rate_share`, and that share's minimum.
WEIGHT = 0.01
MIN_RATE_SHARE = 0.8


class _InFlight(msgspec.Struct, frozen=True):
    nbytes: int
    #: Expected seconds of link time.
    seconds: float
    #: When the message should have left, without corrections since its stretch began.
    leaves_at: float
    stretch: int


class Outflow:
    """Tracks data that was passed to the sockets, at the link's estimated rate.

    Nothing reports when bytes leave. So each message is assumed to take its size divided by the
    rate, after the previous messages on any channel. The estimate is a recent maximum, so during
    continuous sending data leaves later and later than predicted. Acknowledgements correct this: an
    acknowledged message left one round trip ago, and later messages of the same *stretch* (a time
    without a break in sending) are as late as it was. :attr:`rate_share` remembers how much slower
    than the estimate bytes leave. The queue that remains at the end of a stretch is ignored:
    waiting for it would withhold data from TCP, whose window could not grow. The credit window
    bounds that queue. Before a rate is known, data counts as in flight until it is acknowledged.
    """

    def __init__(self) -> None:
        #: Bytes/s; ``None`` if unknown.
        self.rate: float | None = None
        #: When everything sent should have left; undefined while ``rate`` is unknown.
        self.leaves_at = 0.0
        #: The rate at which bytes leave, as a share of ``rate``.
        self.rate_share = 1.0
        self._min_rtt = 0.0
        self._in_flight: tuple[deque[_InFlight], ...] = (deque(), deque())
        self._stretch = 0
        #: Seconds by which ``leaves_at`` was corrected in this stretch, and the corrections that
        #: its last acknowledgements suggest.
        self._corrected = 0.0
        self._late: deque[float] = deque(maxlen=CORRECTIONS)

    def handle(self, event: LinkEvent, now: float) -> None:
        """Record a message, an acknowledgement or an estimate."""
        match event:
            case MessageSentEvent():
                self._on_sent(event, now)
            case MessageAcknowledgedEvent():
                self._on_acknowledged(event, now)
            case LinkEstimatedEvent():
                self._min_rtt = event.min_rtt
                if event.rate:
                    self._on_rate_changed(event.rate, now)
            case ChannelReconnectedEvent():
                self._in_flight[event.channel].clear()
                self.leaves_at = min(now, self.leaves_at)

    def _on_sent(self, event: MessageSentEvent, now: float) -> None:
        seconds = 0.0
        if self.rate is not None:
            if now >= self.leaves_at:
                self._stretch += 1
                self._corrected = 0.0
                self._late.clear()
            seconds = event.nbytes / (self.rate_share * self.rate)
            self.leaves_at = max(now, self.leaves_at) + seconds
        leaves_at = self.leaves_at - self._corrected
        message = _InFlight(event.nbytes, seconds, leaves_at, self._stretch)
        self._in_flight[event.channel].append(message)

    def _on_acknowledged(self, event: MessageAcknowledgedEvent, now: float) -> None:
        under_way, left = self._in_flight[event.channel], event.nbytes
        newest, seconds = None, 0.0
        while under_way and left > 0:
            newest = under_way.popleft()
            left -= newest.nbytes
            seconds += newest.seconds
        if not any(self._in_flight):
            self.leaves_at = min(now, self.leaves_at)
        elif newest is not None and newest.stretch == self._stretch and self._min_rtt:
            self._correct(now - self._min_rtt - newest.leaves_at, event.nbytes, seconds)

    def _correct(self, late: float, nbytes: int, seconds: float) -> None:
        """Record that ``nbytes``, worth ``seconds`` of the link, left ``late`` seconds too late."""
        before = min(self._late, default=None)
        self._late.append(late)
        minimum = min(self._late)
        if before is not None and self.rate and seconds > 0:
            took = max(seconds + minimum - before, seconds / 2)
            seen = min(1.0, max(MIN_RATE_SHARE, nbytes / (took * self.rate)))
            self.rate_share += WEIGHT * (seen - self.rate_share)
        corrected = max(-MAX_CORRECTION, min(minimum, MAX_CORRECTION))
        self.leaves_at += corrected - self._corrected
        self._corrected = corrected

    def _on_rate_changed(self, rate: float, now: float) -> None:
        """Scale the remaining link time to the new rate."""
        if self.rate is None:
            self.leaves_at = now + self.unacknowledged / rate
        else:
            self.leaves_at = now + max(0.0, self.leaves_at - now) * self.rate / rate
        self.rate = rate

    @property
    def unacknowledged(self) -> int:
        """Unacknowledged bytes."""
        return sum(each.nbytes for channel in self._in_flight for each in channel)

    def is_busy(self, now: float) -> bool:
        """Whether some sent data has not left yet."""
        return now < self.leaves_at if self.rate is not None else self.unacknowledged > 0


class PackingRatio:
    """Recent ratio of bytes on the wire to bytes of rows.

    Policies count rows; credits and rates count bytes on the wire, where rows may be packed.
    """

    #: Weight of the last grant in the running mean.
    WEIGHT = 0.1

    def __init__(self) -> None:
        self.ratio = 1.0
        self._granted_bytes = 0
        self._sent_bytes = 0

    def on_granted(self, nbytes: int) -> None:
        """Record that rows of ``nbytes`` may go, and that the previous grant's have left."""
        if self._granted_bytes and 0 < self._sent_bytes <= 2 * self._granted_bytes:
            self.ratio += self.WEIGHT * (
                min(1.0, self._sent_bytes / self._granted_bytes) - self.ratio
            )
        self._granted_bytes, self._sent_bytes = nbytes, 0

    def on_sent(self, nbytes: int) -> None:
        """Record a sent message on the granted channel."""
        self._sent_bytes += nbytes
