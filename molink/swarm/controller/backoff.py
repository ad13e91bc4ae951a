"""Exponential back-off for peers whose stages keep failing."""

from dataclasses import dataclass, replace

#: Maximum exclusion in seconds; a repaired peer returns within a minute.
MAX_DELAY = 60.0
#: Seconds for which a peer is suspect after its first failure; doubles with each failure up to
#: :data:`MAX_DELAY`. No working pipeline is changed for the sake of a suspect peer.
FIRST_DELAY = 10.0
#: Seconds without a failure after which a peer's record is clean again.
FORGET_AFTER = 600.0
#: Seconds after a failure within which the loss of the peer retracts the failure.
RETRACT_WINDOW = 10.0


@dataclass(frozen=True, slots=True)
class _FailureRecord:
    failures: int
    failed_at: float
    excluded_until: float
    #: Time until which the peer gets no stage while another pipeline works.
    suspect_until: float
    reason: str
    #: The record before the last failure.
    previous: "_FailureRecord | None" = None


class Backoff:
    """Failures per peer.

    The first failure has no delay; then 1, 2, 4 … seconds follow, up to :data:`MAX_DELAY`.
    """

    def __init__(self) -> None:
        self._records: dict[str, _FailureRecord] = {}

    def record_failure(self, peer: str, reason: str, now: float, *, at_once: bool = False) -> float:
        """Count a failure; return for how many seconds the peer is excluded.

        With ``at_once`` it is excluded even after the first failure, since that took long to
        detect.
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
        """Retract the last failure: the peer has left, and its neighbours reported only that."""
        record = self._records.get(peer)
        if record is None or now - record.failed_at > RETRACT_WINDOW:
            return
        if record.previous is None:
            del self._records[peer]
        else:
            self._records[peer] = record.previous

    def is_excluded(self, peer: str, now: float) -> bool:
        """Whether the peer is excluded at ``now``."""
        record = self._records.get(peer)
        return record is not None and now < record.excluded_until

    def is_suspect(self, peer: str, now: float) -> bool:
        """Whether the peer failed so recently that no working pipeline is changed for its sake."""
        record = self._records.get(peer)
        return record is not None and now < record.suspect_until

    def explain_exclusion(self, peer: str, now: float, suspects: bool = False) -> str:
        """Explain why the peer is excluded, for the user; empty if it is not.

        With ``suspects``, suspect peers also count as excluded.
        """
        record = self._records.get(peer)
        if record is None:
            return ""
        left = (record.suspect_until if suspects else record.excluded_until) - now
        if left <= 0:
            return ""
        times = f"{record.failures} failures, the last" if record.failures > 1 else "a failure"
        return f"excluded for {left:.0f} s more after {times}: {record.reason}"

    def drop_peer(self, peer: str) -> None:
        """Drop the record of a peer that is no longer a member."""
        self._records.pop(peer, None)
