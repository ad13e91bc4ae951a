"""How fast transfers get on, from how far they were at earlier looks."""

from collections import deque

#: Seconds that a rate is averaged over.
WINDOW_S = 5.0


class Rates:
    """Bytes per second by transfer. A plain object; times in seconds of any monotonic clock."""

    def __init__(self) -> None:
        self._seen: dict[str, deque[tuple[float, int]]] = {}

    def look(self, transfers: dict[str, int], now: float) -> dict[str, float | None]:
        """Take how many bytes of each transfer are done ``now``; a rate is unknown at first.

        One that has begun anew, and is behind where it was, has no rate yet.
        """
        self._seen = {name: self._seen.get(name, deque()) for name in transfers}
        rates: dict[str, float | None] = {}
        for name, done in transfers.items():
            seen = self._seen[name]
            if seen and done < seen[-1][1]:
                seen.clear()
            seen.append((now, done))
            while len(seen) > 2 and seen[1][0] <= now - WINDOW_S:
                seen.popleft()
            since, first = seen[0]
            passed = now - since
            rates[name] = (done - first) / passed if passed > 0 else None
        return rates
