"""What a stage knows of its whole ring: all links, and how long all stages' steps take now."""

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from molink.facts.profile import MAX_SLOWDOWN, Point, Profile, Slowdown
from molink.facts.ring_times import LinkFacts, RingTimes
from molink.ring.stage import StageShape
from molink.wire.messages.data_plane import HostMemoryReport, LinkReport, SlowdownReport, Volume

#: Seconds between two reports that are passed on of one stage, on average.
MIN_INTERVAL = 0.2
#: Reports of one stage that may come at once, when a link that was cut delivers again.
MAX_BURST = 32


class ReportForwarder:
    """Which reports of other stages are passed on here."""

    def __init__(self, stage: int, stages: int) -> None:
        self._stage = stage
        self._stages = stages
        self._next = (stage + 1) % stages
        #: By stage: when reports passed on so far would have been due, one each :data:`HASTE`.
        self._due_at = [-math.inf] * stages

    def should_forward(self, stage: int, now: float) -> bool:
        """Whether the next stage has not seen this report of ``stage``, and it is not one of a
        flood."""
        earliest = now - MAX_BURST * MIN_INTERVAL
        due_at = max(self._due_at[stage], earliest) + MIN_INTERVAL
        if stage == self._next or due_at > now:
            return False
        self._due_at[stage] = due_at
        return True

    def _is_other_stage(self, stage: int) -> bool:
        """Whether there is such a stage, other than this one."""
        return stage < self._stages and stage != self._stage


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Host memory of a stage: KV blocks that it has room for, and seconds to copy one."""

    blocks: int = 0
    block_s: float = 0.0


NO_HOST_MEMORY = HostMemory()


class HostMemoryReports(ReportForwarder):
    """The host memory of all stages, as stage ``stage`` knows it; each tells the others once."""

    def __init__(self, stage: int, stages: int) -> None:
        super().__init__(stage, stages)
        self._stages_memory: dict[int, HostMemory] = {}

    def make_report(self, memory: HostMemory) -> HostMemoryReport:
        """This stage has so much: what to tell the next one."""
        self._stages_memory[self._stage] = memory
        return HostMemoryReport(self._stage, memory.blocks, memory.block_s)

    def accept_report(self, report: HostMemoryReport) -> bool:
        """The previous stage passes a report on; ``False`` if it makes no sense here."""
        if not self._is_other_stage(report.stage) or not 0 <= report.block_s < float("inf"):
            return False
        self._stages_memory.setdefault(report.stage, HostMemory(report.blocks, report.block_s))
        return True

    @property
    def common_memory(self) -> HostMemory:
        """What all stages have; nothing as long as one has said nothing."""
        rooms = self._stages_memory.values()
        if len(rooms) < self._stages:
            return NO_HOST_MEMORY
        return HostMemory(
            min(memory.blocks for memory in rooms), max(memory.block_s for memory in rooms)
        )


#: Seconds between two reports; of two of which the second says something else, ``HASTE``.
REPORT_INTERVAL = 1.0
#: Relative changes that are worth a report, and one in haste.
_NOTICEABLE = 0.02
_URGENT = 0.1
#: Bytes/s; times by a rate below it would be no numbers any more, and nothing arrives in them.
_MIN_RATE = 1.0


class LinkReports(ReportForwarder):
    """The links of a ring of ``stages``, as stage ``stage`` knows them.

    Each stage reports its own link to the next stage, which passes the report on; the one before
    the stage that it came from does not.
    """

    def __init__(self, stage: int, stages: int) -> None:
        super().__init__(stage, stages)
        #: One per stage in ring order, each leading to the next stage.
        self.links: tuple[LinkFacts, ...] = (LinkFacts(),) * stages
        self._reported: LinkReport | None = None
        self._reported_at = 0.0
        #: What was measured last, if nothing is to be told of it.
        self.settled: LinkFacts | None = None

    def make_report(self, facts: LinkFacts, now: float) -> LinkReport | None:
        """This stage has measured its link: what to tell the next one, if anything now."""
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
        """The previous stage passes a report on; ``False`` if it makes no sense here."""
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


class RingMeasurements:
    """Each stage tells the others of its link, pace and host memory, once round the ring."""

    def __init__(self, shape: StageShape, profiles: Sequence[Profile]) -> None:
        """``profiles`` are those of all stages as they were loaded; none where nothing is known."""
        self._row_bytes = shape.row_bytes
        self._profiles = tuple(profiles)
        self._links = LinkReports(shape.index, shape.stages)
        self._slowdowns = SlowdownReports(shape.index, shape.stages)
        self._hosts = HostMemoryReports(shape.index, shape.stages)

    def is_settled(self, facts: LinkFacts) -> bool:
        """Whether nothing is to be told of a link that is as ``facts`` say."""
        return facts == self._links.settled

    def on_link_measured(self, facts: LinkFacts, now: float) -> LinkReport | None:
        """This stage has measured its link: what to tell the next one, if anything now."""
        return self._links.make_report(facts, now)

    def on_slowdown_measured(self, slowdown: Slowdown) -> SlowdownReport:
        """This stage has another pace: what to tell the next one."""
        return self._slowdowns.make_report(slowdown)

    def on_host_measured(self, memory: HostMemory) -> HostMemoryReport:
        """This stage has so much host memory: what to tell the next one."""
        return self._hosts.make_report(memory)

    def accept_report(self, report: LinkReport | SlowdownReport | HostMemoryReport) -> bool:
        """The previous stage passes a report on; ``False`` if it makes no sense here."""
        match report:
            case LinkReport():
                return self._links.accept_report(report)
            case SlowdownReport():
                return self._slowdowns.accept_report(report)
            case HostMemoryReport():
                return self._hosts.accept_report(report)

    def should_forward(
        self, report: LinkReport | SlowdownReport | HostMemoryReport, now: float
    ) -> bool:
        """Whether the next stage has not seen it yet, and it is not one of a flood."""
        rounds = {
            LinkReport: self._links,
            SlowdownReport: self._slowdowns,
            HostMemoryReport: self._hosts,
        }
        return rounds[type(report)].should_forward(report.stage, now)

    @property
    def host_memory(self) -> HostMemory:
        """Host memory that all stages have."""
        return self._hosts.common_memory

    @property
    def times(self) -> RingTimes:
        """Times of the ring, as far as they are known."""
        known = zip(self._profiles, self._slowdowns.slowdowns, strict=False)
        profiles = tuple(slowdown.apply_to(profile) for profile, slowdown in known)
        return RingTimes(profiles, self._links.links, self._row_bytes)
