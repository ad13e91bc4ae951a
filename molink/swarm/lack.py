"""When a model some of whose files nobody has is placed again: once somebody else is there.

To place it before that would only have one PC after the other look for what isn't there.
"""

from molink.facts.model import LayerRange, ModelFacts
from molink.swarm.controller.holdings import missing
from molink.swarm.controller.registry import Registry

#: It is tried again after so many seconds, whoever is there: reports don't tell everything.
AGAIN = 60.0

_Situation = tuple[frozenset[str], frozenset[str], tuple[LayerRange, ...]]


class Lack:
    """Of one deployment. All times in seconds."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._then: _Situation | None = None
        self._until = 0.0

    def found(self, facts: ModelFacts, now: float) -> None:
        """A PC says that it can't get the files of its stage, since nobody has some."""
        self._then, self._until = self._situation(facts), now + AGAIN

    def lasts(self, facts: ModelFacts, now: float) -> bool:
        """Whether those who are there, and what they have, are what they were then."""
        if self._then is None:
            return False
        if now >= self._until or self._situation(facts) != self._then:
            self._then = None
        return self._then is not None

    def _situation(self, facts: ModelFacts) -> _Situation:
        sessions = self._registry.sessions
        reports = [one.report for one in sessions.values()]
        whole = frozenset(self._registry.holders(facts.name))
        return frozenset(sessions), whole, missing(facts, reports, only_model=False)
