"""Measures ``T_d(x)`` and ``T_p(x)`` within a deadline, with a given clock.

The PC may be busy during a measurement, often with other stages that load. That only makes passes
slower, so the fastest run of each point counts. All points run in turn, so that each point's runs
are spread over the whole time. On a CPU the thread's CPU time counts, which excludes other programs
on the same core. The current slowdown is measured by each stage while it serves
(:class:`molink.ring.ring_measurements.SlowdownMeter`).
"""

from collections.abc import Callable
from typing import Protocol

from molink.facts.profile import Profile

#: Row counts to measure, if deadline and memory allow.
DECODE_ROWS = (1, 2, 4, 8, 16, 32, 64, 128)
PREFILL_ROWS = (8, 16, 32, 64, 128, 256, 512, 1024)
#: Context of decode rows, and a longer one to measure its cost.
SHORT_CONTEXT = 128
DEEP_CONTEXT = 2048
DEEP_ROWS = 64
#: Maximum runs of a point, and their maximum seconds, after a warm-up.
_MAX_RUNS = 5
_MAX_POINT_S = 0.2
#: Row counts at which tile sizes of matrix products are searched, and the sizes to try.
_TILE_BASES = (256, 128, 64)
_TILE_SIZES = (256, 128, 64, 32, 16, 8)
#: Minimum growth of time for one more row at a tile boundary, and maximum growth within a tile.
_MIN_TILE_STEP = 1.08
_MAX_PLATEAU_GROWTH = 1.04
#: Tolerance for attention, which grows quadratically.
_MAX_ATTENTION_GROWTH = 1.1
#: Passes that must fit the deadline before tiles are searched.
_TILE_PASSES = 8
#: Shares of the time for both tables, and for their first runs.
_TABLES_SHARE = 0.75
_GROWTH_SHARE = 0.4
#: Maximum factor by which measuring may take longer on a busy PC.
_MAX_DELAY = 2.0


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


def measure_profile(
    passes: TimedPasses,
    clock: Callable[[], float],
    seconds: float,
    timer: Callable[[], float] | None = None,
) -> Profile:
    """Measure a profile in about ``seconds`` seconds.

    ``timer`` (default: ``clock``) measures passes. ``T_d(1)`` and ``T_p`` of the smallest chunk are
    always measured, other points only if they fit the deadline. The cost of longer contexts and the
    tile follow. If ``timer`` is slower than ``clock``, measuring takes up to twice as long. Raises
    ``MemoryError`` if not even the smallest passes fit.
    """
    return _ProfileTimer(passes, clock, seconds, timer or clock).measure_profile()


class _ProfileTimer:
    """One call of :func:`measure_profile`."""

    def __init__(
        self,
        passes: TimedPasses,
        clock: Callable[[], float],
        seconds: float,
        timer: Callable[[], float],
    ) -> None:
        self._passes = passes
        self._clock, self._timer = clock, timer
        self._began_at, self._timer_began_at = clock(), timer()
        self._seconds = seconds
        self._deadline = _GROWTH_SHARE * seconds
        max_context = passes.max_context
        self._context = min(SHORT_CONTEXT, max_context - 1)
        self._deep = min(DEEP_CONTEXT, max_context - DEEP_ROWS)
        self._chunks = [rows for rows in PREFILL_ROWS if rows <= max_context] or [max_context]

    def measure_profile(self) -> Profile:
        decode, prefill = self._measure_tables()
        self._deadline = self._seconds
        return Profile(
            decode=_smooth_table(decode),
            prefill=_smooth_table(prefill),
            context=self._context,
            decode_token_s=self._decode_slope(decode[1]),
            prefill_token_s=self._prefill_slope(prefill),
            tile=self._find_tile(prefill),
        )

    @property
    def _elapsed_s(self) -> float:
        """Seconds used: the timer's, unless the clock is far ahead of it."""
        waited = (self._clock() - self._began_at) / _MAX_DELAY
        return max(waited, self._timer() - self._timer_began_at)

    def _measure_tables(self) -> tuple[dict[int, float], dict[int, float]]:
        """Measure both tables point by point; the point expected to be fastest is next."""
        decode = {1: self._time_run(self._time_decode(1), 1)}
        prefill = {self._chunks[0]: self._time_run(self._time_prefill(self._chunks[0]), 1)}
        open_ends = [
            (decode, list(DECODE_ROWS[1:]), self._time_decode),
            (prefill, self._chunks[1:], self._time_prefill),
        ]
        while any(rows for _, rows, _ in open_ends):
            table, rows, make = min(
                (end for end in open_ends if end[1]),
                key=lambda end: _predict_next_s(end[0], end[1][0]),
            )
            taken = self._try_run(make(rows[0]), _predict_next_s(table, rows[0]), 1)
            if taken is None:
                rows.clear()  # larger ones take longer
            else:
                table[rows.pop(0)] = taken
        self._deadline = _TABLES_SHARE * self._seconds
        for runs in range(1, _MAX_RUNS):
            for table, _, make in open_ends:
                self._repeat_points(table, make, runs)
        return decode, prefill

    def _repeat_points(
        self, table: dict[int, float], make: Callable[[int], Callable[[], None]], runs: int
    ) -> None:
        """Repeat each point of a table whose ``runs`` runs took little time."""
        for rows, fastest in table.items():
            is_due = runs == 1 or runs * fastest < _MAX_POINT_S
            if is_due and self._elapsed_s + fastest <= self._deadline:
                table[rows] = min(fastest, self._run_once(make(rows)))

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
        """Find the tile size of matrix products around the largest affordable chunk."""
        left = self._deadline - self._elapsed_s
        for base in _TILE_BASES:
            fits = 2 * base <= self._passes.max_context
            if base in prefill and fits and _TILE_PASSES * prefill[base] <= left:
                return self._is_tile_at(base)
        return 1

    def _is_tile_at(self, base: int) -> int:
        """Compare ``T_p(n · tile)`` with ``T_p(n · tile + 1)`` and ``T_p((n + 1) · tile)``."""
        below, above = (self._try_run(self._time_prefill(rows)) for rows in (base, base + 1))
        if below is None or above is None or above < _MIN_TILE_STEP * below:
            return 1
        for tile in _TILE_SIZES:
            if tile <= base:
                end = self._try_run(self._time_prefill(base + tile))
                if end is not None and end <= _MAX_PLATEAU_GROWTH * above:
                    return tile
        return 1

    def _time_decode(self, rows: int) -> Callable[[], None]:
        return lambda: self._passes.run_decode(rows, self._context)

    def _time_prefill(self, rows: int) -> Callable[[], None]:
        return lambda: self._passes.run_prefill(rows, 0)

    def _try_run(
        self, run: Callable[[], None], predicted: float = 0.0, runs: int = _MAX_RUNS
    ) -> float | None:
        """Measure the seconds of a pass; ``None`` if it would miss the deadline or doesn't fit."""
        if self._elapsed_s + predicted > self._deadline:
            return None
        try:
            return self._time_run(run, runs)
        except MemoryError:
            return None

    def _time_run(self, run: Callable[[], None], runs: int = _MAX_RUNS) -> float:
        """Return the seconds of the fastest of ``runs`` runs, after one that allocates memory."""
        taken = [self._run_once(run)]
        while len(taken) <= runs and len(taken) * min(taken) < _MAX_POINT_S:
            if self._elapsed_s + taken[-1] > self._deadline:
                break
            taken.append(self._run_once(run))
        return min(taken)

    def _run_once(self, run: Callable[[], None]) -> float:
        begin = self._timer()
        run()
        return max(1e-9, self._timer() - begin)


def _predict_next_s(table: dict[int, float], rows: int) -> float:
    """Estimate an upper bound for the time of the next larger point."""
    last = max(table)
    return table[last] * rows / last


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
