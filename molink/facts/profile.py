"""Measured times of a stage's forward passes: ``T_d(x)`` and ``T_p(x)``.

This is the papers' profile of a device (MoLink, Algorithm 1 and its just-in-time chunks; SARATHI's
choice of a chunk size). A stage measures its own after loading and shares it with the ring.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated

import msgspec

#: Rows of the largest default prefill chunk. Larger ones cost more activation memory than they save
#: time (SARATHI: 512 cost at most 10 %).
MAX_CHUNK_ROWS = 512
#: Maximum points; bounded by a message's header.
MAX_POINTS = 32
#: Maximum plausible time in seconds; larger values are rejected.
MAX_SECONDS = 3600.0

#: Rows of a forward pass and its seconds.
Point = tuple[
    Annotated[int, msgspec.Meta(ge=1, le=1 << 16)],
    Annotated[float, msgspec.Meta(gt=0, le=MAX_SECONDS)],
]
Points = Annotated[tuple[Point, ...], msgspec.Meta(max_length=MAX_POINTS)]


class Profile(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of a stage's forward passes over its layers; the last stage's include sampling.

    ``decode`` has points of ``T_d(x)``: ``x`` streams decode a token each after ``context`` tokens.
    ``prefill`` has points of ``T_p(x)``: a chunk of ``x`` rows at the start of a prompt. Points
    ascend by rows. ``decode_token_s`` and ``prefill_token_s`` are additional seconds per row and
    token before it. ``tile`` is the number of rows by which matrix products become more expensive
    in steps (SARATHI's tile quantization; 1: none). A stage that ``interleaves`` runs decode rows
    between the layers of a chunk. A last stage with an MTP layer takes ``mtp_s`` per MTP token
    after the first, whose time is in the points (0: it predicts none). Without points the times are
    unknown.

    Raises (on creation or decoding):
        ValueError: a time is not positive and finite, or rows don't ascend.
    """

    decode: Points = ()
    prefill: Points = ()
    tile: Annotated[int, msgspec.Meta(ge=1, le=256)] = 1
    context: Annotated[int, msgspec.Meta(ge=0, le=1 << 24)] = 0
    decode_token_s: Annotated[float, msgspec.Meta(ge=0, le=MAX_SECONDS)] = 0.0
    prefill_token_s: Annotated[float, msgspec.Meta(ge=0, le=MAX_SECONDS)] = 0.0
    interleaves: bool = False
    mtp_s: Annotated[float, msgspec.Meta(ge=0, le=MAX_SECONDS)] = 0.0

    def __post_init__(self) -> None:
        for points in (self.decode, self.prefill):
            _check(points)
        for seconds in (self.decode_token_s, self.prefill_token_s, self.mtp_s):
            if not 0 <= seconds <= MAX_SECONDS:  # also false for NaN
                raise ValueError(f"{seconds} s per token is not a valid time")

    @property
    def is_known(self) -> bool:
        """Whether both kinds of times were measured."""
        return bool(self.decode and self.prefill)

    def scale_by(self, factor: float, prefill: float | None = None) -> "Profile":
        """Return the profile of a stage ``factor`` times as slow (prefill: ``prefill`` times)."""
        prefill = factor if prefill is None else prefill
        return Profile(
            decode=tuple((rows, _bounded(seconds * factor)) for rows, seconds in self.decode),
            prefill=tuple((rows, _bounded(seconds * prefill)) for rows, seconds in self.prefill),
            tile=self.tile,
            context=self.context,
            decode_token_s=min(MAX_SECONDS, self.decode_token_s * factor),
            prefill_token_s=min(MAX_SECONDS, self.prefill_token_s * prefill),
            interleaves=self.interleaves,
            mtp_s=min(MAX_SECONDS, self.mtp_s * factor),
        )

    def decode_s(self, rows: int, context: float = 0) -> float:
        """Return ``T_d``: seconds for ``rows`` decode rows after ``context`` tokens on average.

        0 for no rows or if unknown.
        """
        seconds = _at(self.decode, rows)
        if context > self.context:
            seconds += (context - self.context) * self.decode_token_s * rows
        return seconds

    def prefill_s(self, rows: int, before: float = 0) -> float:
        """Return ``T_p``: seconds of a chunk of ``rows`` rows after ``before`` prompt tokens.

        0 for no rows or if unknown.
        """
        return _at(self.prefill, rows) + before * self.prefill_token_s * rows


def _bounded(seconds: float) -> float:
    return min(MAX_SECONDS, max(1e-9, seconds))


def _check(points: Sequence[tuple[int, float]]) -> None:
    if len(points) > MAX_POINTS:
        raise ValueError(f"a profile has at most {MAX_POINTS} points of a kind, not {len(points)}")
    before = 0
    for rows, seconds in points:
        if rows <= before:
            raise ValueError(f"a profile's rows must ascend: {rows} after {before}")
        if not 0 < seconds <= MAX_SECONDS:  # also false for NaN
            raise ValueError(f"{seconds} s for {rows} rows is not a valid time")
        before = rows


def _at(points: Sequence[tuple[int, float]], rows: int) -> float:
    """Interpolate linearly. Fewer rows than the first point cost as much as that point.

    Beyond the last point the last slope continues, but never falls; a single point scales by rows.
    """
    if rows < 1 or not points:
        return 0.0
    if rows <= points[0][0]:
        return points[0][1]
    for (left, low), (right, high) in pairwise(points):
        if rows <= right:
            return low + (high - low) * (rows - left) / (right - left)
    last_rows, last = points[-1]
    if len(points) == 1:
        return last * rows / last_rows
    before_rows, before = points[-2]
    slope = max(0.0, (last - before) / (last_rows - before_rows))
    return last + slope * (rows - last_rows)


UNKNOWN_PROFILE = Profile()


def smallest_near_best(sizes: Sequence[int], costs: Sequence[float], factor: float) -> int:
    """Return the smallest of ``sizes`` (ascending) that costs at most ``factor`` times the minimum.

    Larger chunks, sub-chunks and numbers of micro-batches gain little and make other work wait
    longer.
    """
    good = factor * min(costs)
    return next(size for size, cost in zip(sizes, costs, strict=True) if cost <= good)


#: Maximum plausible slowdown; its inverse is the minimum.
MAX_SLOWDOWN = 100.0


@dataclass(frozen=True, slots=True)
class Slowdown:
    """Ratio of a stage's step times to its profile, by kind of step."""

    decode: float = 1.0
    prefill: float = 1.0

    def apply_to(self, profile: Profile) -> Profile:
        """Return the profile at this slowdown."""
        return profile.scale_by(self.decode, self.prefill)
