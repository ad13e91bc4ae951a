"""Decides how many rows of a prefill volume run and are forwarded as one sub-chunk.

Cut-through: a stage neither waits for a whole volume nor holds its results back. The first rows are
on the next link while later ones are still on the previous one. So the transfer of a prompt through
M stages takes about the time of one link instead of M - 1. The price is efficiency, since each pass
reads all weights.

Small sub-chunks minimize the time to first token while the stage keeps up with the link: each
further stage adds the transfer and pass of one sub-chunk rather than of the volume. They also suit
decoding streams: on average, a decode row waits for half of another request's pass, unless such
passes fill the stage's time. Hence:

- While more rows are arriving, rows of a sub-chunk cost at most :data:`MAX_ROW_COST` times their
  minimum. If rows pile up during a pass, the next sub-chunk is larger and cheaper.
- If rows arrive so slowly that smaller sub-chunks use at most :data:`MAX_BUSY_SHARE` of the time,
  smaller ones run.
- If the stage computes for more than that share of the time, its throughput is scarce and its queue
  keeps the next stages busy. A sub-chunk that runs alone must then be as efficient as one of a
  complete volume.
- Together with decode rows, which read the weights anyway, a few rows suffice.
- A remainder too small for a pass waits for more rows.
- A large volume that is complete, such as a whole prompt at the first stage, is split into
  sub-chunks whose rows cost at most :data:`EFFICIENT_ROW_COST` times the minimum, or up to twice as
  large ones. Sending such a sub-chunk over a home link takes longer than computing it, so the link
  stays busy. The last stage forwards no rows and doesn't split.
- A sub-chunk and its decode rows fill whole tiles (:mod:`molink.scheduler.chunk_size`) while more
  rows remain.
"""

from typing import Protocol

from molink.facts.profile import MAX_CHUNK_ROWS, Profile, smallest_near_best

#: Maximum cost of a row in a sub-chunk, as a multiple of the minimum cost.
MAX_ROW_COST = 2.0
#: Maximum cost of a row in a sub-chunk of a complete volume.
EFFICIENT_ROW_COST = 1.25
#: Share of the time in which rows arrive, and of the stage's time, that more expensive sub-chunks
#: may use.
MAX_BUSY_SHARE = 0.5
#: Minimum rows of a sub-chunk, which bounds the number of messages.
MIN_ROWS = 16
#: Minimum rows of a sub-chunk of a complete volume, even with a noisy profile.
MIN_EFFICIENT_ROWS = 64


class SubChunkPolicy(Protocol):
    """Decides the sizes of sub-chunks."""

    #: Share of the last seconds in which the stage computed (:class:`.step_monitor.BubbleMeter`).
    busy_share: float

    def next_rows(self, available: int, pending: int, piggybacked: int, row_rate: float) -> int:
        """Return how many of the ``available`` rows to run now; 0 means wait for more.

        ``pending`` rows of the volume have not arrived yet; they arrive at about ``row_rate``
        rows/s (0 if unknown). Without pending rows the result is at least 1. ``piggybacked`` decode
        rows run in the same pass.
        """
        ...


class WholeVolumePolicy:
    """Store and forward: a volume runs at once when all of it has arrived."""

    busy_share = 0.0

    def next_rows(self, available: int, pending: int, piggybacked: int, row_rate: float) -> int:
        """As :meth:`SubChunkPolicy.next_rows`."""
        return 0 if pending else available


class EfficientSubChunks:
    """Sub-chunks that are worth a pass by the stage's profile."""

    busy_share = 0.0

    def __init__(self, profile: Profile, *, forwards: bool = True) -> None:
        """``profile`` must have prefill points; ``forwards`` says whether another stage follows."""
        self._forwards = forwards
        self._tile = profile.tile
        maximum = min(MAX_CHUNK_ROWS, max(MIN_ROWS, profile.prefill[-1][0]))
        sizes = sorted({*range(MIN_ROWS, maximum + 1, MIN_ROWS), maximum})
        # Only whole tiles cost what the profile predicts.
        sizes = [rows for rows in sizes if rows % self._tile == 0] or [self._tile]
        costs = [profile.prefill_s(rows) / rows for rows in sizes]
        self.min_rows = smallest_near_best(sizes, costs, MAX_ROW_COST)
        small = range(MIN_ROWS, self.min_rows, MIN_ROWS)
        self._small_sizes = [(rows, profile.prefill_s(rows)) for rows in small]
        self.efficient_rows = max(
            MIN_EFFICIENT_ROWS, smallest_near_best(sizes, costs, EFFICIENT_ROW_COST)
        )

    def next_rows(self, available: int, pending: int, piggybacked: int, row_rate: float) -> int:
        """As :meth:`SubChunkPolicy.next_rows`."""
        if self._forwards and available >= 2 * self.efficient_rows:
            even = -(-available // (available // self.efficient_rows))
            return min(available, -(-(even + piggybacked) // self._tile) * self._tile - piggybacked)
        if not pending:
            return available
        is_busy = self.busy_share > MAX_BUSY_SHARE
        minimum = self.efficient_rows if is_busy else self._min_rows_at(row_rate)
        # The remainder must be worth another pass.
        spare = min(available, available + pending - minimum)
        tiled = (spare + piggybacked) // self._tile * self._tile - piggybacked
        if tiled >= (MIN_ROWS if piggybacked else minimum):
            return tiled
        return spare if spare >= minimum and minimum < self.min_rows else 0

    def _min_rows_at(self, row_rate: float) -> int:
        """Return the minimum number of rows worth a pass at a rate of arrival in rows/s."""
        if row_rate > 0:
            for rows, seconds in self._small_sizes:
                if seconds * row_rate <= MAX_BUSY_SHARE * rows:
                    return rows
        return self.min_rows


def create_sub_chunk_policy(
    profile: Profile, *, cut_through: bool, forwards: bool
) -> SubChunkPolicy:
    """Create the policy for ``profile``; whole volumes without a profile or without cut-through."""
    if cut_through and profile.prefill:
        return EfficientSubChunks(profile, forwards=forwards)
    return WholeVolumePolicy()
