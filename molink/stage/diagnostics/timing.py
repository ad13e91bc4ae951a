"""Measures ``T_d(x)`` and ``T_p(x)`` within a deadline, with a given clock."""

from collections.abc import Callable
from statistics import median
from typing import Protocol

from molink.facts.profile import Profile

#: Measured row counts, as deadline and memory allow.
DECODE_ROWS = (1, 2, 4, 8, 16, 32, 64, 128)
PREFILL_ROWS = (8, 16, 32, 64, 128, 256, 512, 1024)
#: Context of decode rows, and a longer one to measure its cost.
SHORT_CONTEXT = 128
DEEP_CONTEXT = 2048
DEEP_ROWS = 64
#: Repeats of a point, or their maximum seconds, after a warm-up.
_REPEATS = 5
_MAX_POINT_S = 0.1
#: Where tile sizes of matrix products are searched, and their range.
_TILE_BASES = (256, 128, 64)
_TILE_SIZES = (256, 128, 64, 32, 16, 8)
#: Minimum cost of one more row at a tile border, and its maximum within a tile.
_MIN_TILE_STEP = 1.08
_MAX_PLATEAU_GROWTH = 1.04
#: Tolerance for attention, which grows quadratically.
_MAX_ATTENTION_GROWTH = 1.1
#: Passes that must fit the deadline before tiles are searched.
_TILE_PASSES = 8
#: Share of the time for both tables.
_TABLES_SHARE = 0.6


#: Picks one of several times.
PickTime = Callable[[list[float]], float]


class TimedPasses(Protocol):
    """Runs forward passes of a stage synchronously.

    Raises ``MemoryError`` if a pass doesn't fit.
    """

    @property
    def max_context(self) -> int:
        """Maximum positions of a row."""

    def run_decode(self, rows: int, context: int) -> None:
        """Run one decode row each of ``rows`` requests, after ``context`` tokens."""

    def run_prefill(self, rows: int, before: int) -> None:
        """Run a chunk of ``rows`` rows after ``before`` tokens of a prompt."""


def measure_profile(passes: TimedPasses, clock: Callable[[], float], seconds: float) -> Profile:
    """Measure a profile in about ``seconds`` seconds; the faster half of a pass's runs counts.

    ``T_d(1)`` and ``T_p`` of the smallest chunk are always measured, other points only if they fit
    the deadline; then the cost of longer contexts, and the tile. Raises ``MemoryError`` if not even
    the smallest passes fit.
    """
    return _ProfileTimer(passes, clock, seconds).measure_profile()


class _ProfileTimer:
    """One call of :func:`measure_profile`."""

    def __init__(self, passes: TimedPasses, clock: Callable[[], float], seconds: float) -> None:
        self._passes = passes
        self._clock = clock
        self._deadline = clock() + _TABLES_SHARE * seconds
        self._seconds = seconds
        max_context = passes.max_context
        self._context = min(SHORT_CONTEXT, max_context - 1)
        self._deep = min(DEEP_CONTEXT, max_context - DEEP_ROWS)
        self._chunks = [rows for rows in PREFILL_ROWS if rows <= max_context] or [max_context]

    def measure_profile(self) -> Profile:
        decode, prefill = self._measure_tables()
        self._deadline += (1 - _TABLES_SHARE) * self._seconds
        # Measure the baseline again: the process was just starting the first time.
        decode[1] = min(decode[1], self._try_run(self._time_decode(1), decode[1]) or decode[1])
        return Profile(
            decode=_smooth_table(decode),
            prefill=_smooth_table(prefill),
            context=self._context,
            decode_token_s=self._decode_slope(decode[1]),
            prefill_token_s=self._prefill_slope(prefill),
            tile=self._find_tile(prefill),
        )

    def _measure_tables(self) -> tuple[dict[int, float], dict[int, float]]:
        """Measure both tables point by point, always the one expected to be faster."""
        decode = {1: self._time_run(self._time_decode(1))}
        prefill = {self._chunks[0]: self._time_run(self._time_prefill(self._chunks[0]))}
        open_ends = [
            (decode, list(DECODE_ROWS[1:]), self._time_decode),
            (prefill, self._chunks[1:], self._time_prefill),
        ]
        while any(rows for _, rows, _ in open_ends):
            table, rows, make = min(
                (end for end in open_ends if end[1]),
                key=lambda end: _predict_next_s(end[0], end[1][0]),
            )
            taken = self._try_run(make(rows[0]), _predict_next_s(table, rows[0]))
            if taken is None:
                rows.clear()  # larger ones take longer
            else:
                table[rows.pop(0)] = taken
        return decode, prefill

    def _decode_slope(self, short: float) -> float:
        further = self._deep - self._context
        if further < self._context:
            return 0.0
        predicted = 2 * short
        taken = self._try_run(lambda: self._passes.run_decode(1, self._deep), predicted)
        return max(0.0, taken - short) / further if taken is not None else 0.0

    def _prefill_slope(self, prefill: dict[int, float]) -> float:
        rows = max((each for each in prefill if each <= DEEP_ROWS), default=0)
        if not rows or self._deep < rows:
            return 0.0
        predicted = 2 * prefill[rows]
        taken = self._try_run(lambda: self._passes.run_prefill(rows, self._deep), predicted)
        return max(0.0, taken - prefill[rows]) / (rows * self._deep) if taken is not None else 0.0

    def _find_tile(self, prefill: dict[int, float]) -> int:
        """Tile size of matrix products around the largest affordable chunk."""
        left = self._deadline - self._clock()
        for base in _TILE_BASES:
            fits = 2 * base <= self._passes.max_context
            if base in prefill and fits and _TILE_PASSES * prefill[base] <= left:
                return self._is_tile_at(base)
        return 1

    def _is_tile_at(self, base: int) -> int:
        """Compare ``T_p(n · tile)`` with ``T_p(n · tile + 1)`` and ``T_p((n + 1) · tile)``."""
        below, above = self._min_prefill_s(base), self._min_prefill_s(base + 1)
        if below is None or above is None or above < _MIN_TILE_STEP * below:
            return 1
        for tile in _TILE_SIZES:
            if tile <= base:
                end = self._min_prefill_s(base + tile)
                if end is not None and end <= _MAX_PLATEAU_GROWTH * above:
                    return tile
        return 1

    def _min_prefill_s(self, rows: int) -> float | None:
        """Minimum time of a chunk: noise must not look like a tile."""
        return self._try_run(self._time_prefill(rows), pick=min)

    def _time_decode(self, rows: int) -> Callable[[], None]:
        return lambda: self._passes.run_decode(rows, self._context)

    def _time_prefill(self, rows: int) -> Callable[[], None]:
        return lambda: self._passes.run_prefill(rows, 0)

    def _try_run(
        self, run: Callable[[], None], predicted: float = 0.0, pick: PickTime | None = None
    ) -> float | None:
        """Seconds of a pass; ``None`` if it would miss the deadline or doesn't fit."""
        if self._clock() + predicted > self._deadline:
            return None
        try:
            return self._time_run(run, pick)
        except MemoryError:
            return None

    def _time_run(self, run: Callable[[], None], pick: PickTime | None = None) -> float:
        last = self._run_once(run)
        taken: list[float] = []
        # By the fastest run, since first passes allocate memory.
        while len(taken) < _REPEATS and len(taken) * min(taken, default=0.0) < _MAX_POINT_S:
            if self._clock() + last > self._deadline:
                break
            last = self._run_once(run)
            taken.append(last)
        return (pick or _typical_s)(taken or [last])

    def _run_once(self, run: Callable[[], None]) -> float:
        begin = self._clock()
        run()
        return max(1e-9, self._clock() - begin)


def _predict_next_s(table: dict[int, float], rows: int) -> float:
    """Upper bound of the time of the next larger point."""
    last = max(table)
    return table[last] * rows / last


def _typical_s(times: list[float]) -> float:
    """Median of the faster half: other programs only add time."""
    return median(sorted(times)[: (len(times) + 1) // 2])


def _smooth_table(table: dict[int, float]) -> tuple[tuple[int, float], ...]:
    """Sort points and remove noise.

    Times never fall with more rows, and at most about double with twice the rows.
    """
    points = sorted(table.items())
    least_s = points[-1][1]
    for index in range(len(points) - 1, -1, -1):
        rows, seconds = points[index]
        least_s = min(least_s, seconds)
        points[index] = rows, least_s
    for index in range(1, len(points)):
        (before, quick), (rows, seconds) = points[index - 1], points[index]
        points[index] = rows, min(seconds, _MAX_ATTENTION_GROWTH * quick * rows / before)
    return tuple(points)
