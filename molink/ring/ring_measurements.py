"""Figures that each stage measures and reports once round the ring: link, slowdown, host memory."""

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from molink.facts.profile import MAX_SLOWDOWN, Point, Profile, Slowdown
from molink.facts.ring_times import LinkFacts, RingTimes
from molink.ring.stage import StageShape
from molink.wire.messages.data_plane import HostMemoryReport, LinkReport, SlowdownReport, Volume

#: Minimum average seconds between two forwarded reports of one stage.
MIN_INTERVAL = 0.2
#: Reports of one stage that may arrive together, for example after a network outage.
MAX_BURST = 32


class ReportForwarder:
    """Decides which reports of other stages to forward."""

    def __init__(self, stage: int, stages: int) -> None:
        self._stage = stage
        self._stages = stages
        self._next = (stage + 1) % stages
        #: By stage, the time up to which its quota of one report per :data:`MIN_INTERVAL` is used.
        self._due_at = [-math.inf] * stages

    def should_forward(self, stage: int, now: float) -> bool:
        """Whether the next stage needs this report of ``stage`` and its rate limit allows it."""
        earliest = now - MAX_BURST * MIN_INTERVAL
        due_at = max(self._due_at[stage], earliest) + MIN_INTERVAL
        if stage == self._next or due_at > now:
            return False
        self._due_at[stage] = due_at
        return True

    def _is_other_stage(self, stage: int) -> bool:
        return stage < self._stages and stage != self._stage


@dataclass(frozen=True, slots=True)
class HostMemory:
    """A stage's host memory: KV blocks that fit, and seconds to copy one block one way."""

    blocks: int = 0
    block_s: float = 0.0


NO_HOST_MEMORY = HostMemory()


class HostMemoryReports(ReportForwarder):
    """The host memory of all stages as stage ``stage`` knows it. Each stage reports once."""

    def __init__(self, stage: int, stages: int) -> None:
        super().__init__(stage, stages)
        self._stages_memory: dict[int, HostMemory] = {}

    def make_report(self, memory: HostMemory) -> HostMemoryReport:
        """Record this stage's host memory and return the report for the next stage."""
        self._stages_memory[self._stage] = memory
        return HostMemoryReport(self._stage, memory.blocks, memory.block_s)

    def accept_report(self, report: HostMemoryReport) -> bool:
        """Record a report of another stage; ``False`` if it is invalid."""
        if not self._is_other_stage(report.stage) or not 0 <= report.block_s < float("inf"):
            return False
        self._stages_memory.setdefault(report.stage, HostMemory(report.blocks, report.block_s))
        return True

    @property
    def common_memory(self) -> HostMemory:
        """The host memory that every stage has; nothing until all stages have reported."""
        rooms = self._stages_memory.values()
        if len(rooms) < self._stages:
            return NO_HOST_MEMORY
        return HostMemory(
            min(memory.blocks for memory in rooms), max(memory.block_s for memory in rooms)
        )


#: Seconds between two reports of a link; an urgent change waits only :data:`MIN_INTERVAL`.
REPORT_INTERVAL = 1.0
#: Relative changes that are worth a report, and an urgent report.
_NOTICEABLE = 0.02
_URGENT = 0.1
#: Minimum valid rate in bytes/s; below it, transfer times are meaningless.
_MIN_RATE = 1.0


class LinkReports(ReportForwarder):
    """The links of a ring of ``stages`` stages as stage ``stage`` knows them.

    Each stage reports its outgoing link. The report is forwarded round the ring up to the stage
    before its origin.
    """

    def __init__(self, stage: int, stages: int) -> None:
        super().__init__(stage, stages)
        #: One per stage in ring order, each leading to the next stage.
        self.links: tuple[LinkFacts, ...] = (LinkFacts(),) * stages
        self._reported: LinkReport | None = None
        self._reported_at = 0.0
        #: The last measurement that was not worth a report.
        self.settled: LinkFacts | None = None

    def make_report(self, facts: LinkFacts, now: float) -> LinkReport | None:
        """Record this stage's link; return a report for the next stage if one is due."""
        if len(self.links) == 1 or facts == self.settled:
            return None
        self.settled = None
        report = LinkReport(self._stage, facts.latency or 0.0, facts.rate or 0.0)
        if not _is_valid(report):
            return None
        self._apply_report(report)
        if self._reported is not None:
            change = max(
                _relative_change(report.latency, self._reported.latency),
                _relative_change(report.rate, self._reported.rate),
            )
            minimum = MIN_INTERVAL if change > _URGENT else REPORT_INTERVAL
            if change <= _NOTICEABLE:
                self.settled = facts
                return None
            if now < self._reported_at + minimum:
                return None
        elif facts == LinkFacts():
            return None
        self._reported, self._reported_at = report, now
        return report

    def accept_report(self, report: LinkReport) -> bool:
        """Record a report of another stage; ``False`` if it is invalid."""
        if not self._is_other_stage(report.stage) or not _is_valid(report):
            return False
        self._apply_report(report)
        return True

    def _apply_report(self, report: LinkReport) -> None:
        facts = LinkFacts(report.latency or None, report.rate or None)
        before, after = self.links[: report.stage], self.links[report.stage + 1 :]
        self.links = (*before, facts, *after)


def _is_valid(report: LinkReport) -> bool:
    known = report.rate == 0 or _MIN_RATE <= report.rate < math.inf
    return known and 0 <= report.latency < math.inf


def _relative_change(one: float, other: float) -> float:
    if one == other:
        return 0.0
    return abs(one - other) / other if other else math.inf


#: Steps are compared in groups of this many seconds, or of one longer step.
LOT_SECONDS = 0.5
#: Number of groups whose median counts, so that spikes of up to two seconds are ignored.
NUM_LOTS = 9
#: Seconds after which a slowdown that was not measured again may have ended.
SLOWDOWN_VALIDITY = NUM_LOTS * LOT_SECONDS
#: Relative change that is worth a report.
REPORT_THRESHOLD = 0.2


class StepSlowdown:
    """The slowdown of one kind of step."""

    def __init__(self) -> None:
        #: The last reported slowdown; 1 means as profiled.
        self.reported = 1.0
        self._lots: deque[float] = deque(maxlen=NUM_LOTS)
        #: Current group: its start, and the actual and the expected seconds of its steps.
        self._began = -math.inf
        self._seconds = self._expected = 0.0

    @property
    def is_known(self) -> bool:
        """Whether enough steps were measured."""
        return len(self._lots) == NUM_LOTS

    def valid_slowdown(self, now: float) -> float:
        """The reported slowdown; 0 if unknown, or if above 1 and not measured lately.

        A slowdown below 1 stays valid: the profile was measured on a busy PC and is permanently
        wrong.
        """
        is_valid = self.reported < 1 or now - self._began <= SLOWDOWN_VALIDITY
        return self.reported if self.is_known and is_valid else 0.0

    def add_step(self, seconds: float, expected: float, now: float) -> bool:
        """Record a step, in seconds; return whether the slowdown changed noticeably."""
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
    """Measures how much slower a stage's steps are than its profile.

    ``K`` and chunk sizes adapt to it.

    Causes are a game, a hot laptop, or a profile that was measured under load. Decode and prefill
    are measured separately. Only steps of a single kind, of sizes that the profile covers, count;
    other predictions are rough.
    """

    def __init__(self, profile: Profile) -> None:
        self._profile = profile
        self._decode, self._prefill = StepSlowdown(), StepSlowdown()

    def add_step(self, volumes: Iterable[Volume], seconds: float, now: float) -> bool:
        """Record a step with these volumes; returns whether the slowdown changed noticeably."""
        volume, *others = volumes
        points = self._profile.prefill if volume.prefill else self._profile.decode
        rows = volume.count
        if others or not _covers(points, rows):
            return False
        if volume.prefill:
            rows = _round_to_tile(rows, self._profile.tile)
            expected = self._profile.prefill_s(rows, volume.context)
            return self._prefill.add_step(seconds, expected, now)
        expected = self._profile.decode_s(rows, volume.context)
        return self._decode.add_step(seconds, expected, now)

    @property
    def slowdown(self) -> Slowdown:
        """The last reported slowdown."""
        return Slowdown(self._decode.reported, self._prefill.reported)

    def decode_slowdown(self, now: float) -> float:
        """The slowdown of decode steps; 0 if unknown (see :meth:`StepSlowdown.valid_slowdown`)."""
        return self._decode.valid_slowdown(now)


def _covers(points: Sequence[Point], rows: int) -> bool:
    return bool(points) and points[0][0] <= rows <= points[-1][0]


def _round_to_tile(rows: int, tile: int) -> int:
    """Round up to full tiles, beyond the first one."""
    return rows if rows <= tile else -(-rows // tile) * tile


class SlowdownReports(ReportForwarder):
    """The slowdowns of a ring of ``stages`` stages as stage ``stage`` knows them."""

    def __init__(self, stage: int, stages: int) -> None:
        super().__init__(stage, stages)
        #: One per stage in ring order.
        self.slowdowns = (Slowdown(),) * stages

    def make_report(self, slowdown: Slowdown) -> SlowdownReport:
        """Record this stage's slowdown and return the report for the next stage."""
        self._apply_slowdown(self._stage, slowdown)
        return SlowdownReport(self._stage, slowdown.decode, slowdown.prefill)

    def accept_report(self, report: SlowdownReport) -> bool:
        """Record a report of another stage; ``False`` if it is invalid."""
        slowdowns = report.decode, report.prefill
        if not self._is_other_stage(report.stage) or not all(map(math.isfinite, slowdowns)):
            return False
        self._apply_slowdown(report.stage, Slowdown(*slowdowns))
        return True

    def _apply_slowdown(self, stage: int, slowdown: Slowdown) -> None:
        self.slowdowns = (*self.slowdowns[:stage], slowdown, *self.slowdowns[stage + 1 :])


class RingMeasurements:
    """All reports of a ring as one stage knows them."""

    def __init__(self, shape: StageShape, profiles: Sequence[Profile]) -> None:
        """``profiles`` has the profiles of all stages, measured at load time; empty if unknown."""
        self._row_bytes = shape.row_bytes
        self._profiles = tuple(profiles)
        self.links = LinkReports(shape.index, shape.stages)
        self.slowdowns = SlowdownReports(shape.index, shape.stages)
        self.host_memories = HostMemoryReports(shape.index, shape.stages)

    def accept_report(self, report: LinkReport | SlowdownReport | HostMemoryReport) -> bool:
        """Record a report of another stage; ``False`` if it is invalid."""
        match report:
            case LinkReport():
                return self.links.accept_report(report)
            case SlowdownReport():
                return self.slowdowns.accept_report(report)
            case HostMemoryReport():
                return self.host_memories.accept_report(report)

    def should_forward(
        self, report: LinkReport | SlowdownReport | HostMemoryReport, now: float
    ) -> bool:
        """As :meth:`ReportForwarder.should_forward`."""
        rounds = {
            LinkReport: self.links,
            SlowdownReport: self.slowdowns,
            HostMemoryReport: self.host_memories,
        }
        return rounds[type(report)].should_forward(report.stage, now)

    @property
    def host_memory(self) -> HostMemory:
        """The host memory that every stage has."""
        return self.host_memories.common_memory

    @property
    def times(self) -> RingTimes:
        """The ring's known times."""
        known = zip(self._profiles, self.slowdowns.slowdowns, strict=False)
        profiles = tuple(slowdown.apply_to(profile) for profile, slowdown in known)
        return RingTimes(profiles, self.links.links, self._row_bytes)
