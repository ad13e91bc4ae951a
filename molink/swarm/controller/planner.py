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
from molink.swarm.controller.reach import Reach, Unreachable
from molink.swarm.controller.records import Desired, Pin, PipelineRecord, StageRecord
from molink.swarm.controller.registry import PeerSession, Registry
from molink.swarm.placement.links import Links
from molink.swarm.placement.paces import Paces, measured_rate, says_enough
from molink.swarm.placement.placement import (
    ROWS,
    Aim,
    Candidate,
    Placement,
    Unplaceable,
    parse_range,
    place,
)
from molink.wire.messages.reports import PeerReport

log = logging.getLogger(__name__)

#: Peers that join or change within this time, in seconds, are placed together …
DEBOUNCE = 1.0
#: … but the first of them doesn't wait longer than this.
MAX_DEBOUNCE = 5.0
#: A broken pipeline is placed anew after this pause: losses rarely come alone.
LOSS_DEBOUNCE = 0.3
#: A failed peer is waited for if it is left out for no longer than this, in seconds: without it
#: every other stage would have to load other layers.
WORTH_WAITING = 2.0
#: A peer that was lost to its neighbour is waited for this long, in seconds: for two reports.
DOUBT = 0.75
#: While no pipeline stands, a peer that has been silent for this long is not placed.
STALE = 1.5
#: A restarted coordinator waits this long, in seconds, for ``min_peers`` to come back, if so many
#: are members still.
RESTORE_TIMEOUT = 30.0
#: Links and paces that have changed are no reason to look at a young placement again, in seconds.
REVIEW = 60.0
#: A change of a peer's memory below this part of it is no reason to place anew.
MEMORY_CHANGE = 0.1

Candidates = tuple[Candidate, ...]


class Planner:
    """Candidates, their debounce, and ``min_peers`` before the first placement."""

    def __init__(
        self, now: float, backoff: Backoff, reach: Reach, links: Links, *, restored: bool
    ) -> None:
        """``restored``: there was a placement before this coordinator started.

        ``backoff`` and ``reach`` are those of the swarm, ``links`` is its own copy.
        """
        self.backoff = backoff
        self.reach = reach
        self.links = links
        self.paces = Paces()
        #: Peers that this model may use; ``None``: all.
        self.allotted: frozenset[str] | None = None
        self._pins: dict[str, str] = {}
        #: Peers for which the last placement had no use.
        self.spares: frozenset[str] = frozenset()
        #: Peers that get no stage because of a connection that can't be made.
        self.unreachable: dict[str, Unreachable] = {}
        #: The first placement waits for ``min_peers``; later ones take whoever is left.
        self.placed = False
        self._waive_at = now + RESTORE_TIMEOUT if restored else None
        #: What the last placement saw; ``None`` forces another.
        self._tried: Candidates | None = ()
        #: What was seen last while a placement is put off, else ``None``.
        self._pending: Candidates | None = None
        self._pending_since = 0.0
        self._place_at = 0.0
        #: When a change of links may be looked at, and one of paces: links jitter, and paces that
        #: have stayed for long enough don't wait for what that led to.
        self._links_at = self._paces_at = 0.0
        #: Whether the next placement is made as if nothing served.
        self._afresh = False
        #: How long a change of the candidates puts the placement off.
        self._step = DEBOUNCE
        #: What each peer offers, and in which report.
        self._offers: dict[str, tuple[PeerReport, Candidate | None]] = {}
        #: Peers that a neighbour has lost, and when: not to be placed before they have reported.
        self._doubts: dict[str, float] = {}

    def not_waiting(self, *, placed: bool) -> None:
        """Somebody is known to be gone: what was ``placed`` goes on with whoever is left."""
        self._waive_at, self.placed = None, placed

    def candidates(self, registry: Registry, formation: Formation | None, now: float) -> Candidates:
        """Peers to place a model on, in the order of joining.

        What stands is not disturbed for a peer that failed lately, nor broken for one whose
        reports are late; neither gets a new stage. While nothing stands, those count that
        :meth:`due` waits for.
        """
        found: list[Candidate] = []
        for peer in registry.members:
            session = registry.sessions.get(peer)
            if session is None or not self.may_use(peer):
                continue
            if formation is None:
                gone = self.doubted(peer, session) and now >= self._doubts[peer] + DOUBT
                left_out = gone or registry.silence(session, now) > STALE
                left_out |= self.backoff.blocked(peer, now + WORTH_WAITING)
            else:
                left_out = self.backoff.blocked(peer, now) or (
                    peer not in formation.peers and self.backoff.suspect(peer, now)
                )
            offer = None if left_out else self._offer(peer, session.report)
            if offer is not None:
                found.append(offer)
        serving = formation.peers if formation is not None and formation.state == "ready" else ()
        first = sorted(found, key=lambda one: one.peer not in serving)
        self.unreachable = self.reach.left_out(one.peer for one in first)
        # Whatever its ports are, who serves does.
        out = self.unreachable.keys() - set(serving)
        return self._blocked([one for one in found if one.peer not in out], serving)

    def pin(self, pins: Iterable[Pin]) -> None:
        """Which stage the model is to have at which peer, whatever that names itself."""
        self._pins = dict(pins)
        self._offers.clear()

    def may_use(self, peer: str) -> bool:
        """Whether the peer is for this model."""
        return self.allotted is None or peer in self.allotted

    def _blocked(self, found: Sequence[Candidate], serving: Collection[str]) -> Candidates:
        """Candidates with those of each other to whom they can't connect."""
        if not self.reach.failed:
            return tuple(found)
        peers = {one.peer for one in found}
        return tuple(
            replace(
                one,
                blocked=self.reach.blocked(one.peer)
                & peers - (set(serving) if one.peer in serving else set()),
            )
            for one in found
        )

    def _offer(self, peer: str, report: PeerReport) -> Candidate | None:
        """What a report offers; it is looked at after every event, so one is made per report."""
        known = self._offers.get(peer)
        if known is None or known[0] is not report:
            known = self._offers[peer] = report, offer_of(peer, report, self._pins.get(peer, ""))
        return known[1]

    def doubted(self, peer: str, session: PeerSession) -> bool:
        """Whether a neighbour has lost the peer, and it has not reported since."""
        return self._doubts.get(peer, -1.0) >= session.seen

    def due(self, candidates: Candidates, registry: Registry, now: float) -> bool:
        """Whether it is time to place. If so, they count as placed from now on."""
        everybody = registry.sessions.keys() >= registry.members.keys()
        if self._waive_at is not None and (everybody or now >= self._waive_at):
            self.placed, self._waive_at, self._tried = True, None, None
        if not differ(candidates, self._tried):
            self._pending = None
            return self._review(now)
        if self._pending is None:
            self._pending_since = now
        if differ(candidates, self._pending):
            self._place_at = min(now + self._step, self._pending_since + MAX_DEBOUNCE)
        self._pending = candidates
        if now < self._place_at or any(
            self.backoff.blocked(one.peer, now)
            or self.doubted(one.peer, registry.sessions[one.peer])
            for one in candidates
        ):
            return False
        self.settle(candidates)
        self._links_at = self._paces_at = now + REVIEW
        return True

    def _review(self, now: float) -> bool:
        """Whether links or paces have changed since the last placement, and that is not young."""
        self.paces.look(now)
        paces = self.paces.news and now >= self._paces_at
        if not paces and not (self.links.news and now >= self._links_at):
            return False
        self._links_at = now + REVIEW
        if paces:
            self._paces_at = now + REVIEW
        return True

    def outdated(self, candidates: Candidates, peers: Collection[str]) -> bool:
        """Whether a placement on ``peers`` can't be had any more: one is gone, or offers less.

        That others have come is no reason to break off what is being formed.
        """
        if self._tried is None:
            return True
        now, then = (
            tuple(
                replace(one, blocked=one.blocked & set(peers)) if one.blocked else one
                for one in all_of_them
                if one.peer in peers
            )
            for all_of_them in (candidates, self._tried)
        )
        return differ(now, then)

    def formed(self, record: PipelineRecord, desired: Desired, registry: Registry) -> None:
        """All stages of a ring have told how long their steps take."""
        setup = StageSetup(dtype=desired.dtype, quantize=desired.quantize)
        rows = ROWS[desired.objective]
        for stage in record.stages:
            seconds = stage.profile.decode_s(rows)
            session = registry.sessions.get(stage.peer)
            offer = None if session is None else self._offer(stage.peer, session.report)
            if offer is not None and seconds > 0 and says_enough(offer, seconds):
                rate = measured_rate(desired.facts, offer, setup, stage.layers, seconds)
                self.paces.loaded(stage.peer, (stage.layers, stage.profile, rows), rate)

    def settle(self, candidates: Candidates) -> None:
        """There is a placement, and it need not be looked at again for these candidates."""
        self._tried, self._pending, self._step = candidates, None, DEBOUNCE

    def failed(
        self, peer: str, reason: str, now: float, *, doubt: bool, at_once: bool = False
    ) -> float:
        """Count a peer's failure; returns for how many seconds it is left out.

        ``doubt``: a neighbour says so, and the peer may be gone. ``at_once`` as in
        :meth:`Backoff.failed`.
        """
        if doubt:
            self._doubts[peer] = now
        return self.backoff.failed(peer, reason, now, at_once=at_once)

    def lost(self, peer: str) -> None:
        """The peer is not there any more."""
        self.links.forget(peer)
        self.paces.forget(peer)
        self._offers.pop(peer, None)
        self._doubts.pop(peer, None)

    def again(
        self,
        candidates: Candidates,
        now: float,
        pause: float = LOSS_DEBOUNCE,
        step: float = DEBOUNCE,
    ) -> None:
        """What was placed is no more: place after ``pause``, whether the candidates change or not.

        Where they do, it is sooner; ``step`` is how long each change puts it off.
        """
        self._tried, self._pending = None, candidates
        self._pending_since, self._place_at = now, now + pause
        self._step = step

    def rebalance(self, candidates: Candidates, now: float) -> None:
        """Place again at once, and see no worth in what serves."""
        self._afresh = True
        self.again(candidates, now, 0.0)

    def restart(self) -> None:
        """Another model is to be placed for the first time."""
        self.placed, self._waive_at = False, None

    def place(
        self,
        desired: Desired,
        candidates: Candidates,
        registry: Registry,
        now: float,
        serving: Iterable[StageRecord] = (),
    ) -> Placement | Unplaceable:
        """Place the desired model; ``serving`` are the stages that serve it."""
        if not self.placed and len(candidates) < desired.min_peers:
            return Unplaceable(
                f"waiting for peers: {len(candidates)} of {desired.min_peers} with a stage are "
                "there"
            )
        candidates = self.paces.applied(candidates)
        self.links.placed()
        self.paces.placed(candidates)
        rates = (f"{one.name} {one.read_rate / 1e9:.3g}" for one in candidates)
        log.info("placing by how fast each reads weights, in GB/s: %s", ", ".join(rates))
        found = place(
            desired.facts,
            candidates,
            desired.dtype,
            desired.quantize,
            aim=Aim(desired.objective, desired.stages),
            links=self.links,
            serving=[(stage.peer, stage.layers) for stage in serving if not self._afresh],
        )
        self._afresh = False
        self.spares = frozenset(found.spares if isinstance(found, Placement) else ())
        if isinstance(found, Placement):
            self.placed, self._waive_at = True, None
            return found
        left_out = [
            f"{registry.name(peer)} is {why}"
            for peer in registry.sessions
            if (why := self.backoff.explain(peer, now))
        ]
        return Unplaceable("; ".join([found.reason, *left_out]))


def offer_of(peer: str, report: PeerReport, pin: str = "") -> Candidate | None:
    """A peer to place a model on, if it offers to run a stage; ``pin`` says which one it gets."""
    if report.stage != "auto" and parse_range(report.stage) is None:
        return None
    device = report.device
    return Candidate(
        peer,
        report.name,
        device.memory,
        device.read_rate,
        report.stage if pin in ("", "auto") else pin,
        bf16=device.bf16,
        blocks=device.blocks,
        narrow=device.narrow,
        cuda=device.kind == "cuda",
        pc=report.pc,
        device=device.name,
        draft=device.draft,
    )


def differ(new: Candidates, old: Candidates | None) -> bool:
    """Whether two sets of candidates call for another placement. Measured rates jitter."""
    if old is None or len(new) != len(old):
        return True
    return any(
        (a.peer, a.stage, a.blocked, a.draft) != (b.peer, b.stage, b.blocked, b.draft)
        or abs(a.memory - b.memory) > MEMORY_CHANGE * max(a.memory, b.memory)
        for a, b in zip(new, old, strict=True)
    )
