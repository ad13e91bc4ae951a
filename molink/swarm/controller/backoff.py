"""How long a peer whose stage keeps failing is left out of placement."""

from dataclasses import dataclass, replace

#: Longest time for which a peer is left out, in seconds: a mended one is back within a minute.
MAX_DELAY = 60.0
#: Nothing that works is disturbed for a peer so soon after its first failure, in seconds; twice as
#: long after the next, and so on up to :data:`MAX_DELAY`.
FIRST_DELAY = 10.0
#: A peer without a failure for this long, in seconds, has a clean record again.
FORGET_AFTER = 600.0
#: A peer that is lost within this time after a failure, in seconds, was already going then.
RETRACT_WINDOW = 10.0


@dataclass(frozen=True, slots=True)
class _FailureRecord:
    failures: int
    failed_at: float
    excluded_until: float
    #: Until when it gets no stage where another pipeline works.
    suspect_until: float
    reason: str
    #: What was known before the last failure.
    previous: "_FailureRecord | None" = None


class Backoff:
    """Failures per peer. The first is free; then 1, 2, 4 … seconds up to :data:`MAX_DELAY`."""

    def __init__(self) -> None:
        self._records: dict[str, _FailureRecord] = {}

    def record_failure(self, peer: str, reason: str, now: float, *, at_once: bool = False) -> float:
        """Count a failure; returns for how many seconds the peer is left out.

        ``at_once``: it took so long that it isn't waited for, not even after the first.
        """
        before = self._records.get(peer)
        clean = before is None or now - before.failed_at > FORGET_AFTER
        failures = 1 if clean or before is None else before.failures + 1
        delay = min(MAX_DELAY, 2.0 ** min(failures - 2, 16)) if failures > 1 else 0.0
        if at_once:
            delay = max(delay, FIRST_DELAY)
        rest = min(MAX_DELAY, FIRST_DELAY * 2.0 ** min(failures - 1, 16))
        earlier = None if clean or before is None else replace(before, previous=None)
        self._records[peer] = _FailureRecord(
            failures, now, now + delay, now + rest, reason, earlier
        )
        return delay

    def retract_failure(self, peer: str, now: float) -> None:
        """The peer is gone: what its neighbours have just called its failure was that."""
        record = self._records.get(peer)
        if record is None or now - record.failed_at > RETRACT_WINDOW:
            return
        if record.previous is None:
            del self._records[peer]
        else:
            self._records[peer] = record.previous

    def is_excluded(self, peer: str, now: float) -> bool:
        """Whether the peer is left out now."""
        record = self._records.get(peer)
        return record is not None and now < record.excluded_until

    def is_suspect(self, peer: str, now: float) -> bool:
        """Whether it failed so recently that nothing which works is disturbed for it."""
        record = self._records.get(peer)
        return record is not None and now < record.suspect_until

    def explain_exclusion(self, peer: str, now: float, suspects: bool = False) -> str:
        """Why the peer is left out, for a person; empty if it isn't.

        ``suspects``: they are left out too.
        """
        record = self._records.get(peer)
        if record is None:
            return ""
        left = (record.suspect_until if suspects else record.excluded_until) - now
        if left <= 0:
            return ""
        times = f"{record.failures} failures, the last" if record.failures > 1 else "a failure"
        return f"left out for {left:.0f} s more after {times}: {record.reason}"

    def drop_peer(self, peer: str) -> None:
        """The peer is no member any more."""
        self._records.pop(peer, None)
