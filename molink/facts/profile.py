"""How long a stage's forward passes take, as it measured them: ``T_d(x)`` and ``T_p(x)``.

The papers' profile of a device (MoLink, Algorithm 1 and its just-in-time chunks; SARATHI's choice
of a chunk size). A stage measures its own after loading; everybody else computes with it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated

import msgspec

#: Rows of the largest prefill chunk that is made where nobody says otherwise: larger ones take more
#: memory for their activations than they save time (SARATHI: 512 cost at most 10 %).
MAX_CHUNK_ROWS = 512
#: Few enough for a message's header.
MAX_POINTS = 32
#: Longest time of a point, in seconds: whatever is above is no measurement.
MAX_SECONDS = 3600.0

#: Rows of a forward pass and the seconds that it takes.
Point = tuple[
    Annotated[int, msgspec.Meta(ge=1, le=1 << 16)],
    Annotated[float, msgspec.Meta(gt=0, le=MAX_SECONDS)],
]
Points = Annotated[tuple[Point, ...], msgspec.Meta(max_length=MAX_POINTS)]


class Profile(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of one stage's forward passes over its layers; at the last stage with the logits.

    ``decode`` has points of ``T_d(x)``: ``x`` streams decode a token each, after ``context`` tokens
    of their own. ``prefill`` has points of ``T_p(x)``: a chunk of ``x`` rows that begins a prompt.
    Points ascend by rows. ``decode_token_s`` and ``prefill_token_s`` is how much longer a row takes
    for each further token before it. ``tile`` is the number of rows by which matrix products grow
    dearer in steps (SARATHI's tile quantization; 1: no steps). Without points nothing is known.

    Raises (on making or decoding one):
        ValueError: a time is not positive and finite, or rows don't ascend.
    """

    decode: Points = ()
    prefill: Points = ()
    tile: Annotated[int, msgspec.Meta(ge=1, le=256)] = 1
    context: Annotated[int, msgspec.Meta(ge=0, le=1 << 24)] = 0
    decode_token_s: Annotated[float, msgspec.Meta(ge=0, le=MAX_SECONDS)] = 0.0
    prefill_token_s: Annotated[float, msgspec.Meta(ge=0, le=MAX_SECONDS)] = 0.0

    def __post_init__(self) -> None:
        for points in (self.decode, self.prefill):
            _check(points)
        for seconds in (self.decode_token_s, self.prefill_token_s):
            if not 0 <= seconds <= MAX_SECONDS:  # nor NaN
                raise ValueError(f"{seconds} s for each token of context is no measurement")

    @property
    def is_known(self) -> bool:
        """Whether it holds both kinds of times."""
        return bool(self.decode and self.prefill)

    def scale_by(self, factor: float, prefill: float | None = None) -> "Profile":
        """Of a stage of the same kind that takes ``factor`` times as long.

        Its prefill steps take ``prefill`` times as long, if that is another factor.
        """
        prefill = factor if prefill is None else prefill
        return Profile(
            decode=tuple((rows, _bounded(seconds * factor)) for rows, seconds in self.decode),
            prefill=tuple((rows, _bounded(seconds * prefill)) for rows, seconds in self.prefill),
            tile=self.tile,
            context=self.context,
            decode_token_s=min(MAX_SECONDS, self.decode_token_s * factor),
            prefill_token_s=min(MAX_SECONDS, self.prefill_token_s * prefill),
        )

    def decode_s(self, rows: int, context: float = 0) -> float:
        """``T_d``: seconds of a step of ``rows`` decode rows, after ``context`` tokens on average.

        0 for no rows, or if unknown.
        """
        seconds = _at(self.decode, rows)
        if context > self.context:
            seconds += (context - self.context) * self.decode_token_s * rows
        return seconds

    def prefill_s(self, rows: int, before: float = 0) -> float:
        """``T_p``: seconds of a chunk of ``rows`` rows, ``before`` tokens of whose prompt are done.

        0 for no rows, or if unknown.
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
        if not 0 < seconds <= MAX_SECONDS:  # nor NaN
            raise ValueError(f"{seconds} s for {rows} rows is no measurement")
        before = rows


def _at(points: Sequence[tuple[int, float]], rows: int) -> float:
    """Linear between the points. Fewer rows than the first point cost as much as that one.

    Beyond the last point the line goes on as between the last two, but never falls; with a single
    point it is in proportion to rows.
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


#: Of a stage that has told nothing.
UNKNOWN_PROFILE = Profile()


def smallest_near_best(sizes: Sequence[int], costs: Sequence[float], factor: float) -> int:
    """The smallest of ``sizes`` (ascending) that costs at most ``factor`` times the least.

    Chunks, pieces and numbers of micro-batches are all chosen so: larger ones bring hardly anything
    then, and make others wait for longer.
    """
    good = factor * min(costs)
    return next(size for size, cost in zip(sizes, costs, strict=True) if cost <= good)


#: Whatever is beyond, or below one part in so many, is no measurement.
MAX_SLOWDOWN = 100.0


@dataclass(frozen=True, slots=True)
class Slowdown:
    """How many times as long as the stage's profile says its steps take, by their kind."""

    decode: float = 1.0
    prefill: float = 1.0

    def apply_to(self, profile: Profile) -> Profile:
        """The profile as it is at this pace."""
        return profile.scale_by(self.decode, self.prefill)
