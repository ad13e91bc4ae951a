"""When what was sent will have left this machine's end of the link."""

from molink.link.policies.base import Acknowledged, Event, LinkEstimate, Reconnected, Sent


class Outflow:
    """Follows what is handed to the sockets at the estimated rate of the link.

    Nobody tells a policy when bytes have left: each message takes its size divided by the rate,
    after those before it, on whichever lane. Before a rate is known, what was sent counts as under
    way until it is acknowledged.
    """

    def __init__(self) -> None:
        #: Bytes/s; ``None`` = unknown.
        self.rate: float | None = None
        #: When all that was sent so far should have left; means nothing while ``rate`` is unknown.
        self.leaves_at = 0.0
        #: Bytes sent and not acknowledged, by lane.
        self._unacknowledged = [0, 0]

    def handle(self, event: Event, now: float) -> None:
        """Take note of a message, an acknowledgement or an estimate."""
        match event:
            case Sent():
                self._unacknowledged[event.lane] += event.nbytes
                if self.rate is not None:
                    self.leaves_at = max(now, self.leaves_at) + event.nbytes / self.rate
            case Acknowledged():
                left = self._unacknowledged[event.lane] - event.nbytes
                self._unacknowledged[event.lane] = max(0, left)
                if not any(self._unacknowledged):
                    self.leaves_at = min(now, self.leaves_at)
            case LinkEstimate():
                if event.rate:
                    self._changed(event.rate, now)
            case Reconnected():
                self._unacknowledged[event.lane] = 0
                self.leaves_at = min(now, self.leaves_at)

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
        return sum(self._unacknowledged)

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
