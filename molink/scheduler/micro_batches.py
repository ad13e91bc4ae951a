"""How many micro-batches are in flight: ``K``, from the pipeline degree ``N`` to ``2N``.

With as many micro-batches as stages each one comes back late by its transmissions, and stages idle
meanwhile; with more of them, each is smaller and every one reads all weights anew. As the
MoLinkPolicy paper (§4) has it, every count is tried on the measured profile and the best one taken:
what is known of the stages (``T_d``), of the links, and how many streams decode at the moment.

A ring with ``K`` equal micro-batches and steps that take as long as predicted is a closed chain of
stages and links, each serving one micro-batch at a time. Its period, which is what a stream waits
for its next token, is the longer of a whole turn of one micro-batch and ``K`` times the slowest
stage or link.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from molink.facts.profile import Profile, smallest_near_best
from molink.facts.ring_times import LinkFacts, RingTimes
from molink.wire.messages.data_plane import MAX_MICRO_BATCHES

#: Quotients that differ by less are the same.
_ROUNDING = 1e-6


@dataclass(frozen=True, slots=True)
class PrefillOnlyWindow:
    """Of chunks that go unpaired: up to how many prefill volumes, and when.

    Up to ``max_volumes`` may be in flight, unpaired or not; 0 if nothing is known of the stages. A
    chunk may go while the oldest volume that streams wait for has been under way for ``window_s``
    seconds at most; never if that is negative.
    """

    max_volumes: int
    window_s: float


#: Seconds for which the slowest link is busy with the prompts' rows in flight, about. A prompt that
#: goes before the rest of another one waits for these. And rows of a chunk that are not too many on
#: any link.
MAX_LINK_BACKLOG_S = 0.75
MIN_LINK_ROWS = 64

#: None goes unpaired.
NO_WINDOW = PrefillOnlyWindow(0, 0.0)


def prefill_only_window(
    times: RingTimes, rows: int, before: int, piggybacked: int, context: float = 0
) -> PrefillOnlyWindow:
    """What holds for chunks of ``rows`` rows after ``before`` tokens of their prompt.

    ``riding`` decode rows are in a micro-batch, after ``context`` tokens on average.

    A chunk that stage 0 begins right before a decode volume comes back stays ahead of it all the
    way: by how much its step is longer than theirs at one stage, the decode volume waits at the
    next. (On a link it passes the chunk; where that changes who comes first, it is late by the rest
    of one step.)
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
    """Rows of a chunk of which ``volumes`` are in flight; ``None``: no link bounds them."""
    slowest = max((times.send_s(index, 1) for index in range(len(times.links))), default=0.0)
    return max(MIN_LINK_ROWS, int(MAX_LINK_BACKLOG_S / (volumes * slowest))) if slowest else None


#: A count is only left for one that promises so much less time per token.
MIN_GAIN = 0.005
_MEMO_SIZE = 1024
#: Tokens before a row are rounded to these, so that what was decided can be remembered.
_CONTEXT_STEP = 128


@dataclass(frozen=True, slots=True)
class MicroBatchEstimate:
    """What ``count`` micro-batches promise: ``rows`` decode rows in each, seconds per token.

    ``busy`` is the share of the time in which the slowest stage computes.
    """

    count: int
    rows: int
    token_s: float
    busy: float


def estimate_counts(times: RingTimes, streams: int, context: float = 0) -> list[MicroBatchEstimate]:
    """What every count from ``N`` to ``2N`` promises to ``streams`` decoding streams.

    They have ``context`` tokens each, on average.
    """
    degree = len(times.profiles)
    return [
        _estimate_count(times, count, streams, context) for count in range(degree, 2 * degree + 1)
    ]


def choose_best(curve: Sequence[MicroBatchEstimate]) -> MicroBatchEstimate:
    """The smallest count that is as good as any, or nearly so."""
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
    """Decides ``K`` for one ring; ``fixed`` if that is not 0, ``degree`` while nothing is known."""

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
        #: Whether prefill volumes may go without decode rows beyond the ``K``.
        self.allows_prefill_only = allows_prefill_only and bool(self._profiles)
        self._row_bytes = row_bytes
        self._links = (LinkFacts(),) * degree
        #: By streams and their context: the best count, and what each promises, in seconds.
        self._curves: dict[tuple[int, int], tuple[MicroBatchEstimate, dict[int, float]]] = {}
        #: By rows, tokens before them, decode rows of a micro-batch, and their context.
        self._windows: dict[tuple[int, int, int, int], PrefillOnlyWindow] = {}
        #: By micro-batches in flight.
        self._link_rows: dict[int, int | None] = {}
        #: Micro-batches in flight now.
        self.count = fixed or degree

    def set_times(self, times: RingTimes) -> None:
        """Stages have measured themselves or their links anew.

        Where not all stages were known at first, none is.
        """
        self._profiles = _known_profiles(times.profiles, len(self._profiles))
        self._links = tuple(times.links)
        self._curves.clear()
        self._windows.clear()
        self._link_rows.clear()

    def update_count(self, streams: int, context: int = 0) -> int:
        """``K`` while ``streams`` streams decode, of ``context`` tokens each on average."""
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
        """What holds for chunks of ``rows`` rows that go unpaired; see :func:`prefill_only_window`.

        None may where that is switched off or nothing is known of the stages.
        """
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
        """Rows of a chunk of which there are as many in flight; see :func:`link_chunk_rows`."""
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
    """Those of all ``degree`` stages, or none."""
    known = len(profiles) == degree and all(profile.is_known for profile in profiles)
    return tuple(profiles) if known else ()


def _round_context(tokens: int) -> int:
    return tokens - tokens % _CONTEXT_STEP
