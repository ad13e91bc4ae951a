"""Decides when a peer replicates layers that its stage does not need, and in which order.

Once every PC holds all layers, a stage that moves finds its files on the new PC's disk, and no PC
holds the only copy of any. Nothing waits for replication, so all other transfers go first.
"""

from collections.abc import Collection

from molink.facts.model import LayerRange

#: After a chunk the next one waits this many times as long as that one took.
REST_FACTOR = 4.0
#: Maximum pause after a fetched chunk, in seconds: on slow lines the rate limit yields already.
MAX_REST = 0.25
#: First and longest pause after a failure, in seconds; each is twice the one before.
FIRST_PAUSE, LONGEST_PAUSE = 5.0, 600.0
#: Replication leaves this fraction of a disk free, and at least as many bytes as it uses.
FREE_SHARE = 0.05


def layer_distance(layer: int, held: LayerRange) -> tuple[int, bool]:
    """Sort key of a layer by its distance to a stage's layers: near ones are replicated first.

    Stages are placed in layer order, so when one is lost or added the others' borders move by some
    layers. At equal distance the next stage's layers come first. Without a stage (``0:0``) this is
    layer order.
    """
    first, last = held
    return max(first - layer, layer - last + 1, 0), layer < first


def has_disk_room(missing: int, free: int, total: int) -> bool:
    """Whether a disk of ``total`` bytes, ``free`` of them free, has room for ``missing`` more."""
    return free - missing >= max(missing, FREE_SHARE * total)


def to_ranges(layers: Collection[int], most: int = 8) -> tuple[LayerRange, ...]:
    """The first ``most`` half-open ranges of layers, in order."""
    found: list[LayerRange] = []
    for layer in sorted(layers):
        if found and found[-1][1] == layer:
            found[-1] = found[-1][0], layer + 1
        else:
            found.append((layer, layer + 1))
    return tuple(found[:most])


class ReplicationSchedule:
    """When replication continues. All times in seconds."""

    def __init__(self) -> None:
        #: Whether a pipeline serves; before that nothing is fetched, since forming it needs the
        #: line.
        self.is_serving = False
        self._next_at = 0.0
        self._backoff = 0.0
        self._reason = ""

    def wait_time(self, now: float, *, fetch: bool) -> float | None:
        """Time to wait before the next chunk (``fetch``) or the next file check.

        ``None``: until :attr:`is_serving` changes.
        """
        if fetch and not self.is_serving:
            return None
        return max(0.0, self._next_at - now)

    def record_duration(self, seconds: float, now: float, *, fetch: bool) -> None:
        """Record a fetched chunk (``fetch``) or a checked file."""
        rest = REST_FACTOR * seconds
        self._next_at = now + (min(rest, MAX_REST) if fetch else rest)

    def reset_backoff(self) -> None:
        """A file is complete: the next failure counts as a first one."""
        self._backoff, self._reason = 0.0, ""

    def record_failure(self, reason: str, now: float) -> bool:
        """Back off after a failure; returns whether the reason is new."""
        self._backoff = min(max(FIRST_PAUSE, 2 * self._backoff), LONGEST_PAUSE)
        self._next_at = now + self._backoff
        news, self._reason = reason != self._reason, reason
        return news

    def retry_now(self) -> None:
        """Retry at once: there are other sources."""
        self._next_at = 0.0
