"""What the stages on one PC share: its device, and its way out."""


class Uplink:
    """Whatever is sent from behind it goes through here, first in, first out.

    ``rate`` in bytes/s, of what enters from now on; ``room`` bytes in the queue.
    """

    def __init__(self, rate: float, room: int) -> None:
        self.rate = rate
        self.dropped_bytes = 0
        self._queue_bytes = room
        self._free_at = 0.0

    def enqueue_or_drop(self, nbytes: int, now: float) -> float | None:
        """When the last of so many bytes has passed; ``None`` if they were dropped."""
        free = max(self._free_at, now)
        if free > now and (free - now) * self.rate + nbytes > self._queue_bytes:
            self.dropped_bytes += nbytes
            return None
        self._free_at = free + nbytes / self.rate
        return self._free_at

    def enqueue_bytes(self, nbytes: int, at: float) -> tuple[float, float]:
        """When the first and the last of so many bytes pass, which are never dropped."""
        begin = max(at, self._free_at)
        end = self._free_at = begin + nbytes / self.rate
        return begin, end

    def queueing_s(self, now: float) -> float:
        """Seconds that the next byte waits."""
        return max(0.0, self._free_at - now)


class SimPc:
    """A PC; several stages may be on it, and several PCs behind one ``uplink``."""

    def __init__(self, uplink: Uplink) -> None:
        self.uplink = uplink
        #: Whether it takes part.
        self.is_present = True
        #: How many times as long as its device says a step takes: one that is hot, or shared.
        self.slowdown = 1.0
        #: Seconds in which it has computed.
        self.busy_s = 0.0
        self._free_at = 0.0

    def reserve_device(self, seconds: float, now: float) -> float:
        """The device is to compute for ``seconds`` if it is cool.

        Returns the seconds until it has: after what other stages have begun.
        """
        seconds *= self.slowdown
        wait = self._free_at - now if self._free_at > now else 0.0
        self.busy_s += seconds
        seconds += wait
        self._free_at = now + seconds
        return seconds
