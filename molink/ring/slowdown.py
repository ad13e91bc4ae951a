"""How much longer a stage's steps take than its profile says, and what stages tell others of it.

A game, a hot laptop, or a profile that was measured beside something else: ``K`` and the chunks
follow what a stage takes now. One number for decode steps and one for prefill steps, since what
slows one down need not slow the other.
"""

import math
from collections import deque
from collections.abc import Iterable, Sequence
from statistics import median

from molink.facts.profile import Point, Profile
from molink.facts.slowdown import MAX_SLOWDOWN, Slowdown
from molink.ring.report_forwarder import ReportForwarder
from molink.wire.messages.data_plane import Volume
from molink.wire.messages.ring_reports import SlowdownReport

#: Steps are compared in lots of so many seconds (one step, if that takes longer) …
LOT_SECONDS = 0.5
#: … and the median of so many lots counts: what passes within two seconds changes nothing.
NUM_LOTS = 9
#: A pace is told if it departs by this part from the one that was told before.
REPORT_THRESHOLD = 0.2


class StepSlowdown:
    """The pace of one kind of steps."""

    def __init__(self) -> None:
        #: As it was last told; 1 as long as it is as the profile says.
        self.reported = 1.0
        self._lots: deque[float] = deque(maxlen=NUM_LOTS)
        #: Of the present lot: when it began, seconds that its steps took, and should have taken.
        self._began = -math.inf
        self._seconds = self._expected = 0.0

    @property
    def is_known(self) -> bool:
        """Whether enough steps were measured."""
        return len(self._lots) == NUM_LOTS

    def add_step(self, seconds: float, expected: float, now: float) -> bool:
        """A step has taken ``seconds`` instead of ``expected`` ones; whether that makes news."""
        self._seconds += seconds
        self._expected += expected
        if now - self._began < LOT_SECONDS:
            return False
        self._lots.append(self._seconds / self._expected)
        self._began, self._seconds, self._expected = now, 0.0, 0.0
        slowdown = min(MAX_SLOWDOWN, max(1 / MAX_SLOWDOWN, median(self._lots)))
        if (
            not self.is_known
            or 1 / (1 + REPORT_THRESHOLD) <= slowdown / self.reported <= 1 + REPORT_THRESHOLD
        ):
            return False
        self.reported = slowdown
        return True


class SlowdownMeter:
    """A stage's own pace, by its ``profile``.

    Only steps count that are decode or prefill alone, of sizes that the profile has points for: of
    others it only says about how long they take.
    """

    def __init__(self, profile: Profile) -> None:
        self._profile = profile
        self._decode, self._prefill = StepSlowdown(), StepSlowdown()
        #: What measures the step that runs, and how long that should take.
        self._running: tuple[StepSlowdown, float] | None = None

    def begin_step(self, volumes: Iterable[Volume]) -> None:
        """A step with these volumes begins."""
        self._running = None
        volume, *others = volumes
        points = self._profile.prefill if volume.prefill else self._profile.decode
        rows = volume.count
        if others or not _covers(points, rows):
            return
        if volume.prefill:
            rows = _round_to_tile(rows, self._profile.tile)
            self._running = self._prefill, self._profile.prefill_s(rows, volume.context)
        else:
            self._running = self._decode, self._profile.decode_s(rows, volume.context)

    def end_step(self, seconds: float, now: float) -> bool:
        """It has taken so long; whether the pace is another one now."""
        if self._running is None:
            return False
        measure, expected = self._running
        return measure.add_step(seconds, expected, now)

    @property
    def slowdown(self) -> Slowdown:
        """As it was told last."""
        return Slowdown(self._decode.reported, self._prefill.reported)

    @property
    def decode_slowdown(self) -> float:
        """The pace of decode steps; 0 as long as too few were measured."""
        return self._decode.reported if self._decode.is_known else 0.0


def _covers(points: Sequence[Point], rows: int) -> bool:
    return bool(points) and points[0][0] <= rows <= points[-1][0]


def _round_to_tile(rows: int, tile: int) -> int:
    """What ``rows`` rows cost as much as: full tiles, beyond the first."""
    return rows if rows <= tile else -(-rows // tile) * tile


class SlowdownReports(ReportForwarder):
    """The paces of a ring of ``stages`` stages, as stage ``stage`` knows them."""

    def __init__(self, stage: int, stages: int) -> None:
        super().__init__(stage, stages)
        #: One per stage in ring order.
        self.slowdowns = (Slowdown(),) * stages

    def make_report(self, slowdown: Slowdown) -> SlowdownReport:
        """This stage has another pace: what to tell the next one."""
        self._apply_slowdown(self._stage, slowdown)
        return SlowdownReport(self._stage, slowdown.decode, slowdown.prefill)

    def accept_report(self, report: SlowdownReport) -> bool:
        """The previous stage passes a report on; ``False`` if it makes no sense here."""
        slowdowns = report.decode, report.prefill
        if not self._is_other_stage(report.stage) or not all(map(math.isfinite, slowdowns)):
            return False
        self._apply_slowdown(report.stage, Slowdown(*slowdowns))
        return True

    def _apply_slowdown(self, stage: int, slowdown: Slowdown) -> None:
        self.slowdowns = (*self.slowdowns[:stage], slowdown, *self.slowdowns[stage + 1 :])
