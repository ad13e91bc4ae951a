"""How long requests that share a beginning wait before they are computed."""

from collections import OrderedDict
from dataclasses import dataclass

#: Beginnings that are watched, and requests that say something about one.
MAX_PREFIXES = 4096
MIN_WAITS = 4
#: A wait counts as longer from so many times the one before (Preble, §4.2).
MIN_GROWTH = 2.0


@dataclass(slots=True)
class _Wait:
    half: int
    total_s: float = 0.0
    count: int = 0
    #: The mean before, if enough have told of it.
    previous_s: float | None = None

    @property
    def mean_s(self) -> float | None:
        return self.total_s / self.count if self.count >= MIN_WAITS else None


class PrefixWaits:
    """Mean waits in the present half of a window, and in the one before."""

    def __init__(self, half_s: float) -> None:
        self._half_s = half_s
        self._waits: OrderedDict[int, _Wait] = OrderedDict()

    def add_wait(self, digest: int, wait_s: float, now: float) -> None:
        """A request that begins so has waited."""
        wait = self._current_wait(digest, now)
        wait.total_s += wait_s
        wait.count += 1

    def has_doubled(self, digest: int, least_s: float, now: float) -> bool:
        """Whether they wait for more than twice as long as before, and than ``least_s``.

        Where nothing is known of before, nothing has doubled. It is told once for a half of a
        window.
        """
        if digest not in self._waits:
            return False
        wait = self._current_wait(digest, now)
        mean = wait.mean_s
        if (
            mean is None
            or wait.previous_s is None
            or mean <= max(least_s, MIN_GROWTH * wait.previous_s)
        ):
            return False
        wait.previous_s = mean
        return True

    def _current_wait(self, digest: int, now: float) -> _Wait:
        half = int(now / self._half_s)
        wait = self._waits.get(digest)
        if wait is None:
            wait = self._waits[digest] = _Wait(half)
            while len(self._waits) > MAX_PREFIXES:
                self._waits.popitem(last=False)
        elif wait.half != half:
            wait.previous_s = wait.mean_s if wait.half == half - 1 else None
            wait.half, wait.total_s, wait.count = half, 0.0, 0
        self._waits.move_to_end(digest)
        return wait
