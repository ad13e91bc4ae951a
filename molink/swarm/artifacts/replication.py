"""Decides when a peer replicates layers that its stage does not need, and in which order.

When every PC holds all layers, a stage that moves finds its files on the new PC's disk, and no PC
holds the only copy of a layer. Nothing waits for replication, so all other transfers have priority.
"""

from collections.abc import Collection

from molink.facts.model import LayerRange

#: Pause after a chunk, as a multiple of the time that the chunk took.
REST_FACTOR = 4.0
#: Maximum pause after a fetched chunk, in seconds; on slow lines the rate limit already yields.
MAX_REST = 0.25
#: First and maximum pause after a failure, in seconds; each pause is twice the previous one.
FIRST_PAUSE, LONGEST_PAUSE = 5.0, 600.0
#: Fraction of a disk that replication leaves free; it also leaves as many bytes as it uses.
FREE_SHARE = 0.05


def layer_distance(layer: int, held: LayerRange) -> tuple[int, bool]:
    """Return a layer's sort key: its distance to a stage's layers. Near layers are replicated
    first.

    Stages are placed in layer order, so when one is lost or added, the boundaries of the others
    move by some layers. At equal distance the next stage's layers come first. Without a stage
    (``0:0``) this is layer order.
    """
    first, last = held
    return max(first - layer, layer - last + 1, 0), layer < first


def has_disk_room(missing: int, free: int, total: int) -> bool:
    """Whether a disk of ``total`` bytes, ``free`` of them free, has room for ``missing`` more."""
    return free - missing >= max(missing, FREE_SHARE * total)


def to_ranges(layers: Collection[int], most: int = 8) -> tuple[LayerRange, ...]:
    """Return the first ``most`` half-open ranges of layers, in order."""
    found: list[LayerRange] = []
    for layer in sorted(layers):
        if found and found[-1][1] == layer:
            found[-1] = found[-1][0], layer + 1
        else:
            found.append((layer, layer + 1))
    return tuple(found[:most])


class ReplicationSchedule:
    """Decides when replication continues. All times are seconds."""

    def __init__(self) -> None:
        #: Whether a pipeline serves; before that nothing is fetched, since its formation needs the
        #: line.
        self.is_serving = False
        self._next_at = 0.0
        self._backoff = 0.0
        self._reason = ""

    def wait_time(self, now: float, *, fetch: bool) -> float | None:
        """Return the seconds until the next chunk (``fetch``) or the next file check.

        ``None`` means until :attr:`is_serving` changes.
        """
        if fetch and not self.is_serving:
            return None
        return max(0.0, self._next_at - now)

    def record_duration(self, seconds: float, now: float, *, fetch: bool) -> None:
        """Record a fetched chunk (``fetch``) or a checked file."""
        rest = REST_FACTOR * seconds
        self._next_at = now + (min(rest, MAX_REST) if fetch else rest)

    def reset_backoff(self) -> None:
        """Record a complete file: the next failure counts as the first one."""
        self._backoff, self._reason = 0.0, ""

    def record_failure(self, reason: str, now: float) -> bool:
        """Back off after a failure; return whether the reason is new."""
        self._backoff = min(max(FIRST_PAUSE, 2 * self._backoff), LONGEST_PAUSE)
        self._next_at = now + self._backoff
        news, self._reason = reason != self._reason, reason
        return news

    def retry_now(self) -> None:
        """Retry at once, since there are other sources."""
        self._next_at = 0.0
