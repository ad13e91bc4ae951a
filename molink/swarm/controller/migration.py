"""A migration: a new placement that waits for its files while the old one serves.

Peers whose new layers are not all among their current ones are asked to prefetch; the new epoch
begins when all have the files. Progress is read from reports, so a lost message is simply sent
again.
"""

from molink.facts.model import LayerRange, ModelFacts
from molink.swarm.artifacts.transfer import TransferDeadline, fetched_bytes
from molink.swarm.controller.records import PipelineRecord, StageRecord
from molink.wire.messages.peer_reports import PrefetchState

#: Seconds after which a prefetch that reports do not mention is sent again.
RESEND_TIMEOUT = 3.0
#: Seconds after a failed prefetch before the serving pipeline is considered again.
RETRY_DELAY = 60.0


class Migration:
    """A migration from the stages of ``old`` to ``stages``; ``number`` identifies it."""

    def __init__(
        self,
        number: int,
        old: PipelineRecord,
        stages: tuple[StageRecord, ...],
        now: float,
        facts: ModelFacts,
    ) -> None:
        self.number = number
        self.stages = stages
        held = {stage.peer: stage.layers for stage in old.stages}
        self._requested_at: dict[str, float] = {
            stage.peer: now
            for stage in stages
            if stage.peer not in held or not _within(stage.layers, held[stage.peer])
        }
        self._transfers = {
            peer: TransferDeadline(fetched_bytes(facts, self.layers_of(peer)), now)
            for peer in self._requested_at
        }

    @property
    def peers(self) -> frozenset[str]:
        """All peers that get a stage."""
        return frozenset(stage.peer for stage in self.stages)

    @property
    def pending_peers(self) -> tuple[str, ...]:
        """Peers that do not have their files yet."""
        return tuple(self._requested_at)

    def layers_of(self, peer: str) -> LayerRange:
        """Return the layers that ``peer`` gets."""
        return next(stage.layers for stage in self.stages if stage.peer == peer)

    def observe_prefetch(self, peer: str, state: PrefetchState | None, now: float) -> str | None:
        """Process a report's prefetch state; return why the transfer failed, if it did."""
        if peer not in self._requested_at or state is None or state.number != self.number:
            return None
        if state.state == "failed":
            return state.reason or "no reason given"
        if state.state == "done":
            del self._requested_at[peer]
        else:
            self._transfers[peer].observe_bytes(state.done, now)
        return None

    def find_overdue(self, now: float) -> str | None:
        """Return the first peer whose files arrive too slowly."""
        late = (peer for peer in self._requested_at if now >= self._transfers[peer].deadline)
        return next(late, None)

    def needs_resend(self, peer: str, state: PrefetchState | None, now: float) -> bool:
        """Whether the prefetch must be sent to ``peer`` again."""
        if peer not in self._requested_at or (state is not None and state.number == self.number):
            return False
        if now - self._requested_at[peer] < RESEND_TIMEOUT:
            return False
        self._requested_at[peer] = now
        return True


def _within(inner: LayerRange, outer: LayerRange) -> bool:
    return outer[0] <= inner[0] and inner[1] <= outer[1]
