"""Micro-batches in flight, and when prefill-only chunks may be sent.

*Micro-batches.* With as many micro-batches as stages, stages idle during transmissions; with more,
each is smaller and reads all weights again. As in the MoLink paper (§4), every count ``K`` from the
pipeline degree ``N`` to ``2N`` is evaluated on the measured profiles (``T_d``), links and current
number of streams, and the best is used. A ring with ``K`` equal micro-batches is a closed chain of
stages and links, each of which serves one micro-batch at a time. Its period, which is the time per
token of a stream, is the longer of one micro-batch's round trip and ``K`` times the slowest stage
or link.

*Prefill-only chunks.* A piggybacked chunk costs least (:mod:`molink.scheduler.chunk_size`), but
lets a prompt advance by only ``K`` chunks per round trip. If latency dominates, stages and links
would idle: at 400 Mbps and 30 ms one way, ``K`` = 3 chunks of 128 rows take 45 of the round trip's
110 ms. In the idle time, stage 0 sends further chunks, as many as keep the slowest stage or link
busy. Each is complete at every stage before the next decode volume arrives there, so no stream is
delayed.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from molink.facts.profile import Profile, smallest_near_best
from molink.facts.ring_times import LinkFacts, RingTimes
from molink.wire.messages.data_plane import MAX_MICRO_BATCHES

#: Tolerance when quotients are rounded up.
_ROUNDING = 1e-6


@dataclass(frozen=True, slots=True)
class PrefillOnlyWindow:
    """Says when prefill-only chunks may be sent.

    Up to ``max_volumes`` prefill volumes may be in flight, 0 if the stages are unknown. A chunk may
    be sent within ``window_s`` seconds after the oldest awaited volume was issued; never if that is
    negative.
    """

    max_volumes: int
    window_s: float


#: Seconds' worth of prefill rows in flight on the slowest link, which delay a prompt that overtakes
#: another. Chunks are not reduced below ``MIN_LINK_ROWS`` rows.
MAX_LINK_BACKLOG_S = 0.75
MIN_LINK_ROWS = 64

NO_WINDOW = PrefillOnlyWindow(0, 0.0)


def prefill_only_window(
    times: RingTimes, rows: int, before: int, piggybacked: int, context: float = 0
) -> PrefillOnlyWindow:
    """Return the window for chunks of ``rows`` rows after ``before`` tokens of their prompt.

    Micro-batches have ``piggybacked`` decode rows after ``context`` tokens on average. A chunk that
    stage 0 starts right before a decode volume returns stays ahead of it at all stages, and delays
    it at each stage where the chunk's step is longer than the decode steps before. (A decode volume
    that overtakes the chunk on a link is late by at most the rest of one step.)
    """
    chunks = [profile.prefill_s(rows, before) for profile in times.profiles]
    sends = [times.send_s(index, rows) for index in range(len(times.links))]
    slowest = max([*chunks, *sends], default=0.0)
    if not slowest:
        return NO_WINDOW
    round_trip = sum(chunks) + times.transfer_s(rows)
    depth = min(math.ceil(round_trip / slowest - _ROUNDING), MAX_MICRO_BATCHES)
    steps = [profile.decode_s(piggybacked, context) for profile in times.profiles]
    ahead = [sum(chunks[: stage + 1]) - sum(steps[:stage]) for stage in range(len(chunks))]
    return PrefillOnlyWindow(depth, times.round_trip_s(piggybacked, context) - max(ahead))


def link_chunk_rows(times: RingTimes, volumes: int) -> int | None:
    """Return the rows per chunk that links sustain with ``volumes`` in flight, if bounded."""
    slowest = max((times.send_s(index, 1) for index in range(len(times.links))), default=0.0)
    return max(MIN_LINK_ROWS, int(MAX_LINK_BACKLOG_S / (volumes * slowest))) if slowest else None


#: Minimum relative gain in time per token that justifies a larger count.
MIN_GAIN = 0.005
_MEMO_SIZE = 1024
#: Context lengths are rounded down to multiples of this for the memos.
_CONTEXT_STEP = 128


@dataclass(frozen=True, slots=True)
class MicroBatchEstimate:
    """The estimated time per token with ``count`` micro-batches of ``rows`` decode rows.

    ``busy`` is the share of time in which the slowest stage computes.
    """

    count: int
    rows: int
    token_s: float
    busy: float


def estimate_counts(times: RingTimes, streams: int, context: float = 0) -> list[MicroBatchEstimate]:
    """Estimate each count from ``N`` to ``2N``, with ``streams`` of ``context`` tokens."""
    degree = len(times.profiles)
    return [
        _estimate_count(times, count, streams, context) for count in range(degree, 2 * degree + 1)
    ]


def choose_best(curve: Sequence[MicroBatchEstimate]) -> MicroBatchEstimate:
    """Return the smallest count within :data:`MIN_GAIN` of the best."""
    best = smallest_near_best(range(len(curve)), [each.token_s for each in curve], 1 + MIN_GAIN)
    return curve[best]


def _estimate_count(
    times: RingTimes, count: int, streams: int, context: float
) -> MicroBatchEstimate:
    rows = max(1, -(-streams // count))
    flying = min(count, -(-streams // rows)) or 1
    steps = [profile.decode_s(rows, context) for profile in times.profiles]
    sends = [times.send_s(index, rows) for index in range(len(times.links))]
    slowest = max([*steps, *sends], default=0.0)
    token_s = max(times.round_trip_s(rows, context), flying * slowest)
    busy = flying * max(steps, default=0.0) / token_s if token_s else 0.0
    return MicroBatchEstimate(count, rows, token_s, busy)


class MicroBatchCount:
    """Chooses ``K`` for one ring: ``fixed`` unless 0, ``degree`` while profiles are unknown."""

    def __init__(
        self,
        fixed: int,
        degree: int,
        profiles: Sequence[Profile],
        row_bytes: int,
        *,
        allows_prefill_only: bool = True,
    ) -> None:
        self._fixed_count = fixed
        self._profiles = _known_profiles(profiles, degree)
        #: Whether prefill volumes without decode rows may exceed ``K``.
        self.allows_prefill_only = allows_prefill_only and bool(self._profiles)
        self._row_bytes = row_bytes
        self._links = (LinkFacts(),) * degree
        #: Memo by streams and context: the best estimate, and seconds per token of each count.
        self._curves: dict[tuple[int, int], tuple[MicroBatchEstimate, dict[int, float]]] = {}
        #: Memo of windows by rows, tokens before them, piggybacked rows and context.
        self._windows: dict[tuple[int, int, int, int], PrefillOnlyWindow] = {}
        #: Memo of chunk rows by micro-batches in flight.
        self._link_rows: dict[int, int | None] = {}
        #: Micro-batches in flight.
        self.count = fixed or degree

    def set_times(self, times: RingTimes) -> None:
        """Update stage and link times. If any stage was unknown at first, all stay unknown."""
        self._profiles = _known_profiles(times.profiles, len(self._profiles))
        self._links = tuple(times.links)
        self._curves.clear()
        self._windows.clear()
        self._link_rows.clear()

    def update_count(self, streams: int, context: int = 0) -> int:
        """Return ``K`` for ``streams`` decoding streams of ``context`` tokens each on average."""
        if self.is_adaptive and streams:
            self.count = self._choose_count(streams, _round_context(context))
        return self.count

    @property
    def is_adaptive(self) -> bool:
        """Whether ``K`` is not fixed and the stages are known."""
        return bool(self._profiles) and not self._fixed_count

    def prefill_only_window(
        self, rows: int, before: int, streams: int, context: int = 0
    ) -> PrefillOnlyWindow:
        """Return the window for prefill-only chunks; closed if disabled or stages are unknown."""
        if not self.allows_prefill_only:
            return NO_WINDOW
        piggybacked = -(-streams // self.count)
        key = rows, _round_context(before), piggybacked, _round_context(context)
        if key not in self._windows:
            if len(self._windows) >= _MEMO_SIZE:
                self._windows.clear()
            self._windows[key] = prefill_only_window(self._ring_times, *key)
        return self._windows[key]

    @property
    def link_chunk_rows(self) -> int | None:
        """Return the rows per chunk that links sustain with the current count."""
        if self.count not in self._link_rows:
            self._link_rows[self.count] = link_chunk_rows(self._ring_times, self.count)
        return self._link_rows[self.count]

    def _choose_count(self, streams: int, context: int) -> int:
        if (streams, context) not in self._curves:
            if len(self._curves) >= _MEMO_SIZE:
                self._curves.clear()
            curve = estimate_counts(self._ring_times, streams, context)
            now = {each.count: each.token_s for each in curve}
            self._curves[streams, context] = choose_best(curve), now
        best, token_s = self._curves[streams, context]
        return best.count if best.token_s < (1 - MIN_GAIN) * token_s[self.count] else self.count

    @property
    def _ring_times(self) -> RingTimes:
        return RingTimes(self._profiles, self._links, self._row_bytes)


def _known_profiles(profiles: Sequence[Profile], degree: int) -> tuple[Profile, ...]:
    """The profiles if all ``degree`` stages are known, otherwise none."""
    known = len(profiles) == degree and all(profile.is_known for profile in profiles)
    return tuple(profiles) if known else ()


def _round_context(tokens: int) -> int:
    return tokens - tokens % _CONTEXT_STEP
