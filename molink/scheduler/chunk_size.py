"""Sizes of prefill chunks.

SARATHI's chunked prefills with decode-maximal batches: a prompt is split into chunks, and each
chunk runs in one forward pass with the current decode rows. Decodes piggyback at little cost, and
no stream stalls while a long prompt is computed. The chunk size follows from the stages' profiles:

- An iteration with a chunk takes at most :data:`MAX_STRETCH` times as long as one without. A round
  trip, which is the time per token of a stream, is the longer of ``K`` steps of the slowest stage
  and one step of every stage.
- *Tile quantization*: chunk and decode rows together fill whole tiles of the matrix products (257
  rows cost the paper's A100 32 % more than 256). If not even one tile fits the bound, as on CPUs, a
  smaller chunk is used if it is faster.
- Without decodes, the smallest chunk that is nearly as efficient as the best one is used, since it
  fills the pipeline and admits new requests sooner.
- If prompts queue for longer than :data:`QUEUED_S`, or :data:`MORE_QUEUED_S` if more prompts wait
  than streams decode, throughput is scarce. Chunks are then large enough for the slowest stage to
  work near its best rate. A single prompt doesn't count as a queue.
- Such chunks are sent without decode rows if a separate pass for these, one for all streams per
  round trip, costs little compared to the chunks (:data:`NEAR_QUEUED`). A stream then waits for
  half a chunk per stage, or for half a layer if stages interleave
  (:mod:`molink.ring.interleaving`), instead of one and a half chunks.

The paper's rule ``P:D = C / (B - 1)`` does not apply, since decodes never wait for a prompt here.
"""

from bisect import bisect_right
from collections.abc import Sequence
from functools import partial

from molink.facts.profile import MAX_CHUNK_ROWS, Profile, smallest_near_best
from molink.facts.ring_times import HANDLING_S

#: Factor by which a chunk may prolong an iteration; below 2, since predictions are inexact.
MAX_STRETCH = 1.7
#: Without decodes, factor by which a prompt may take longer than with the best chunk.
NEAR_BEST = 1.08
#: If no chunk meets the bound, factor by which an iteration may be longer than with the smallest
#: chunk.
NEAR_MIN = 1.1
#: Seconds of the slowest stage's work above which prompts count as a queue; the second value
#: applies if more prompts wait than streams decode. A row may then cost ``NEAR_QUEUED`` times the
#: minimum.
QUEUED_S, MORE_QUEUED_S = 2.0, 0.5
NEAR_QUEUED = 1.05
#: Rows of a chunk if no stage has a profile.
DEFAULT_ROWS = 512
#: Minimum step between candidate sizes, in rows.
_MIN_STEP = 16
#: Candidate sizes reach at least this many rows, even if profiles cover fewer.
_MIN_MAX = 128
#: Minimum rows without decodes, against noisy measurements.
_MIN_ALONE = 64
#: Minimum rows, and step, of a chunk that runs with decodes: small chunks pay off if reading the
#: weights or attention to a long prefix dominates.
_MIN_PIGGYBACKED = 4
_MEMO_SIZE = 1024
#: Remaining rows, in steps, that make a prompt long.
_LONG_PROMPT_STEPS = 256


def max_chunk_rows(fixed: int) -> int:
    """Return the maximum rows of a chunk; ``fixed`` is the setting, 0 for automatic."""
    return fixed or MAX_CHUNK_ROWS


class ChunkSize:
    """Chooses chunk sizes for one ring, or always ``fixed`` rows unless 0.

    Unknown profiles are ignored.
    """

    def __init__(self, fixed: int, profiles: Sequence[Profile], micro_batches: int) -> None:
        self._fixed_rows = fixed
        self._micro_batches = micro_batches
        self._memo: dict[tuple[int, int, int, int], int] = {}
        self._load_profiles([profile for profile in profiles if profile.is_known])

    def set_profiles(self, profiles: Sequence[Profile]) -> None:
        """Update the stages' profiles."""
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
        #: The smallest chunk for queued prompts, and the minimum seconds per row.
        self._queued_rows = smallest_near_best(sizes, costs, NEAR_QUEUED)
        self._row_s = min(costs)
        self._memo.clear()

    def set_micro_batches(self, count: int) -> None:
        """Update the number of micro-batches in flight."""
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
        *,
        alone: bool = False,
    ) -> int:
        """Choose the rows of the next chunk, at least 1.

        ``decoding`` streams have ``context`` tokens each on average. ``left`` rows of the prompt
        remain, after ``before`` tokens; ``queued`` rows remain of all ``prompts``. ``alone`` means
        that the chunk is sent without decode rows (:meth:`leaves_alone`).
        """
        if self._fixed_rows:
            return self._fixed_rows
        if not self._profiles:
            return DEFAULT_ROWS
        rows = self._usual_rows(decoding, left, before, context)
        if not self._is_queue(decoding, queued, prompts):
            return rows
        beside = 0 if alone else -(-decoding // self._micro_batches)
        return max(rows, self._queued_rows - beside)

    def leaves_alone(
        self, decoding: int, context: int = 0, queued: int = 0, prompts: int = 0
    ) -> bool:
        """Whether the next chunk should be sent without decode rows.

        Arguments are as in :meth:`choose_rows`.
        """
        if self._fixed_rows or not self._profiles or not decoding:
            return False
        if not self._is_queue(decoding, queued, prompts):
            return False
        context = context // _MIN_MAX * _MIN_MAX
        return all(self._is_cheap(profile, decoding, context) for profile in self._profiles)

    def _is_cheap(self, profile: Profile, decoding: int, context: int) -> bool:
        """Whether a pass of only the ``decoding`` rows costs little beside ``K`` large chunks."""
        extra = profile.decode_s(decoding, context) - decoding * self._row_s
        chunks = self._micro_batches * self._max_rows * self._row_s
        return extra <= (NEAR_QUEUED - 1) * chunks

    def _is_queue(self, decoding: int, queued: int, prompts: int) -> bool:
        patience_s = MORE_QUEUED_S if 0 < decoding < prompts else QUEUED_S
        return prompts > 1 and queued * self._row_s > patience_s

    def _usual_rows(self, decoding: int, left: int, before: int, context: int) -> int:
        """Return the rows of the next chunk if no prompts queue."""
        piggybacked = -(-decoding // self._micro_batches)
        # Rounded for the memo.
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
        return self._memo[key]

    def _efficient_rows(self, left: int, before: int) -> int:
        """Return the smallest chunk that computes ``left`` rows in nearly minimal time."""
        sizes = [
            rows
            for rows in self._candidate_sizes(0)
            if rows < left + self._step and _is_coarse(rows // self._step)
        ]
        sizes = [rows for rows in sizes if rows >= min(_MIN_ALONE, sizes[-1])]
        times = [self._prompt_s(left, rows, before) for rows in sizes]
        return smallest_near_best(sizes, times, NEAR_BEST)

    def _prompt_s(self, left: int, rows: int, before: int) -> float:
        """Return the seconds until ``left`` rows have left the ring, in chunks of ``rows``."""
        steps = [self._chunk_s(profile, rows, before) for profile in self._profiles]
        return (-(-left // rows) - 1) * max(steps) + sum(steps)

    def _bounded_rows(self, piggybacked: int, before: int, context: int) -> int:
        """Return the largest chunk that keeps ``piggybacked`` decode rows within the bound.

        It is at most the efficient chunk of a long prompt.
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
        """Return the seconds of a round trip if each step has a chunk of ``rows`` rows.

        The first stage computes the chunk together with its decode rows. At later stages the chunk
        arrives during or between other micro-batches' steps, so decode rows wait for half a chunk
        more.
        """
        steps = [
            self._step_s(profile, rows, piggybacked, before, context) for profile in self._profiles
        ]
        waits = [self._chunk_s(profile, rows, before) / 2 for profile in self._profiles[1:]]
        return max(self._micro_batches * max(steps), sum(steps) + sum(waits))

    def _candidate_sizes(self, piggybacked: int) -> list[int]:
        """List candidate numbers of rows in a step, ascending, above ``piggybacked``."""
        step = self._step
        first = -(-(piggybacked + step // 2) // step) * step  # a chunk is at least half a step
        parts = [step >> shift for shift in range(step.bit_length() - 1, 0, -1)]
        below = [rows for rows in parts if rows >= max(_MIN_STEP, 2 * piggybacked)]
        sizes = [*below, *range(first, max(first, self._max_rows) + 1, step)]
        if not piggybacked:
            return sizes
        return [*range(piggybacked + _MIN_PIGGYBACKED, sizes[0], _MIN_PIGGYBACKED), *sizes]

    def _chunk_s(self, profile: Profile, rows: int, before: int) -> float:
        """Return the seconds of a step with only a chunk."""
        return self._step_s(profile, rows, 0, before, 0)

    def _step_s(
        self, profile: Profile, rows: int, piggybacked: int, before: int, context: int
    ) -> float:
        """Return the seconds of a fused step: products of all rows, plus the decodes' attention.

        Attention is the excess of ``T_d`` over a chunk of as many rows. Two separate passes are an
        upper bound.
        """
        alone = profile.decode_s(piggybacked, context)
        if not rows:
            return alone
        attention = max(0.0, alone - profile.prefill_s(piggybacked))
        fused = profile.prefill_s(self._pad_to_tile(rows + piggybacked)) + attention
        apart = profile.prefill_s(self._pad_to_tile(rows)) + alone
        return min(fused, apart) + profile.prefill_token_s * rows * before

    def _pad_to_tile(self, rows: int) -> int:
        """Round rows up to whole tiles, beyond the first."""
        return rows if rows <= self._tile else -(-rows // self._tile) * self._tile


def _row_s(rows: int, profile: Profile) -> float:
    """Return a stage's seconds per row of a chunk."""
    return (profile.prefill_s(rows) + HANDLING_S) / rows


def _is_coarse(count: int) -> bool:
    """Whether the number is one of 0, 1, 2, 3, 4, 6, 8, 12, 16 …"""
    low = max(0, count.bit_length() - 2)
    return count == count >> low << low
