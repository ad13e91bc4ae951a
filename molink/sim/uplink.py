"""The way out of a stage's PC: a queue that drops what it has no room for, at a rate."""


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
