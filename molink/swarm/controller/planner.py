"""Decides when a model is placed anew, and over which peers.

The candidates are looked at after every event. A placement is made once they differ from those
that the last one saw and have then stayed the same for a moment; so joins close together form once,
and whatever changes the candidates (a join, a loss, the end of a back-off) is the same case.
"""

import logging
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

from molink.facts.footprint import StageSetup
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
    parse_layers,
    place_model,
)
from molink.swarm.placement.read_rates import ReadRates, is_significant, measured_rate
from molink.wire.messages.peer_reports import PeerReport

log = logging.getLogger(__name__)

#: Peers that join or change within this time, in seconds, are placed together …
DEBOUNCE = 1.0
#: … but the first of them doesn't wait longer than this.
MAX_DEBOUNCE = 5.0
#: A broken pipeline is placed anew after this pause: losses rarely come alone.
LOSS_DEBOUNCE = 0.3
#: A failed peer is waited for if it is left out for no longer than this, in seconds: without it
#: every other stage would have to load other layers.
MAX_AWAITED_BACKOFF = 2.0
#: A peer that was lost to its neighbour is waited for this long, in seconds: for two reports.
DOUBT_TIMEOUT = 0.75
#: While no pipeline stands, a peer that has been silent for this long is not placed.
STALE_TIMEOUT = 1.5
#: A restarted coordinator waits this long, in seconds, for ``min_peers`` to come back, if so many
#: are members still.
RESTORE_TIMEOUT = 30.0
#: Links and paces that have changed are no reason to look at a young placement again, in seconds.
REVIEW_INTERVAL = 60.0
#: A change of a peer's memory below this part of it is no reason to place anew.
MEMORY_CHANGE = 0.1

Candidates = tuple[Candidate, ...]


class Planner:
    """Candidates, their debounce, and ``min_peers`` before the first placement."""

    def __init__(
        self, now: float, backoff: Backoff, reach: Reachability, links: Links, *, restored: bool
    ) -> None:
        """``restored``: there was a placement before this coordinator started.

        ``backoff`` and ``reachability`` are those of the swarm, ``links`` is its own copy.
        """
        self.backoff = backoff
        self.reachability = reach
        self.links = links
        self.read_rates = ReadRates()
        #: Peers that this model may use; ``None``: all.
        self.allocated_peers: frozenset[str] | None = None
        self._pins: dict[str, str] = {}
        #: Peers for which the last placement had no use.
        self.spare_peers: frozenset[str] = frozenset()
        #: Peers that get no stage because of a connection that can't be made.
        self.unreachable: dict[str, UnreachablePeer] = {}
        #: The first placement waits for ``min_peers``; later ones take whoever is left.
        self.has_placed = False
        self._waive_at = now + RESTORE_TIMEOUT if restored else None
        #: What the last placement saw; ``None`` forces another.
        self._placed_candidates: Candidates | None = ()
        #: What was seen last while a placement is put off, else ``None``.
        self._pending_candidates: Candidates | None = None
        self._pending_since = 0.0
        self._place_at = 0.0
        #: When a change of links may be looked at, and one of paces: links jitter, and paces that
        #: have stayed for long enough don't wait for what that led to.
        self._link_review_at = self._rate_review_at = 0.0
        #: Whether the next placement is made as if nothing served.
        self._ignore_serving = False
        #: How long a change of the candidates puts the placement off.
        self._debounce = DEBOUNCE
        #: What each peer offers, and in which report.
        self._candidates: dict[str, tuple[PeerReport, Candidate | None]] = {}
        #: Peers that a neighbour has lost, and when: not to be placed before they have reported.
        self._doubted_at: dict[str, float] = {}

    def waive_min_peers(self, *, placed: bool) -> None:
        """Somebody is known to be gone: what was ``has_placed`` goes on with whoever is left."""
        self._waive_at, self.has_placed = None, placed

    def find_candidates(
        self, registry: Registry, formation: Formation | None, now: float
    ) -> Candidates:
        """Peers to place a model on, in the order of joining.

        What stands is not disturbed for a peer that failed lately, nor broken for one whose
        reports are late; neither gets a new stage. While nothing stands, those count that
        :meth:`check_due` waits for.
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
        # Whatever its ports are, who serves does.
        out = self.unreachable.keys() - set(serving)
        return self._with_unreachable([one for one in found if one.peer not in out], serving)

    def set_pins(self, pins: Iterable[Pin]) -> None:
        """Which stage the model is to have at which peer, whatever that names itself."""
        self._pins = dict(pins)
        self._candidates.clear()

    def may_use(self, peer: str) -> bool:
        """Whether the peer is for this model."""
        return self.allocated_peers is None or peer in self.allocated_peers

    def _with_unreachable(self, found: Sequence[Candidate], serving: Collection[str]) -> Candidates:
        """Candidates with those of each other to whom they can't connect."""
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
        """What a report offers; it is looked at after every event, so one is made per report."""
        known = self._candidates.get(peer)
        if known is None or known[0] is not report:
            known = self._candidates[peer] = (
                report,
                candidate_from_report(peer, report, self._pins.get(peer, "")),
            )
        return known[1]

    def is_doubted(self, peer: str, session: PeerSession) -> bool:
        """Whether a neighbour has lost the peer, and it has not reported since."""
        return self._doubted_at.get(peer, -1.0) >= session.last_seen

    def check_due(self, candidates: Candidates, registry: Registry, now: float) -> bool:
        """Whether it is time to place. If so, they count as placed from now on."""
        everybody = registry.sessions.keys() >= registry.members.keys()
        if self._waive_at is not None and (everybody or now >= self._waive_at):
            self.has_placed, self._waive_at, self._placed_candidates = True, None, None
        if not candidates_differ(candidates, self._placed_candidates):
            self._pending_candidates = None
            return self._check_review_due(now)
        if self._pending_candidates is None:
            self._pending_since = now
        if candidates_differ(candidates, self._pending_candidates):
            self._place_at = min(now + self._debounce, self._pending_since + MAX_DEBOUNCE)
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
        """Whether links or paces have changed since the last placement, and that is not young."""
        self.read_rates.expire_slowdowns(now)
        paces = self.read_rates.has_changed and now >= self._rate_review_at
        if not paces and not (self.links.has_changed and now >= self._link_review_at):
            return False
        self._link_review_at = now + REVIEW_INTERVAL
        if paces:
            self._rate_review_at = now + REVIEW_INTERVAL
        return True

    def is_outdated(self, candidates: Candidates, peers: Collection[str]) -> bool:
        """Whether a placement on ``peers`` can't be had any more: one is gone, or offers less.

        That others have come is no reason to break off what is being formed.
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
        """All stages of a ring have told how long their steps take."""
        setup = StageSetup(dtype=desired.dtype, quantize=desired.quantize)
        rows = MICRO_BATCH_ROWS[desired.objective]
        for stage in record.stages:
            seconds = stage.profile.decode_s(rows)
            session = registry.sessions.get(stage.peer)
            offer = None if session is None else self._cached_candidate(stage.peer, session.report)
            if offer is not None and seconds > 0 and is_significant(offer, seconds):
                rate = measured_rate(desired.facts, offer, setup, stage.layers, seconds)
                self.read_rates.record_profile(
                    stage.peer, (stage.layers, stage.profile, rows), rate
                )

    def mark_settled(self, candidates: Candidates) -> None:
        """There is a placement, and it need not be looked at again for these candidates."""
        self._placed_candidates, self._pending_candidates, self._debounce = (
            candidates,
            None,
            DEBOUNCE,
        )

    def record_failure(
        self, peer: str, reason: str, now: float, *, doubt: bool, at_once: bool = False
    ) -> float:
        """Count a peer's failure; returns for how many seconds it is left out.

        ``doubt``: a neighbour says so, and the peer may be gone. ``at_once`` as in
        :meth:`Backoff.record_failure`.
        """
        if doubt:
            self._doubted_at[peer] = now
        return self.backoff.record_failure(peer, reason, now, at_once=at_once)

    def drop_peer(self, peer: str) -> None:
        """The peer is not there any more."""
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
        """What was placed is no more: place after ``pause``, whether the candidates change or not.

        Where they do, it is sooner; ``step`` is how long each change puts it off.
        """
        self._placed_candidates, self._pending_candidates = None, candidates
        self._pending_since, self._place_at = now, now + pause
        self._debounce = step

    def rebalance_now(self, candidates: Candidates, now: float) -> None:
        """Place again at once, and see no worth in what serves."""
        self._ignore_serving = True
        self.schedule_placement(candidates, now, 0.0)

    def restart_planning(self) -> None:
        """Another model is to be placed for the first time."""
        self.has_placed, self._waive_at = False, None

    def place_model(
        self,
        desired: DesiredModel,
        candidates: Candidates,
        registry: Registry,
        now: float,
        serving: Iterable[StageRecord] = (),
    ) -> Placement | Unplaceable:
        """Place the desired model; ``serving`` are the stages that serve it."""
        if not self.has_placed and len(candidates) < desired.min_peers:
            return Unplaceable(
                f"waiting for peers: {len(candidates)} of {desired.min_peers} with a stage are "
                "there"
            )
        candidates = self.read_rates.apply_rates(candidates)
        self.links.mark_placed()
        self.read_rates.mark_placed(candidates)
        rates = (f"{one.name} {one.read_rate / 1e9:.3g}" for one in candidates)
        log.info("placing by how fast each reads weights, in GB/s: %s", ", ".join(rates))
        found = place_model(
            desired.facts,
            candidates,
            desired.dtype,
            desired.quantize,
            goal=PlacementGoal(desired.objective, desired.target_stages),
            links=self.links,
            serving=[(stage.peer, stage.layers) for stage in serving if not self._ignore_serving],
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


def candidate_from_report(peer: str, report: PeerReport, pin: str = "") -> Candidate | None:
    """A peer to place a model on, if it offers to run a stage; ``pin`` says which one it gets."""
    if report.stage != "auto" and parse_layers(report.stage) is None:
        return None
    device = report.device
    return Candidate(
        peer,
        report.name,
        device.memory,
        device.read_rate,
        report.stage if pin in ("", "auto") else pin,
        bf16=device.bf16,
        blocks=device.has_block_kernels,
        narrow=device.narrow_dtypes,
        cuda=device.kind == "cuda",
        primary_peer=report.primary_peer,
        device=device.name,
        draft_bytes=device.can_draft,
    )


def candidates_differ(new: Candidates, old: Candidates | None) -> bool:
    """Whether two sets of candidates call for another placement. Measured rates jitter."""
    if old is None or len(new) != len(old):
        return True
    return any(
        (a.peer, a.stage, a.unreachable, a.draft_bytes)
        != (b.peer, b.stage, b.unreachable, b.draft_bytes)
        or abs(a.memory - b.memory) > MEMORY_CHANGE * max(a.memory, b.memory)
        for a, b in zip(new, old, strict=True)
    )
