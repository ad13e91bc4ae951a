"""Decides when a model is placed again, and on which peers.

Candidates are compared after every event. A placement is made when they differ from those of the
last placement and have been stable for a moment. So several joins within a short time cause one
formation, and every change of the candidates (a join, a loss, the end of a back-off) is handled
alike.
"""

import logging
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

from molink.facts.layer_range import parse_layers
from molink.swarm.controller.backoff import Backoff
from molink.swarm.controller.formation import Formation
from molink.swarm.controller.reachability import Reachability, UnreachablePeer
from molink.swarm.controller.records import DesiredModel, Pin, PipelineRecord, StageRecord
from molink.swarm.controller.registry import PeerSession, Registry
from molink.swarm.placement.links import Links
from molink.swarm.placement.placement import (
    MICRO_BATCH_ROWS,
    Candidate,
    Placement,
    PlacementGoal,
    Unplaceable,
    candidate_from_device,
    place_model,
)
from molink.swarm.placement.read_rates import ReadRates, is_significant, measured_rate
from molink.util.change_detector import differs
from molink.wire.messages.peer_reports import PeerReport

log = logging.getLogger(__name__)

#: Seconds within which changes are placed together …
DEBOUNCE = 1.0
#: … and maximum seconds that the first of them waits.
MAX_DEBOUNCE = 5.0
#: Seconds before a broken pipeline is placed again, since losses rarely come alone.
LOSS_DEBOUNCE = 0.3
#: Maximum back-off in seconds of a failed peer for which to wait, since without it every other
#: stage would have to load other layers.
MAX_AWAITED_BACKOFF = 2.0
#: Seconds to wait for a peer that its neighbour has lost: two reports.
DOUBT_TIMEOUT = 0.75
#: Seconds of silence after which a peer is not placed while no pipeline is up.
STALE_TIMEOUT = 1.5
#: Seconds for which a restarted coordinator waits for ``min_peers`` to reconnect, if that many are
#: still members.
RESTORE_TIMEOUT = 30.0
#: Seconds after a placement within which changed links and read rates cause no new one.
REVIEW_INTERVAL = 60.0
#: Fraction of a peer's memory whose change causes no new placement.
MEMORY_CHANGE = 0.1

Candidates = tuple[Candidate, ...]


class Planner:
    """Candidates, their debounce, and ``min_peers`` before the first placement."""

    def __init__(
        self, now: float, backoff: Backoff, reach: Reachability, links: Links, *, restored: bool
    ) -> None:
        """With ``restored``, a placement existed before this coordinator started.

        ``backoff`` and ``reachability`` are shared by the swarm; ``links`` is this planner's own
        copy.
        """
        self.backoff = backoff
        self.reachability = reach
        self.links = links
        self.read_rates = ReadRates()
        #: Peers that this model may use; ``None`` means all.
        self.allocated_peers: frozenset[str] | None = None
        self._pins: dict[str, str] = {}
        #: Peers that the last placement did not use.
        self.spare_peers: frozenset[str] = frozenset()
        #: Peers without a stage because a connection cannot be made.
        self.unreachable: dict[str, UnreachablePeer] = {}
        #: Whether to wait for ``min_peers``: only the first placement does; later ones use the
        #: remaining peers.
        self.has_placed = False
        self._waive_at = now + RESTORE_TIMEOUT if restored else None
        #: A leader that was lost just before this coordinator started; empty after a placement.
        #: When all others have reported, there is nothing to wait for.
        self._lost_leader = ""
        #: Candidates of the last placement; ``None`` forces another.
        self._placed_candidates: Candidates | None = ()
        #: Candidates of the placement being debounced, otherwise ``None``.
        self._pending_candidates: Candidates | None = None
        self._pending_since = 0.0
        self._place_at = 0.0
        #: When changed links, and changed read rates, may cause a placement. The times are
        #: separate: links jitter, but a lasting slowdown need not wait for them.
        self._link_review_at = self._rate_review_at = 0.0
        #: Whether the next placement ignores the serving ring.
        self._ignore_serving = False
        #: Seconds by which a change of the candidates delays the placement.
        self._debounce = DEBOUNCE
        #: Each peer's candidate, and the report from which it was made.
        self._candidates: dict[str, tuple[PeerReport, Candidate | None]] = {}
        #: When a neighbour lost each peer; these are not placed before they report again.
        self._doubted_at: dict[str, float] = {}

    def waive_min_peers(self, lost_leader: str, *, placed: bool) -> None:
        """Do not wait for a leader known to have left; with ``placed``, nor for ``min_peers``."""
        self._waive_at, self.has_placed, self._lost_leader = None, placed, lost_leader

    def find_candidates(
        self, registry: Registry, formation: Formation | None, now: float
    ) -> Candidates:
        """Return the peers on which to place a model, in joining order.

        A working pipeline is neither changed for the sake of a peer that failed lately, nor broken
        because a peer's reports are late; neither kind of peer gets a new stage. While no pipeline
        is up, peers for which :meth:`check_due` waits are included.
        """
        found: list[Candidate] = []
        for peer in registry.members:
            session = registry.sessions.get(peer)
            if session is None or not self.may_use(peer):
                continue
            if formation is None:
                gone = (
                    self.is_doubted(peer, session) and now >= self._doubted_at[peer] + DOUBT_TIMEOUT
                )
                left_out = gone or registry.silence_of(session, now) > STALE_TIMEOUT
                left_out |= self.backoff.is_excluded(peer, now + MAX_AWAITED_BACKOFF)
            else:
                left_out = self.backoff.is_excluded(peer, now) or (
                    peer not in formation.peers and self.backoff.is_suspect(peer, now)
                )
            offer = None if left_out else self._cached_candidate(peer, session.report)
            if offer is not None:
                found.append(offer)
        serving = formation.peers if formation is not None and formation.state == "ready" else ()
        first = sorted(found, key=lambda one: one.peer not in serving)
        self.unreachable = self.reachability.find_unreachable(one.peer for one in first)
        # A serving peer has working connections.
        out = self.unreachable.keys() - set(serving)
        return self._with_unreachable([one for one in found if one.peer not in out], serving)

    def set_pins(self, pins: Iterable[Pin]) -> None:
        """Set the stages that pinned peers must hold; they override the offers."""
        self._pins = dict(pins)
        self._candidates.clear()

    def may_use(self, peer: str) -> bool:
        """Whether this model may use the peer."""
        return self.allocated_peers is None or peer in self.allocated_peers

    def _with_unreachable(self, found: Sequence[Candidate], serving: Collection[str]) -> Candidates:
        """Add to each candidate the others to which it cannot connect."""
        if not self.reachability.has_failures:
            return tuple(found)
        peers = {one.peer for one in found}
        return tuple(
            replace(
                one,
                unreachable=self.reachability.unreachable_from(one.peer)
                & peers - (set(serving) if one.peer in serving else set()),
            )
            for one in found
        )

    def _cached_candidate(self, peer: str, report: PeerReport) -> Candidate | None:
        """Return the candidate of a report, cached since this is called after every event."""
        known = self._candidates.get(peer)
        if known is None or known[0] is not report:
            known = self._candidates[peer] = (
                report,
                candidate_from_report(peer, report, self._pins.get(peer, "")),
            )
        return known[1]

    def is_doubted(self, peer: str, session: PeerSession) -> bool:
        """Whether a neighbour has lost the peer, and the peer has not reported since."""
        return self._doubted_at.get(peer, -1.0) >= session.last_seen

    def check_due(self, candidates: Candidates, registry: Registry, now: float) -> bool:
        """Whether to place now. If so, these candidates count as placed."""
        all_live = registry.sessions.keys() >= registry.members.keys()
        if self._waive_at is not None and (all_live or now >= self._waive_at):
            self.has_placed, self._waive_at, self._placed_candidates = True, None, None
        if not candidates_differ(candidates, self._placed_candidates):
            self._pending_candidates = None
            return self._check_review_due(now)
        if self._pending_candidates is None:
            self._pending_since = now
        if candidates_differ(candidates, self._pending_candidates):
            others = registry.members.keys() - {self._lost_leader}
            is_complete = self._lost_leader and registry.all_live(others)
            debounce = LOSS_DEBOUNCE if is_complete else self._debounce
            self._place_at = min(now + debounce, self._pending_since + MAX_DEBOUNCE)
        self._pending_candidates = candidates
        if now < self._place_at or any(
            self.backoff.is_excluded(one.peer, now)
            or self.is_doubted(one.peer, registry.sessions[one.peer])
            for one in candidates
        ):
            return False
        self.mark_settled(candidates)
        self._link_review_at = self._rate_review_at = now + REVIEW_INTERVAL
        return True

    def _check_review_due(self, now: float) -> bool:
        """Whether links or read rates have changed since a placement that is not recent."""
        self.read_rates.expire_slowdowns(now)
        rates_changed = self.read_rates.has_changed and now >= self._rate_review_at
        if not rates_changed and not (self.links.has_changed and now >= self._link_review_at):
            return False
        self._link_review_at = now + REVIEW_INTERVAL
        if rates_changed:
            self._rate_review_at = now + REVIEW_INTERVAL
        return True

    def is_outdated(self, candidates: Candidates, peers: Collection[str]) -> bool:
        """Whether a placement on ``peers`` has become impossible: one has left or offers less.

        New peers are no reason to abort a formation.
        """
        if self._placed_candidates is None:
            return True
        now, then = (
            tuple(
                replace(one, unreachable=one.unreachable & set(peers)) if one.unreachable else one
                for one in all_of_them
                if one.peer in peers
            )
            for all_of_them in (candidates, self._placed_candidates)
        )
        return candidates_differ(now, then)

    def on_ring_formed(
        self, record: PipelineRecord, desired: DesiredModel, registry: Registry
    ) -> None:
        """Record the measured step times of all stages of a new ring."""
        rows = MICRO_BATCH_ROWS[desired.objective]
        for stage in record.stages:
            seconds = stage.profile.decode_s(rows)
            session = registry.sessions.get(stage.peer)
            offer = None if session is None else self._cached_candidate(stage.peer, session.report)
            if offer is not None and seconds > 0 and is_significant(offer, seconds):
                rate = measured_rate(desired.facts, offer, desired.setup, stage.layers, seconds)
                self.read_rates.record_profile(
                    stage.peer, (stage.layers, stage.profile, rows), rate
                )

    def mark_settled(self, candidates: Candidates) -> None:
        """Mark these candidates as placed."""
        self._placed_candidates, self._pending_candidates = candidates, None
        self._debounce, self._lost_leader = DEBOUNCE, ""

    def record_failure(
        self, peer: str, reason: str, now: float, *, doubt: bool, at_once: bool = False
    ) -> float:
        """Count a peer's failure; return for how many seconds it is excluded.

        With ``doubt``, a neighbour reported it, and the peer may have left. For ``at_once`` see
        :meth:`Backoff.record_failure`.
        """
        if doubt:
            self._doubted_at[peer] = now
        return self.backoff.record_failure(peer, reason, now, at_once=at_once)

    def drop_peer(self, peer: str) -> None:
        """Drop a peer that has left."""
        self.links.drop_peer(peer)
        self.read_rates.drop_peer(peer)
        self._candidates.pop(peer, None)
        self._doubted_at.pop(peer, None)

    def schedule_placement(
        self,
        candidates: Candidates,
        now: float,
        pause: float = LOSS_DEBOUNCE,
        step: float = DEBOUNCE,
    ) -> None:
        """Place after ``pause`` seconds, even if the candidates don't change.

        If they change, the placement is earlier, ``step`` seconds after the last change.
        """
        self._placed_candidates, self._pending_candidates = None, candidates
        self._pending_since, self._place_at = now, now + pause
        self._debounce = step

    def rebalance_now(self, candidates: Candidates, now: float) -> None:
        """Place again at once, ignoring the serving ring."""
        self._ignore_serving = True
        self.schedule_placement(candidates, now, 0.0)

    def restart_planning(self) -> None:
        """Start again: another model is placed for the first time."""
        self.has_placed, self._waive_at = False, None

    def place_model(
        self,
        desired: DesiredModel,
        candidates: Candidates,
        registry: Registry,
        now: float,
        serving: Iterable[StageRecord] = (),
    ) -> Placement | Unplaceable:
        """Place the desired model; ``serving`` are its current stages."""
        if not self.has_placed and len(candidates) < desired.min_peers:
            return Unplaceable(
                f"waiting for peers: {len(candidates)} of {desired.min_peers} with a stage are "
                "connected"
            )
        candidates = self.read_rates.apply_rates(candidates)
        self.links.mark_placed()
        self.read_rates.mark_placed(candidates)
        rates = (f"{one.name} {one.read_rate / 1e9:.3g}" for one in candidates)
        log.info("placing with read rates in GB/s: %s", ", ".join(rates))
        found = place_model(
            desired.facts,
            candidates,
            desired.setup,
            goal=PlacementGoal(desired.objective, desired.target_stages),
            links=self.links,
            serving=[(stage.peer, stage.layers) for stage in serving if not self._ignore_serving],
            askers=find_askers(registry),
        )
        self._ignore_serving = False
        self.spare_peers = frozenset(found.spare_peers if isinstance(found, Placement) else ())
        if isinstance(found, Placement):
            self.has_placed, self._waive_at = True, None
            return found
        left_out = [
            f"{registry.name_of(peer)} is {why}"
            for peer in registry.sessions
            if (why := self.backoff.explain_exclusion(peer, now))
        ]
        return Unplaceable("; ".join([found.reason, *left_out]))


def find_askers(registry: Registry) -> dict[str, float]:
    """Return the peers at which requests arrive, with their numbers of requests.

    One is added to each number, so that all endpoints count equally before the first request.
    """
    return {
        peer: 1.0 + session.report.requests
        for peer, session in registry.sessions.items()
        if session.report.api_address
    }


def candidate_from_report(peer: str, report: PeerReport, pin: str = "") -> Candidate | None:
    """Return the candidate that a report describes, if it offers a stage; ``pin`` overrides the
    stage.
    """
    if report.stage != "auto" and parse_layers(report.stage) is None:
        return None
    return candidate_from_device(
        peer,
        report.name,
        report.device,
        stage=report.stage if pin in ("", "auto") else pin,
        primary_peer=report.primary_peer,
    )


def candidates_differ(new: Candidates, old: Candidates | None) -> bool:
    """Whether two sets of candidates require another placement. Measured rates jitter."""
    if old is None or len(new) != len(old):
        return True
    return any(
        (a.peer, a.stage, a.unreachable, a.draft_bytes, a.blocks, a.reads_pages)
        != (b.peer, b.stage, b.unreachable, b.draft_bytes, b.blocks, b.reads_pages)
        or differs(a.memory, b.memory, MEMORY_CHANGE)
        for a, b in zip(new, old, strict=True)
    )
