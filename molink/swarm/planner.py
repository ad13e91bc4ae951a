"""Decides when a model is placed anew, and over which peers.

The candidates are looked at after every event. A placement is made once they differ from those
that the last one saw and have then stayed the same for a moment; so joins close together form once,
and whatever changes the candidates (a join, a loss, the end of a back-off) is the same case.
"""

from molink.swarm.backoff import Backoff
from molink.swarm.formation import Formation
from molink.swarm.placement import Candidate, Placement, Unplaceable, parse_range, place
from molink.swarm.records import Desired
from molink.swarm.registry import Registry

#: Peers that join or change within this time, in seconds, are placed together …
DEBOUNCE = 1.0
#: … but the first of them doesn't wait longer than this.
MAX_DEBOUNCE = 5.0
#: A broken pipeline is placed anew after this pause: losses rarely come alone.
LOSS_DEBOUNCE = 0.3
#: While no pipeline stands, a peer that has been silent for this long is not placed.
STALE = 2.5
#: A restarted coordinator waits this long, in seconds, for ``min_peers`` to come back.
RESTORE_TIMEOUT = 30.0
#: A change of a peer's memory below this part of it is no reason to place anew.
MEMORY_CHANGE = 0.1

Candidates = tuple[Candidate, ...]


class Planner:
    """Candidates, their debounce, and ``min_peers`` before the first placement."""

    def __init__(self, now: float, *, restored: bool) -> None:
        """``restored``: there was a placement before this coordinator started."""
        self.backoff = Backoff()
        #: The first placement waits for ``min_peers``; later ones take whoever is left.
        self.placed = False
        self._waive_at = now + RESTORE_TIMEOUT if restored else None
        #: What the last placement saw; ``None`` forces another.
        self._tried: Candidates | None = ()
        #: What was seen last while a placement is put off, else ``None``.
        self._pending: Candidates | None = None
        self._pending_since = 0.0
        self._place_at = 0.0

    def candidates(self, registry: Registry, formation: Formation | None, now: float) -> Candidates:
        """Peers to place a model on, in the order of joining.

        What stands is not disturbed for a peer that failed lately, nor broken for one whose
        reports are late; neither gets a new stage.
        """
        found: list[Candidate] = []
        for peer in registry.members:
            session = registry.sessions.get(peer)
            if session is None or self.backoff.blocked(peer, now):
                continue
            if formation is None:
                left_out = now - session.seen > STALE
            else:
                left_out = peer not in formation.peers and self.backoff.suspect(peer, now)
            report = session.report
            offers = report.stage == "auto" or parse_range(report.stage) is not None
            if offers and not left_out:
                device = report.device
                found.append(
                    Candidate(
                        peer,
                        report.name,
                        device.memory,
                        device.read_rate,
                        report.stage,
                        bf16=device.bf16,
                        cuda=device.kind == "cuda",
                    )
                )
        return tuple(found)

    def due(self, candidates: Candidates, now: float) -> bool:
        """Whether it is time to place. If so, they count as placed from now on."""
        if self._waive_at is not None and now >= self._waive_at:
            self.placed, self._waive_at, self._tried = True, None, None
        if not _differ(candidates, self._tried):
            self._pending = None
            return False
        if self._pending is None:
            self._pending_since = now
        if _differ(candidates, self._pending):
            self._place_at = min(now + DEBOUNCE, self._pending_since + MAX_DEBOUNCE)
        self._pending = candidates
        if now < self._place_at:
            return False
        self.settle(candidates)
        return True

    def settle(self, candidates: Candidates) -> None:
        """There is a placement, and it need not be looked at again for these candidates."""
        self._tried, self._pending = candidates, None

    def again(self, candidates: Candidates, now: float, pause: float = LOSS_DEBOUNCE) -> None:
        """What was placed is no more: place after ``pause``, whether the candidates change or not.

        Where they do, it may be sooner.
        """
        self._tried, self._pending = None, candidates
        self._pending_since, self._place_at = now, now + pause

    def restart(self) -> None:
        """Another model is to be placed for the first time."""
        self.placed, self._waive_at = False, None

    def place(
        self, desired: Desired, candidates: Candidates, registry: Registry, now: float
    ) -> Placement | Unplaceable:
        """Place the desired model."""
        if not self.placed and len(candidates) < desired.min_peers:
            return Unplaceable(
                f"waiting for peers: {len(candidates)} of {desired.min_peers} with a stage are "
                "there"
            )
        found = place(desired.facts, candidates, desired.dtype, desired.quantize)
        if isinstance(found, Placement):
            self.placed, self._waive_at = True, None
            return found
        left_out = [
            f"{registry.name(peer)} is {why}"
            for peer in registry.sessions
            if (why := self.backoff.explain(peer, now))
        ]
        return Unplaceable("; ".join([found.reason, *left_out]))


def _differ(new: Candidates, old: Candidates | None) -> bool:
    """Whether two sets of candidates call for another placement. Measured rates jitter."""
    if old is None or len(new) != len(old):
        return True
    return any(
        (a.peer, a.stage) != (b.peer, b.stage)
        or abs(a.memory - b.memory) > MEMORY_CHANGE * max(a.memory, b.memory)
        for a, b in zip(new, old, strict=True)
    )
