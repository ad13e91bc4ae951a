"""What a stage knows of its whole ring: all links, and how long all stages' steps take now."""

from collections.abc import Sequence

from molink.facts.profile import Profile
from molink.facts.ring_times import LinkFacts, RingTimes
from molink.facts.slowdown import Slowdown
from molink.ring.host_memory import HostMemory, HostMemoryReports
from molink.ring.link_reports import LinkReports
from molink.ring.slowdown import SlowdownReports
from molink.ring.stage import StageShape
from molink.wire.messages.ring_reports import HostMemoryReport, LinkReport, SlowdownReport


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
