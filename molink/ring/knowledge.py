"""What a stage knows of its whole ring: all links, and how long all stages' steps take now."""

from collections.abc import Sequence

from molink.facts.pace import Pace
from molink.facts.profile import Profile
from molink.facts.ringtimes import LinkFacts, RingTimes
from molink.ring.hosted import HostRoom, HostRound
from molink.ring.linkround import LinkRound
from molink.ring.pace import PaceRound
from molink.ring.stage import StageShape
from molink.wire.messages.rounds import HostReport, LinkReport, PaceReport


class RingKnowledge:
    """Each stage tells the others of its link, pace and host memory, once round the ring."""

    def __init__(self, shape: StageShape, profiles: Sequence[Profile]) -> None:
        """``profiles`` are those of all stages as they were loaded; none where nothing is known."""
        self._row_bytes = shape.row_bytes
        self._profiles = tuple(profiles)
        self._links = LinkRound(shape.index, shape.stages)
        self._paces = PaceRound(shape.index, shape.stages)
        self._hosts = HostRound(shape.index, shape.stages)

    def is_settled(self, facts: LinkFacts) -> bool:
        """Whether nothing is to be told of a link that is as ``facts`` say."""
        return facts == self._links.settled

    def link_measured(self, facts: LinkFacts, now: float) -> LinkReport | None:
        """This stage has measured its link: what to tell the next one, if anything now."""
        return self._links.measured(facts, now)

    def pace_measured(self, pace: Pace) -> PaceReport:
        """This stage has another pace: what to tell the next one."""
        return self._paces.measured(pace)

    def host_measured(self, room: HostRoom) -> HostReport:
        """This stage has so much host memory: what to tell the next one."""
        return self._hosts.measured(room)

    def arrived(self, report: LinkReport | PaceReport | HostReport) -> bool:
        """The previous stage passes a report on; ``False`` if it makes no sense here."""
        match report:
            case LinkReport():
                return self._links.arrived(report)
            case PaceReport():
                return self._paces.arrived(report)
            case HostReport():
                return self._hosts.arrived(report)

    def goes_on(self, report: LinkReport | PaceReport | HostReport, now: float) -> bool:
        """Whether the next stage has not seen it yet, and it is not one of a flood."""
        rounds = {LinkReport: self._links, PaceReport: self._paces, HostReport: self._hosts}
        return rounds[type(report)].goes_on(report.stage, now)

    @property
    def host_room(self) -> HostRoom:
        """Host memory that all stages have."""
        return self._hosts.room

    @property
    def times(self) -> RingTimes:
        """Times of the ring, as far as they are known."""
        known = zip(self._profiles, self._paces.paces, strict=False)
        profiles = tuple(pace.of(profile) for profile, pace in known)
        return RingTimes(profiles, self._links.links, self._row_bytes)
