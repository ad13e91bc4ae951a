"""How many rows of a prefill volume run, and go on to the next stage, as one piece.

Cut-through: a stage need not wait for the whole of a volume, nor keep what it has computed until
the rest is. The first rows are on the next link while later ones are still on the one before, so
over M stages a prompt's transfer is paid about once and not M - 1 times. What is lost is
efficiency: each pass reads the weights, whatever its rows are.

For the time to a first token the smallest pieces are best as long as the stage keeps up with the
link: a hop then adds the transfer and the pass of one piece, not of the volume. Streams that decode
wait for half a pass that they don't ride in, so small pieces are good for them too, unless these
take so much of the stage's time that there is nearly always one. Hence:

- *While more rows are coming*, a piece has at least as many rows as cost, each, no more than
  :data:`MAX_ROW_COST` times what they do at best. If rows pile up while a pass runs, the next piece
  is larger and cheaper by itself.
- If they come so slowly that smaller pieces keep the stage busy for no more than
  :data:`MAX_BUSY_SHARE` of the time, these will do: the stage would only wait.
- Beside decode rows, which have the weights read anyway, a few rows are enough.
- Nothing is left that would be too small for a last pass; such a rest is waited for.
- *What is there at once* and large (a chunk as long as a prompt, at the first stage above all) is
  cut into pieces of as many rows as are nearly as cheap as any (:data:`EFFICIENT_ROW_COST`), or up
  to twice as many: a link of a home connection needs longer for such a piece than its pass takes,
  and so is never without work. What the head makes with the stages' profiles is hardly ever that
  large. The last stage forwards no rows, and cuts nothing that is there.
- A piece and its decode rows are whole tiles (:mod:`molink.scheduler.chunk_size`) if there are more
  to come.

All rows of a volume that has arrived run sooner or later, as whatever is the last piece.
"""

from typing import Protocol

from molink.facts.profile import MAX_CHUNK_ROWS, Profile, smallest_near_best

#: A pass is worth it if a row costs at most this many times what it does in the best one.
MAX_ROW_COST = 2.0
#: A large volume is cut into pieces whose rows cost at most this many times the least.
EFFICIENT_ROW_COST = 1.25
#: Pieces may be dearer than that if their passes take no more of the time in which rows arrive.
MAX_BUSY_SHARE = 0.5
#: No piece has fewer rows without need, so that messages stay few.
MIN_ROWS = 16
#: What is there at once is not cut into smaller ones, whatever a noisy measurement says.
MIN_EFFICIENT_ROWS = 64


class SubChunkPolicy(Protocol):
    """Decides the sizes of pieces."""

    def next_rows(self, available: int, pending: int, piggybacked: int, row_rate: float) -> int:
        """How many of the ``here`` rows that have arrived are to run now; 0: wait for more.

        ``coming`` rows of the volume are still to arrive, about ``pace`` of them in a second (0 =
        unknown); if none are, the answer is 1 at least. ``riding`` decode rows run in the same
        pass.
        """
        ...


class WholeVolumePolicy:
    """Store and forward: a volume runs when all of it has arrived, and at once."""

    def next_rows(self, available: int, pending: int, piggybacked: int, row_rate: float) -> int:
        """As :class:`SubChunkPolicy` says."""
        return 0 if pending else available


class EfficientSubChunks:
    """Pieces as a stage's profile makes them worth a pass."""

    def __init__(self, profile: Profile, *, forwards: bool = True) -> None:
        """``profile`` has points of prefill passes; ``forwards``: rows go on to another stage."""
        self._forwards = forwards
        self._tile = profile.tile
        maximum = min(MAX_CHUNK_ROWS, max(MIN_ROWS, profile.prefill[-1][0]))
        sizes = sorted({*range(MIN_ROWS, maximum + 1, MIN_ROWS), maximum})
        # Only whole tiles cost what they should.
        sizes = [rows for rows in sizes if rows % self._tile == 0] or [self._tile]
        costs = [profile.prefill_s(rows) / rows for rows in sizes]
        self.min_rows = smallest_near_best(sizes, costs, MAX_ROW_COST)
        small = range(MIN_ROWS, self.min_rows, MIN_ROWS)
        self._small_sizes = [(rows, profile.prefill_s(rows)) for rows in small]
        self.efficient_rows = max(
            MIN_EFFICIENT_ROWS, smallest_near_best(sizes, costs, EFFICIENT_ROW_COST)
        )

    def next_rows(self, available: int, pending: int, piggybacked: int, row_rate: float) -> int:
        """As :class:`SubChunkPolicy` says."""
        if self._forwards and available >= 2 * self.efficient_rows:
            even = -(-available // (available // self.efficient_rows))
            return min(available, -(-(even + piggybacked) // self._tile) * self._tile - piggybacked)
        if not pending:
            return available
        minimum = self._min_rows_at(row_rate)
        # What stays behind must be worth a pass of its own.
        spare = min(available, available + pending - minimum)
        tiled = (spare + piggybacked) // self._tile * self._tile - piggybacked
        if tiled >= (MIN_ROWS if piggybacked else minimum):
            return tiled
        return spare if spare >= minimum and minimum < self.min_rows else 0

    def _min_rows_at(self, row_rate: float) -> int:
        """The fewest rows that are worth a pass if ``pace`` of them arrive in a second."""
        if row_rate > 0:
            for rows, seconds in self._small_sizes:
                if seconds * row_rate <= MAX_BUSY_SHARE * rows:
                    return rows
        return self.min_rows


def create_sub_chunk_policy(
    profile: Profile, *, cut_through: bool, forwards: bool
) -> SubChunkPolicy:
    """Pieces for a stage of ``profile``; whole volumes if it is unknown, or without cut-through."""
    if cut_through and profile.prefill:
        return EfficientSubChunks(profile, forwards=forwards)
    return WholeVolumePolicy()
