"""When what was sent will have left this machine's end of the link."""

from collections import deque

import msgspec

from molink.link.policies.base import Acknowledged, Event, LinkEstimate, Reconnected, Sent

#: A correction is the least of so many: acknowledgements are also late for reasons of their own.
CORRECTIONS = 4
#: Seconds that a correction has at most: what is later than that is held up by TCP on this PC, and
#: must go on reaching it, or its window would never grow.
MAX_CORRECTION = 0.008
#: Weight of an acknowledgement in :attr:`Outflow.pace`, and the least that this may be.
WEIGHT = 0.01
MIN_PACE = 0.8


class _UnderWay(msgspec.Struct, frozen=True):
    nbytes: int
    #: How long the link should be busy with it.
    seconds: float
    #: When it should have left, but for what has been corrected since its stretch began.
    leaves_at: float
    stretch: int


class Outflow:
    """Follows what is handed to the sockets at the estimated rate of the link.

    Nobody tells a policy when bytes have left: each message takes its size divided by the rate,
    after those before it, on whichever lane. The rate that is estimated is the greatest of late, so
    what is sent without a break would leave later and later than that. Acknowledgements correct it:
    a message that has been acknowledged left a round trip ago, and what follows it in the same
    *stretch* (a time without a break in sending) leaves as much later as it did. How much slower
    than estimated bytes leave is remembered as :attr:`pace`. A queue that is left where a stretch
    ends is forgotten: going on to allow for it would keep bytes from TCP, whose window would not
    grow then. The credit window bounds it. Before a rate is known, what was sent
    counts as under way until it is acknowledged.
    """

    def __init__(self) -> None:
        #: Bytes/s; ``None`` = unknown.
        self.rate: float | None = None
        #: When all that was sent so far should have left; means nothing while ``rate`` is unknown.
        self.leaves_at = 0.0
        #: What bytes leave at, as a share of ``rate``.
        self.pace = 1.0
        self._min_rtt = 0.0
        self._under_way: tuple[deque[_UnderWay], ...] = (deque(), deque())
        self._stretch = 0
        #: By how many seconds ``leaves_at`` has been corrected in this stretch, and what its last
        #: acknowledgements would have corrected it by.
        self._corrected = 0.0
        self._late: deque[float] = deque(maxlen=CORRECTIONS)

    def handle(self, event: Event, now: float) -> None:
        """Take note of a message, an acknowledgement or an estimate."""
        match event:
            case Sent():
                self._sent(event, now)
            case Acknowledged():
                self._acknowledged(event, now)
            case LinkEstimate():
                self._min_rtt = event.min_rtt
                if event.rate:
                    self._changed(event.rate, now)
            case Reconnected():
                self._under_way[event.lane].clear()
                self.leaves_at = min(now, self.leaves_at)

    def _sent(self, event: Sent, now: float) -> None:
        seconds = 0.0
        if self.rate is not None:
            if now >= self.leaves_at:
                self._stretch += 1
                self._corrected = 0.0
                self._late.clear()
            seconds = event.nbytes / (self.pace * self.rate)
            self.leaves_at = max(now, self.leaves_at) + seconds
        leaves_at = self.leaves_at - self._corrected
        message = _UnderWay(event.nbytes, seconds, leaves_at, self._stretch)
        self._under_way[event.lane].append(message)

    def _acknowledged(self, event: Acknowledged, now: float) -> None:
        under_way, left = self._under_way[event.lane], event.nbytes
        newest, seconds = None, 0.0
        while under_way and left > 0:
            newest = under_way.popleft()
            left -= newest.nbytes
            seconds += newest.seconds
        if not any(self._under_way):
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
            seen = min(1.0, max(MIN_PACE, nbytes / (took * self.rate)))
            self.pace += WEIGHT * (seen - self.pace)
        corrected = max(-MAX_CORRECTION, min(minimum, MAX_CORRECTION))
        self.leaves_at += corrected - self._corrected
        self._corrected = corrected

    def _changed(self, rate: float, now: float) -> None:
        """What is still to leave takes as much longer as the link is slower."""
        if self.rate is None:
            self.leaves_at = now + self.unacknowledged / rate
        else:
            self.leaves_at = now + max(0.0, self.leaves_at - now) * self.rate / rate
        self.rate = rate

    @property
    def unacknowledged(self) -> int:
        """Bytes sent and not acknowledged."""
        return sum(each.nbytes for lane in self._under_way for each in lane)

    def busy(self, now: float) -> bool:
        """Whether something that was sent has not left yet."""
        return now < self.leaves_at if self.rate is not None else self.unacknowledged > 0


class Shrinkage:
    """How many times fewer bytes than they have rows take on their way, of late.

    Policies count rows, credits and rates go by bytes on the wire, and messages may travel packed.
    """

    #: Weight of the last grant in the running mean.
    WEIGHT = 0.1

    def __init__(self) -> None:
        #: Bytes on the wire for each byte of rows.
        self.share = 1.0
        self._granted = 0
        self._sent = 0

    def granted(self, nbytes: int) -> None:
        """Rows of ``nbytes`` may go; those of the grant before have gone."""
        if self._granted and 0 < self._sent <= 2 * self._granted:
            self.share += self.WEIGHT * (min(1.0, self._sent / self._granted) - self.share)
        self._granted, self._sent = nbytes, 0

    def sent(self, nbytes: int) -> None:
        """A message of ``nbytes`` has left on the lane of the grants."""
        self._sent += nbytes
