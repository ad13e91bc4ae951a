"""What the stages of a ring tell each other of their links, without I/O."""

import math

from molink.facts.ringtimes import LinkFacts
from molink.ring.round import HASTE, Round
from molink.wire.messages.rounds import LinkReport

#: Seconds between two reports; of two of which the second says something else, ``HASTE``.
INTERVAL = 1.0
#: Relative changes that are worth a report, and one in haste.
_NOTICEABLE = 0.02
_LARGE = 0.1
#: Bytes/s; times by a rate below it would be no numbers any more, and nothing arrives in them.
_MIN_RATE = 1.0


class LinkRound(Round):
    """The links of a ring of ``stages``, as stage ``stage`` knows them.

    Each stage reports its own link to the next stage, which passes the report on; the one before
    the stage that it came from does not.
    """

    def __init__(self, stage: int, stages: int) -> None:
        super().__init__(stage, stages)
        #: One per stage in ring order, each leading to the next stage.
        self.links: tuple[LinkFacts, ...] = (LinkFacts(),) * stages
        self._told: LinkReport | None = None
        self._told_at = 0.0
        #: What was measured last, if nothing is to be told of it.
        self.settled: LinkFacts | None = None

    def measured(self, facts: LinkFacts, now: float) -> LinkReport | None:
        """This stage has measured its link: what to tell the next one, if anything now."""
        if len(self.links) == 1 or facts == self.settled:
            return None
        self.settled = None
        report = LinkReport(self._stage, facts.latency or 0.0, facts.rate or 0.0)
        if not _sensible(report):
            return None
        self._learn(report)
        if self._told is not None:
            change = max(
                _change(report.latency, self._told.latency), _change(report.rate, self._told.rate)
            )
            minimum = HASTE if change > _LARGE else INTERVAL
            if change <= _NOTICEABLE:
                self.settled = facts
                return None
            if now < self._told_at + minimum:
                return None
        elif facts == LinkFacts():
            return None
        self._told, self._told_at = report, now
        return report

    def arrived(self, report: LinkReport) -> bool:
        """The previous stage passes a report on; ``False`` if it makes no sense here."""
        if not self._concerns(report.stage) or not _sensible(report):
            return False
        self._learn(report)
        return True

    def _learn(self, report: LinkReport) -> None:
        facts = LinkFacts(report.latency or None, report.rate or None)
        before, after = self.links[: report.stage], self.links[report.stage + 1 :]
        self.links = (*before, facts, *after)


def _sensible(report: LinkReport) -> bool:
    known = report.rate == 0 or _MIN_RATE <= report.rate < math.inf
    return known and 0 <= report.latency < math.inf


def _change(one: float, other: float) -> float:
    if one == other:
        return 0.0
    return abs(one - other) / other if other else math.inf
