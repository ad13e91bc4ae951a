"""What the stages of a ring tell each other of their links, without I/O."""

import math

from molink.facts.ring_times import LinkFacts
from molink.ring.report_forwarder import MIN_INTERVAL, ReportForwarder
from molink.wire.messages.ring_reports import LinkReport

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
