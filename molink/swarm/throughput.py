"""How fast a transfer is, from what it says of its bytes now and then."""

from collections import deque

#: The rate is that of so many last seconds: a pause shows, and one late look doesn't.
RATE_WINDOW = 10.0
#: Looks that come sooner after the one before take its place, in seconds.
_MIN_STEP = 0.25


class TransferRate:
    """One transfer, looked at several times a second. All times in seconds."""

    def __init__(self, now: float, done: int = 0) -> None:
        self._seen: deque[tuple[float, int]] = deque([(now, done)])

    def observe_bytes(self, done: int, now: float) -> None:
        """By now ``done`` bytes have come; fewer than before: it was begun anew."""
        if done < self._seen[-1][1]:
            self._seen = deque([(now, done)])
            return
        if len(self._seen) > 1 and now - self._seen[-2][0] < _MIN_STEP:
            self._seen.pop()
        self._seen.append((now, done))
        while len(self._seen) > 2 and now - self._seen[1][0] >= RATE_WINDOW:
            self._seen.popleft()

    @property
    def rate(self) -> float:
        """Bytes per second, lately."""
        (begun, before), (now, done) = self._seen[0], self._seen[-1]
        return (done - before) / (now - begun) if now > begun else 0.0


def estimate_eta(left: int, rate: float) -> float | None:
    """Seconds until ``left`` bytes have come; ``None`` while nothing comes."""
    return left / rate if rate > 0 else None
