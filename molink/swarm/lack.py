"""Delays placing a model whose files are missing until the available files change."""

from molink.facts.model import LayerRange, ModelFacts
from molink.swarm.controller.holdings import missing_layers
from molink.swarm.controller.registry import Registry

#: Retry after this many seconds even without a change: reports are not complete.
RETRY_INTERVAL = 60.0

_Snapshot = tuple[frozenset[str], frozenset[str], tuple[LayerRange, ...]]


class MissingFiles:
    """State of one deployment. All times in seconds."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._snapshot: _Snapshot | None = None
        self._until = 0.0

    def record_missing(self, facts: ModelFacts, now: float) -> None:
        """A PC has reported that files of its stage are on no peer."""
        self._snapshot, self._until = self._take_snapshot(facts), now + RETRY_INTERVAL

    def still_missing(self, facts: ModelFacts, now: float) -> bool:
        """Whether the same peers still hold the same files."""
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
