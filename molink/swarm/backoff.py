"""How long a peer whose stage keeps failing is left out of placement."""

from dataclasses import dataclass

#: Longest time for which a peer is left out, in seconds: a mended one is back within a minute.
MAX_DELAY = 60.0
#: A peer without a failure for this long, in seconds, has a clean record again.
MEMORY = 600.0


@dataclass(frozen=True, slots=True)
class _Record:
    failures: int
    last: float
    until: float
    reason: str


class Backoff:
    """Failures per peer. The first is free; then 1, 2, 4 … seconds up to :data:`MAX_DELAY`."""

    def __init__(self) -> None:
        self._records: dict[str, _Record] = {}

    def failed(self, peer: str, reason: str, now: float) -> float:
        """Count a failure; returns for how many seconds the peer is left out."""
        before = self._records.get(peer)
        clean = before is None or now - before.last > MEMORY
        failures = 1 if clean or before is None else before.failures + 1
        delay = min(MAX_DELAY, 2.0 ** min(failures - 2, 16)) if failures > 1 else 0.0
        self._records[peer] = _Record(failures, now, now + delay, reason)
        return delay

    def blocked(self, peer: str, now: float) -> bool:
        """Whether the peer is left out now."""
        record = self._records.get(peer)
        return record is not None and now < record.until

    def suspect(self, peer: str, now: float) -> bool:
        """Whether it failed so recently that nothing which works is disturbed for it."""
        record = self._records.get(peer)
        return record is not None and now - record.last <= MEMORY

    def explain(self, peer: str, now: float, suspects: bool = False) -> str:
        """Why the peer is left out, for a person; empty if it isn't.

        ``suspects``: they are left out too.
        """
        record = self._records.get(peer)
        if record is None:
            return ""
        left = (record.last + MEMORY if suspects else record.until) - now
        if left <= 0:
            return ""
        duration = f"{left:.0f} s" if left < 90 else f"{left / 60:.0f} min"
        times = f"{record.failures} failures, the last" if record.failures > 1 else "a failure"
        return f"left out for {duration} more after {times}: {record.reason}"

    def forget(self, peer: str) -> None:
        """The peer is no member any more."""
        self._records.pop(peer, None)
