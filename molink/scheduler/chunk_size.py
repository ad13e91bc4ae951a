"""How many rows the next prefill chunk has.

SARATHI's chunked prefills with decode-maximal batches: a prompt is cut into chunks, and each runs
as one forward pass with the decode rows of that moment. The decodes ride along at little cost, and
no stream stands still while a long prompt is computed. What a chunk costs is known from the stages'
profiles, so its size is not a constant here but follows from what it does to those who decode:

- An iteration with a chunk takes at most :data:`MAX_STRETCH` times one without. A turn of the ring
  is what a stream waits for its next token: with ``K`` micro-batches ``K`` steps of the slowest
  stage, or all stages' steps one after another, whichever is longer.
- *Tile quantization*: chunk and decode rows together are a multiple of the matrix products' tile
  (257 rows cost the paper's A100 32 % more than 256). Where not even one tile is within the bound,
  as on CPUs, a smaller chunk is taken if it is really faster.
- While nobody decodes, a chunk is as small as is nearly as efficient as any: small chunks fill a
  ring of several stages sooner, and let newcomers in sooner.
- Where prompts have queued up for longer than :data:`QUEUED_S`, stages are what is scarce: then no
  chunk is so small that the slowest of them computes much fewer rows a second than it could. Where
  more prompts wait than streams decode, that counts from :data:`MORE_QUEUED_S` on. A single prompt
  is no queue, however long it is: streams would wait for it, and nobody else would gain.

The paper's other rule, ``P:D = C / (B - 1)``, balances a chunk against the decodes that ride along;
here they never wait for a prompt, so that nothing has to be balanced.
"""

from bisect import bisect_right
from collections.abc import Sequence
from functools import partial

from molink.facts.profile import MAX_CHUNK_ROWS, Profile, smallest_near_best
from molink.facts.ring_times import HANDLING_S

#: How much longer a chunk may make an iteration. Below 2, since no step is exactly as predicted.
MAX_STRETCH = 1.7
#: Without decodes, a chunk may be this much slower than the best one.
NEAR_BEST = 1.08
#: Where nothing within the bound is to be had: how much dearer than the least a chunk may be.
NEAR_MIN = 1.1
#: Seconds that the slowest stage would compute the prompts that wait for, from which on they count
#: as a queue, the latter where they are more than decode; and how much dearer than the least a row
#: may be then.
QUEUED_S, MORE_QUEUED_S = 2.0, 0.5
NEAR_QUEUED = 1.05
#: Rows of a chunk where no stage's times are known.
DEFAULT_ROWS = 512
#: Chunks are compared in steps of this many rows at least, and none is smaller without need.
_MIN_STEP = 16
#: Chunks of this size may be made even where no profile goes so far.
_MIN_MAX = 128
#: Without decodes no chunk is smaller, whatever a noisy measurement says.
_MIN_ALONE = 64
#: Beside decodes it may be, in steps of so many rows: where weights come from memory once for all
#: rows of a step, or late in a long prompt, when attention to all before is what costs.
_MIN_PIGGYBACKED = 4
_MEMO_SIZE = 1024
#: So many steps of rows are left, or more: a long prompt.
_LONG_PROMPT_STEPS = 256


def max_chunk_rows(fixed: int) -> int:
    """Rows of the largest chunk there can be; ``fixed`` is the setting, 0 = as decided here."""
    return fixed or MAX_CHUNK_ROWS


class ChunkSize:
    """Decides for one ring. ``fixed`` rows if that is not 0.

    ``profiles`` are those of its stages; unknown ones say nothing.
    """

    def __init__(self, fixed: int, profiles: Sequence[Profile], micro_batches: int) -> None:
        self._fixed_rows = fixed
        self._micro_batches = micro_batches
        self._memo: dict[tuple[int, int, int, int], int] = {}
        self._load_profiles([profile for profile in profiles if profile.is_known])

    def set_profiles(self, profiles: Sequence[Profile]) -> None:
        """Stages may have measured themselves anew."""
        known = [profile for profile in profiles if profile.is_known]
        if known != self._profiles:
            self._load_profiles(known)

    def _load_profiles(self, profiles: list[Profile]) -> None:
        self._profiles = profiles
        self._tile = max((profile.tile for profile in self._profiles), default=1)
        self._step = -(-_MIN_STEP // self._tile) * self._tile
        measured = min((each.prefill[-1][0] for each in self._profiles), default=0)
        maximum = min(MAX_CHUNK_ROWS, max(_MIN_MAX, self._tile, measured))
        self._max_rows = maximum // self._step * self._step or self._step
        sizes = self._candidate_sizes(0)
        costs = [max(map(partial(_row_s, rows), self._profiles), default=0.0) for rows in sizes]
        #: The smallest chunk for many prompts, and seconds that a row takes in the best one.
        self._queued_rows = smallest_near_best(sizes, costs, NEAR_QUEUED)
        self._row_s = min(costs)
        self._memo.clear()

    def set_micro_batches(self, count: int) -> None:
        """Another number of micro-batches is in flight."""
        if count != self._micro_batches:
            self._micro_batches = count
            self._memo.clear()

    def choose_rows(
        self,
        decoding: int,
        left: int,
        before: int = 0,
        context: int = 0,
        queued: int = 0,
        prompts: int = 0,
    ) -> int:
        """Rows of the next chunk, at least 1.

        ``decoding`` streams are between two tokens, spread over the micro-batches, after
        ``context`` tokens each on average. ``left`` prompt rows are still to be computed, the first
        of them after ``before`` tokens of its prompt; ``queued`` are those of all ``prompts``.
        """
        if self._fixed_rows:
            return self._fixed_rows
        if not self._profiles:
            return DEFAULT_ROWS
        piggybacked = -(-decoding // self._micro_batches)
        # Rounded, so that what was decided once can be remembered.
        before = before // _MIN_MAX * _MIN_MAX
        context = context // _MIN_MAX * _MIN_MAX if piggybacked else 0
        steps = 0 if piggybacked else max(1, min(-(-left // self._step), _LONG_PROMPT_STEPS))
        key = piggybacked, steps, before, context
        if key not in self._memo:
            if len(self._memo) >= _MEMO_SIZE:
                self._memo.clear()
            self._memo[key] = (
                self._bounded_rows(piggybacked, before, context)
                if piggybacked
                else self._efficient_rows(steps * self._step, before)
            )
        rows = self._memo[key]
        patience_s = MORE_QUEUED_S if 0 < decoding < prompts else QUEUED_S
        is_queue = prompts > 1 and queued * self._row_s > patience_s
        return max(rows, self._queued_rows - piggybacked) if is_queue else rows

    # --- nobody decodes ------------------------------------------------------------------------

    def _efficient_rows(self, left: int, before: int) -> int:
        """The smallest chunk with which ``left`` rows are through the ring in almost no time."""
        sizes = [
            rows
            for rows in self._candidate_sizes(0)
            if rows < left + self._step and _is_coarse(rows // self._step)
        ]
        sizes = [rows for rows in sizes if rows >= min(_MIN_ALONE, sizes[-1])]
        times = [self._prompt_s(left, rows, before) for rows in sizes]
        return smallest_near_best(sizes, times, NEAR_BEST)

    def _prompt_s(self, left: int, rows: int, before: int) -> float:
        """Seconds until the last of ``left`` rows has left the ring, in chunks of
        ``choose_rows``."""
        steps = [self._chunk_s(profile, rows, before) for profile in self._profiles]
        return (-(-left // rows) - 1) * max(steps) + sum(steps)

    # --- others decode -------------------------------------------------------------------------

    def _bounded_rows(self, piggybacked: int, before: int, context: int) -> int:
        """The largest chunk that doesn't make ``riding`` decode rows wait too long.

        It is no larger than pays: than one for a long prompt that nobody would wait for.
        """
        maximum = self._efficient_rows(_LONG_PROMPT_STEPS * self._step, before)
        sizes = [rows - piggybacked for rows in self._candidate_sizes(piggybacked)]
        sizes = [rows for rows in sizes if rows <= maximum] or sizes[:1]
        round_trip_s = partial(
            self._round_trip_s, piggybacked=piggybacked, before=before, context=context
        )
        bound = max(MAX_STRETCH * round_trip_s(0), NEAR_MIN * round_trip_s(sizes[0]))
        return sizes[max(0, bisect_right(sizes, bound, key=round_trip_s) - 1)]

    def _round_trip_s(self, rows: int, piggybacked: int, before: int, context: int) -> float:
        """Seconds of a turn of the ring, in each step a chunk of ``choose_rows`` rows.

        The first stage has a chunk and the decode rows beside it at the same time. At the others
        the chunk comes later, in the midst of another micro-batch's step or between two: decode
        rows wait for half a chunk more there.
        """
        steps = [
            self._step_s(profile, rows, piggybacked, before, context) for profile in self._profiles
        ]
        waits = [self._chunk_s(profile, rows, before) / 2 for profile in self._profiles[1:]]
        return max(self._micro_batches * max(steps), sum(steps) + sum(waits))

    # --- steps ---------------------------------------------------------------------------------

    def _candidate_sizes(self, piggybacked: int) -> list[int]:
        """Numbers of rows that a step may have in all, ascending, more than ``riding``."""
        step = self._step
        first = -(-(piggybacked + step // 2) // step) * step  # a chunk is half a step at least
        parts = [step >> shift for shift in range(step.bit_length() - 1, 0, -1)]
        below = [rows for rows in parts if rows >= max(_MIN_STEP, 2 * piggybacked)]
        sizes = [*below, *range(first, max(first, self._max_rows) + 1, step)]
        if not piggybacked:
            return sizes
        return [*range(piggybacked + _MIN_PIGGYBACKED, sizes[0], _MIN_PIGGYBACKED), *sizes]

    def _chunk_s(self, profile: Profile, rows: int, before: int) -> float:
        """Seconds of a step that has nothing but a chunk."""
        return self._step_s(profile, rows, 0, before, 0)

    def _step_s(
        self, profile: Profile, rows: int, piggybacked: int, before: int, context: int
    ) -> float:
        """Seconds of a fused step: what all rows' matrix products take, and decodes' attention.

        The latter is what ``T_d`` is longer than a chunk of as many rows; two passes one after
        another are an upper bound.
        """
        alone = profile.decode_s(piggybacked, context)
        if not rows:
            return alone
        attention = max(0.0, alone - profile.prefill_s(piggybacked))
        fused = profile.prefill_s(self._pad_to_tile(rows + piggybacked)) + attention
        apart = profile.prefill_s(self._pad_to_tile(rows)) + alone
        return min(fused, apart) + profile.prefill_token_s * rows * before

    def _pad_to_tile(self, rows: int) -> int:
        """What ``choose_rows`` rows cost as much as: full tiles, beyond the first."""
        return rows if rows <= self._tile else -(-rows // self._tile) * self._tile


def _row_s(rows: int, profile: Profile) -> float:
    """Seconds that a stage is busy with each row of a chunk."""
    return (profile.prefill_s(rows) + HANDLING_S) / rows


def _is_coarse(count: int) -> bool:
    """Whether it is one of 0, 1, 2, 3, 4, 6, 8, 12, 16 …: enough sizes to compare."""
    low = max(0, count.bit_length() - 2)
    return count == count >> low << low
