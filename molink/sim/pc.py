"""Resources that the stages on one PC share: its device and its uplink."""


class Uplink:
    """A FIFO queue of ``room`` bytes in front of a link of ``rate`` bytes/s."""

    def __init__(self, rate: float, room: int) -> None:
        self.rate = rate
        self.dropped_bytes = 0
        self._queue_bytes = room
        self._free_at = 0.0

    def enqueue_or_drop(self, nbytes: int, now: float) -> float | None:
        """Return the seconds when the last of ``nbytes`` passes; ``None`` if they are dropped."""
        free = max(self._free_at, now)
        if free > now and (free - now) * self.rate + nbytes > self._queue_bytes:
            self.dropped_bytes += nbytes
            return None
        self._free_at = free + nbytes / self.rate
        return self._free_at

    def enqueue_bytes(self, nbytes: int, at: float) -> tuple[float, float]:
        """Enqueue without loss; return the seconds when the first and last of ``nbytes`` pass."""
        begin = max(at, self._free_at)
        end = self._free_at = begin + nbytes / self.rate
        return begin, end

    def queueing_s(self, now: float) -> float:
        """Return the seconds that the next byte waits."""
        return max(0.0, self._free_at - now)


class SimPc:
    """A PC. It may hold several stages, and several PCs may share an ``uplink``."""

    def __init__(self, uplink: Uplink) -> None:
        self.uplink = uplink
        #: Whether it is connected.
        self.is_present = True
        #: Factor on the device's step times, for a device that is hot or busy.
        self.slowdown = 1.0
        #: Seconds in which the device has computed.
        self.busy_s = 0.0
        self._free_at = 0.0

    def reserve_device(self, seconds: float, now: float) -> float:
        """Reserve the device for ``seconds`` at slowdown 1.

        Returns the seconds until the computation ends, including the wait for other stages.
        """
        seconds *= self.slowdown
        wait = self._free_at - now if self._free_at > now else 0.0
        self.busy_s += seconds
        seconds += wait
        self._free_at = now + seconds
        return seconds

    def prolong_step(self, seconds: float) -> float:
        """Prolong the running step by ``seconds`` at slowdown 1; return the seconds added."""
        seconds *= self.slowdown
        self.busy_s += seconds
        self._free_at += seconds
        return seconds
