"""Relays that a pair of peers does not use for a while."""

from dataclasses import dataclass

#: Seconds for which a relay is excluded; they double with each failure up to the maximum. The
#: record is clean again when the maximum has passed after that.
FIRST_EXCLUSION, MAX_EXCLUSION = 30.0, 3600.0

#: Source and target of a connection.
Pair = tuple[str, str]


@dataclass(slots=True)
class _Exclusion:
    failures: int = 0
    until: float = 0.0
    is_over: bool = False


class RelayExclusions:
    """Failures of relays, by pair. All times in seconds."""

    def __init__(self) -> None:
        self._found: dict[tuple[Pair, str], _Exclusion] = {}

    def __len__(self) -> int:
        return len(self._found)

    def add_failure(self, pair: Pair, relay: str, now: float) -> None:
        """Exclude a relay, for longer than the last time."""
        found = self._found.setdefault((pair, relay), _Exclusion())
        seconds = min(FIRST_EXCLUSION * 2.0 ** min(found.failures, 16), MAX_EXCLUSION)
        found.failures, found.until, found.is_over = found.failures + 1, now + seconds, False

    def is_excluded(self, pair: Pair, relay: str, now: float) -> bool:
        """Whether a relay must not be used yet."""
        found = self._found.get((pair, relay))
        return found is not None and now < found.until

    def has_failed(self, pair: Pair, relay: str) -> bool:
        """Whether a relay's record is not clean."""
        return (pair, relay) in self._found

    def drop_ended(self, now: float) -> bool:
        """End exclusions that are over; returns whether a relay may be used again."""
        ended = [key for key, one in self._found.items() if one.until <= now]
        has_news = not all(self._found[key].is_over for key in ended)
        for key in ended:
            self._found[key].is_over = True
            if now >= self._found[key].until + MAX_EXCLUSION:
                del self._found[key]
        return has_news
