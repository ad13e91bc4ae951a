"""How long a peer that says it fetches is believed: only while its bytes come, and at a rate.

What it says can't be checked from here, so the whole time that it may take follows from what its
stage has at most, not from its word.
"""

from molink.facts.model import LayerRange, ModelFacts

#: Slowest transfer that is waited for, in bytes per second.
MIN_RATE = 128 * 1024
#: Without one more byte for this long, in seconds, a transfer stands still.
STALL_TIMEOUT = 30.0
#: What a transfer may take beside its bytes, in seconds: looking for a source, checking the disk.
GRACE_PERIOD = 60.0
#: Some tensors may be stored in wider types than the rest, and files have headers, in bytes.
_DTYPE_MARGIN = 1.5
_HEADER_BYTES = 1 << 20


def stage_bytes(facts: ModelFacts, layers: LayerRange) -> int:
    """Bytes that the files of a stage have at most."""
    first, last = layers
    ends = facts.first_bytes * (first == 0) + facts.last_bytes * (last == facts.layers)
    if facts.tied and last == facts.layers:
        ends += facts.first_bytes
    weights = (last - first) * facts.layer_bytes + ends
    return round(_DTYPE_MARGIN * weights) + facts.extra_bytes + _HEADER_BYTES


def fetched_bytes(facts: ModelFacts, layers: LayerRange) -> int:
    """Bytes that are fetched for a stage at most.

    Which shards it needs isn't known here; of one that wasn't as it should be all come once more.
    """
    if facts.files_bytes:
        return 2 * facts.files_bytes + facts.extra_bytes
    return stage_bytes(facts, layers)


class TransferDeadline:
    """One peer's transfer of at most ``most`` bytes, from the moment it was asked for."""

    def __init__(self, most: int, now: float) -> None:
        self._max_bytes = most
        self._started_at = self._progress_at = now
        self._done = 0

    def observe_bytes(self, done: int, now: float) -> None:
        """The peer says that it has ``done`` bytes."""
        if self._done < done and self._done < self._max_bytes:
            self._done, self._progress_at = min(done, self._max_bytes), now

    @property
    def deadline(self) -> float:
        """When it is given up unless more is heard of it."""
        return min(
            self._progress_at + STALL_TIMEOUT,
            self._started_at + GRACE_PERIOD + self._done / MIN_RATE,
        )
