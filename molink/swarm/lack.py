"""When a model some of whose files nobody has is placed again: once somebody else is there.

To place it before that would only have one PC after the other look for what isn't there.
"""

from molink.facts.model import LayerRange, ModelFacts
from molink.swarm.controller.holdings import missing_layers
from molink.swarm.controller.registry import Registry

#: It is tried again after so many seconds, whoever is there: reports don't tell everything.
RETRY_INTERVAL = 60.0

_Snapshot = tuple[frozenset[str], frozenset[str], tuple[LayerRange, ...]]


class MissingFiles:
    """Of one deployment. All times in seconds."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._snapshot: _Snapshot | None = None
        self._until = 0.0

    def record_missing(self, facts: ModelFacts, now: float) -> None:
        """A PC says that it can't get the files of its stage, since nobody has some."""
        self._snapshot, self._until = self._take_snapshot(facts), now + RETRY_INTERVAL

    def still_missing(self, facts: ModelFacts, now: float) -> bool:
        """Whether those who are there, and what they have, are what they were then."""
        if self._snapshot is None:
            return False
        if now >= self._until or self._take_snapshot(facts) != self._snapshot:
            self._snapshot = None
        return self._snapshot is not None

    def _take_snapshot(self, facts: ModelFacts) -> _Snapshot:
        sessions = self._registry.sessions
        reports = [one.report for one in sessions.values()]
        whole = frozenset(self._registry.find_holders(facts.name))
        return frozenset(sessions), whole, missing_layers(facts, reports, only_model=False)
