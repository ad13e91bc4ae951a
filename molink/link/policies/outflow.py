"""When what was sent will have left this machine's end of the link."""

from collections import deque

import msgspec

from molink.link.policies.base import (
    ChannelReconnectedEvent,
    LinkEstimatedEvent,
    LinkEvent,
    MessageAcknowledgedEvent,
    MessageSentEvent,
)

#: A correction is the least of so many: acknowledgements are also late for reasons of their own.
CORRECTIONS = 4
#: Seconds that a correction has at most: what is later than that is held up by TCP on this PC, and
#: must go on reaching it, or its window would never grow.
MAX_CORRECTION = 0.008
#: Weight of an acknowledgement in :attr:`Outflow.pace`, and the least that this may be.
WEIGHT = 0.01
MIN_RATE_SHARE = 0.8


class _InFlight(msgspec.Struct, frozen=True):
    nbytes: int
    #: How long the link should be busy with it.
    seconds: float
    #: When it should have left, but for what has been corrected since its stretch began.
    leaves_at: float
    stretch: int


class Outflow:
    """Follows what is handed to the sockets at the estimated rate of the link.

    Nobody tells a policy when bytes have left: each message takes its size divided by the rate,
    after those before it, on whichever channel. The rate that is estimated is the greatest of late,
    so what is sent without a break would leave later and later than that. Acknowledgements correct
    it: a message that has been acknowledged left a round trip ago, and what follows it in the same
    *stretch* (a time without a break in sending) leaves as much later as it did. How much slower
    than estimated bytes leave is remembered as :attr:`rate_share`. A queue that is left where a
    stretch ends is forgotten: going on to allow for it would keep bytes from TCP, whose window
    would not grow then. The credit window bounds it. Before a rate is known, what was sent counts
    as under way until it is acknowledged.
    """

    def __init__(self) -> None:
        #: Bytes/s; ``None`` = unknown.
        self.rate: float | None = None
        #: When all that was sent so far should have left; means nothing while ``rate`` is unknown.
        self.leaves_at = 0.0
        #: What bytes leave at, as a share of ``rate``.
        self.rate_share = 1.0
        self._min_rtt = 0.0
        self._in_flight: tuple[deque[_InFlight], ...] = (deque(), deque())
        self._stretch = 0
        #: By how many seconds ``leaves_at`` has been corrected in this stretch, and what its last
        #: acknowledgements would have corrected it by.
        self._corrected = 0.0
        self._late: deque[float] = deque(maxlen=CORRECTIONS)

    def handle(self, event: LinkEvent, now: float) -> None:
        """Take note of a message, an acknowledgement or an estimate."""
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
        """``nbytes``, for ``seconds`` of the link, left by ``late`` seconds later than expected."""
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
        """What is still to leave takes as much longer as the link is slower."""
        if self.rate is None:
            self.leaves_at = now + self.unacknowledged / rate
        else:
            self.leaves_at = now + max(0.0, self.leaves_at - now) * self.rate / rate
        self.rate = rate

    @property
    def unacknowledged(self) -> int:
        """Bytes sent and not acknowledged."""
        return sum(each.nbytes for channel in self._in_flight for each in channel)

    def is_busy(self, now: float) -> bool:
        """Whether something that was sent has not left yet."""
        return now < self.leaves_at if self.rate is not None else self.unacknowledged > 0


class PackingRatio:
    """How many times fewer bytes than they have rows take on their way, of late.

    Policies count rows, credits and rates go by bytes on the wire, and messages may travel packed.
    """

    #: Weight of the last grant in the running mean.
    WEIGHT = 0.1

    def __init__(self) -> None:
        #: Bytes on the wire for each byte of rows.
        self.ratio = 1.0
        self._granted_bytes = 0
        self._sent_bytes = 0

    def on_granted(self, nbytes: int) -> None:
        """Rows of ``nbytes`` may go; those of the grant before have gone."""
        if self._granted_bytes and 0 < self._sent_bytes <= 2 * self._granted_bytes:
            self.ratio += self.WEIGHT * (
                min(1.0, self._sent_bytes / self._granted_bytes) - self.ratio
            )
        self._granted_bytes, self._sent_bytes = nbytes, 0

    def on_sent(self, nbytes: int) -> None:
        """A message of ``nbytes`` has left on the channel of the grants."""
        self._sent_bytes += nbytes
