"""Transfer rate from occasional byte counts."""

from collections import deque

#: Averaging window in seconds: pauses show, one late sample does not.
RATE_WINDOW = 10.0
#: A sample sooner after the previous one replaces it, in seconds.
_MIN_STEP = 0.25


class TransferRate:
    """One transfer, sampled several times a second. All times in seconds."""

    def __init__(self, now: float, done: int = 0) -> None:
        self._seen: deque[tuple[float, int]] = deque([(now, done)])

    def observe_bytes(self, done: int, now: float) -> None:
        """``done`` bytes have arrived by now; fewer than before means a restart."""
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
        """Recent bytes per second."""
        (begun, before), (now, done) = self._seen[0], self._seen[-1]
        return (done - before) / (now - begun) if now > begun else 0.0


def estimate_eta(left: int, rate: float) -> float | None:
    """Seconds until ``left`` bytes have arrived; ``None`` at rate 0."""
    return left / rate if rate > 0 else None
