"""Decides when a peer copies the layers that it doesn't need, in which order, and where that ends.

A stage needs few of a model's layers. Once each PC has the others too, a stage that moves finds its
files on the disk of its new PC, and no PC is the only one with any of them. Nobody waits for that,
so whatever somebody waits for goes first.
"""

from collections.abc import Collection

from molink.facts.model import LayerRange

#: After a chunk the next one waits this many times as long as that one took.
REST_FACTOR = 4.0
#: At most so long after one that was fetched, in seconds: on a slow line its pace gives way.
MAX_REST = 0.25
#: First and longest pause after a failure, in seconds; each is twice the one before.
FIRST_PAUSE, LONGEST_PAUSE = 5.0, 600.0
#: Of a disk, a copy leaves this share free, and as much as it takes itself.
FREE_SHARE = 0.05


def layer_distance(layer: int, held: LayerRange) -> tuple[int, bool]:
    """How near a layer is to those of a stage: the nearest ones are copied first.

    Stages are placed in the order of layers, so when one is lost or comes, the borders of the
    others move by some layers, up or down. Of two that are as near the one of the next stage comes
    first. Without a stage (``0:0``) it is the order of the layers.
    """
    first, last = held
    return max(first - layer, layer - last + 1, 0), layer < first


def has_disk_room(missing: int, free: int, total: int) -> bool:
    """Whether a disk of ``total`` bytes, ``free`` of them free, has room for ``missing`` more."""
    return free - missing >= max(missing, FREE_SHARE * total)


def to_ranges(layers: Collection[int], most: int = 8) -> tuple[LayerRange, ...]:
    """Layers as half-open ranges, in order; the first ``most`` of them."""
    found: list[LayerRange] = []
    for layer in sorted(layers):
        if found and found[-1][1] == layer:
            found[-1] = found[-1][0], layer + 1
        else:
            found.append((layer, layer + 1))
    return tuple(found[:most])


class ReplicationSchedule:
    """When a copy goes on. All times in seconds."""

    def __init__(self) -> None:
        #: Whether a pipeline serves: until then nothing is fetched, others need the line.
        self.is_serving = False
        self._next_at = 0.0
        self._backoff = 0.0
        self._reason = ""

    def wait_time(self, now: float, *, fetch: bool) -> float | None:
        """How long to wait before the next chunk (``fetch``) or the next look at a file.

        ``None``: until :attr:`is_serving` changes.
        """
        if fetch and not self.is_serving:
            return None
        return max(0.0, self._next_at - now)

    def record_duration(self, seconds: float, now: float, *, fetch: bool) -> None:
        """A chunk has come (``fetch``), or a file was looked at."""
        rest = REST_FACTOR * seconds
        self._next_at = now + (min(rest, MAX_REST) if fetch else rest)

    def reset_backoff(self) -> None:
        """A file is whole: a failure after this is a first one."""
        self._backoff, self._reason = 0.0, ""

    def record_failure(self, reason: str, now: float) -> bool:
        """It can't go on for now; returns whether the reason is news."""
        self._backoff = min(max(FIRST_PAUSE, 2 * self._backoff), LONGEST_PAUSE)
        self._next_at = now + self._backoff
        news, self._reason = reason != self._reason, reason
        return news

    def retry_now(self) -> None:
        """There are other sources: no need to wait."""
        self._next_at = 0.0
