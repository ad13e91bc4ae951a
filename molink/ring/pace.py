"""How much longer a stage's steps take than its profile says, and what stages tell others of it.

A game, a hot laptop, or a profile that was measured beside something else: ``K`` and the chunks
follow what a stage takes now. One number for decode steps and one for prefill steps, since what
slows one down need not slow the other.
"""

import math
from collections import deque
from collections.abc import Iterable, Sequence
from statistics import median

from molink.facts.pace import MAX_PACE, Pace
from molink.facts.profile import Point, Profile
from molink.ring.round import Round
from molink.wire.messages.data import Volume
from molink.wire.messages.rounds import PaceReport

#: Steps are compared in lots of so many seconds (one step, if that takes longer) …
LOT = 0.5
#: … and the median of so many lots counts: what passes within two seconds changes nothing.
LOTS = 9
#: A pace is told if it departs by this part from the one that was told before.
NEWS = 0.2


class Measure:
    """The pace of one kind of steps."""

    def __init__(self) -> None:
        #: As it was last told; 1 as long as it is as the profile says.
        self.told = 1.0
        self._lots: deque[float] = deque(maxlen=LOTS)
        #: Of the present lot: when it began, seconds that its steps took, and should have taken.
        self._began = -math.inf
        self._seconds = self._expected = 0.0

    @property
    def known(self) -> bool:
        """Whether enough steps were measured."""
        return len(self._lots) == LOTS

    def add(self, seconds: float, expected: float, now: float) -> bool:
        """A step has taken ``seconds`` instead of ``expected`` ones; whether that makes news."""
        self._seconds += seconds
        self._expected += expected
        if now - self._began < LOT:
            return False
        self._lots.append(self._seconds / self._expected)
        self._began, self._seconds, self._expected = now, 0.0, 0.0
        pace = min(MAX_PACE, max(1 / MAX_PACE, median(self._lots)))
        if not self.known or 1 / (1 + NEWS) <= pace / self.told <= 1 + NEWS:
            return False
        self.told = pace
        return True


class PaceMeter:
    """A stage's own pace, by its ``profile``.

    Only steps count that are decode or prefill alone, of sizes that the profile has points for: of
    others it only says about how long they take.
    """

    def __init__(self, profile: Profile) -> None:
        self._profile = profile
        self._decode, self._prefill = Measure(), Measure()
        #: What measures the step that runs, and how long that should take.
        self._running: tuple[Measure, float] | None = None

    def begin(self, volumes: Iterable[Volume]) -> None:
        """A step with these volumes begins."""
        self._running = None
        volume, *others = volumes
        points = self._profile.prefill if volume.prefill else self._profile.decode
        rows = volume.count
        if others or not _within(points, rows):
            return
        if volume.prefill:
            rows = _padded(rows, self._profile.tile)
            self._running = self._prefill, self._profile.prefill_s(rows, volume.context)
        else:
            self._running = self._decode, self._profile.decode_s(rows, volume.context)

    def end(self, seconds: float, now: float) -> bool:
        """It has taken so long; whether the pace is another one now."""
        if self._running is None:
            return False
        measure, expected = self._running
        return measure.add(seconds, expected, now)

    @property
    def pace(self) -> Pace:
        """As it was told last."""
        return Pace(self._decode.told, self._prefill.told)

    @property
    def decode(self) -> float:
        """The pace of decode steps; 0 as long as too few were measured."""
        return self._decode.told if self._decode.known else 0.0


def _within(points: Sequence[Point], rows: int) -> bool:
    return bool(points) and points[0][0] <= rows <= points[-1][0]


def _padded(rows: int, tile: int) -> int:
    """What ``rows`` rows cost as much as: full tiles, beyond the first."""
    return rows if rows <= tile else -(-rows // tile) * tile


class PaceRound(Round):
    """The paces of a ring of ``stages`` stages, as stage ``stage`` knows them."""

    def __init__(self, stage: int, stages: int) -> None:
        super().__init__(stage, stages)
        #: One per stage in ring order.
        self.paces = (Pace(),) * stages

    def measured(self, pace: Pace) -> PaceReport:
        """This stage has another pace: what to tell the next one."""
        self._learn(self._stage, pace)
        return PaceReport(self._stage, pace.decode, pace.prefill)

    def arrived(self, report: PaceReport) -> bool:
        """The previous stage passes a report on; ``False`` if it makes no sense here."""
        paces = report.decode, report.prefill
        if not self._concerns(report.stage) or not all(map(math.isfinite, paces)):
            return False
        self._learn(report.stage, Pace(*paces))
        return True

    def _learn(self, stage: int, pace: Pace) -> None:
        self.paces = (*self.paces[:stage], pace, *self.paces[stage + 1 :])
