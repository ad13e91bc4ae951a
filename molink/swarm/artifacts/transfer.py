"""The rate of a transfer, and the deadline of a transfer that a peer reports.

A peer's reports cannot be verified, so the total time is bounded by the stage's maximum size.
"""

from collections import deque

from molink.facts.model import LayerRange, ModelFacts

#: Minimum accepted rate of a transfer, in bytes per second.
MIN_RATE = 128 * 1024
#: Seconds without progress after which a transfer counts as stalled.
STALL_TIMEOUT = 30.0
#: Seconds allowed in addition to the time for the bytes, for finding a source and checking the
#: disk.
GRACE_PERIOD = 60.0
#: Margin for tensors of wider types, and for file headers (bytes).
_DTYPE_MARGIN = 1.5
_HEADER_BYTES = 1 << 20
#: Averaging window in seconds, in which pauses show, but not a single late sample.
RATE_WINDOW = 10.0
#: Seconds within which a sample replaces the previous one.
_MIN_STEP = 0.25


def stage_bytes(facts: ModelFacts, layers: LayerRange) -> int:
    """Return the maximum bytes of a stage's files."""
    first, last = layers
    opening = facts.first_bytes + facts.vision_bytes
    ends = opening * (first == 0) + facts.last_bytes * (last == facts.layers)
    if last == facts.layers:
        ends += facts.first_bytes * facts.tied + facts.layer_bytes * facts.mtp_layers
    weights = (last - first) * facts.layer_bytes + ends
    return round(_DTYPE_MARGIN * weights) + facts.extra_bytes + _HEADER_BYTES


def fetched_bytes(facts: ModelFacts, layers: LayerRange) -> int:
    """Return the maximum bytes fetched for a stage.

    Its shards are unknown here; a corrupt one is fetched a second time.
    """
    if facts.files_bytes:
        return 2 * facts.files_bytes + facts.extra_bytes
    return stage_bytes(facts, layers)


class TransferDeadline:
    """The deadline of a peer's transfer of at most ``most`` bytes, from the time of the request."""

    def __init__(self, most: int, now: float) -> None:
        self._max_bytes = most
        self._started_at = self._progress_at = now
        self._done = 0

    def observe_bytes(self, done: int, now: float) -> None:
        """Record the peer's report of ``done`` bytes."""
        if self._done < done and self._done < self._max_bytes:
            self._done, self._progress_at = min(done, self._max_bytes), now

    @property
    def deadline(self) -> float:
        """When the transfer is given up without further progress."""
        return min(
            self._progress_at + STALL_TIMEOUT,
            self._started_at + GRACE_PERIOD + self._done / MIN_RATE,
        )


class TransferRate:
    """The rate of one transfer, sampled several times a second. All times are seconds."""

    def __init__(self, now: float, done: int = 0) -> None:
        self._seen: deque[tuple[float, int]] = deque([(now, done)])

    def observe_bytes(self, done: int, now: float) -> None:
        """Record that ``done`` bytes have arrived; fewer than before mean a restart."""
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
        """Return the recent bytes per second."""
        (begun, before), (now, done) = self._seen[0], self._seen[-1]
        return (done - before) / (now - begun) if now > begun else 0.0


def estimate_eta(left: int, rate: float) -> float | None:
    """Estimate the seconds until ``left`` bytes have arrived; ``None`` at rate 0."""
    return left / rate if rate > 0 else None
