"""How fast peers really read weights, by what their stages measured; for whoever places a model.

A device says how fast it reads memory; a stage that has been loaded knows how long its steps take
(``T_d``), and one that serves how much longer they take now: a game, a hot laptop. What a stage
measured counts in every later placement. Only what was seen while it served, and has stayed so for
:data:`SLOWDOWN_HOLD`, is a reason for one.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import median

from molink.facts.footprint import Footprint, StageSetup
from molink.facts.model import LayerRange, ModelFacts
from molink.swarm.placement.partition import StageCosts
from molink.swarm.placement.placement import Candidate, stage_setup

#: A pace counts once it has been the same for so long, in seconds …
SLOWDOWN_HOLD = 60.0
#: … and no longer than this after it was last told, by a stage that is there: games end.
SLOWDOWN_TTL = 900.0
#: Paces that differ by less than this part are the same, for how long one has stayed.
_SLOWDOWN_TOLERANCE = 0.1
#: A rate is news if it differs from what the last placement saw by this part of it.
_RELATIVE_CHANGE = 0.25
#: How many times as fast a device may have been than it was measured to be, on a busy PC; and a
#: stage of it, which takes longer to be measured.
_NOISE, _STAGE_NOISE = 4.0, 2.5
#: A decode step that is shorter than so many of what each takes whatever its weights are says
#: nothing of how fast these are read.
_MIN_OVERHEADS = 4.0


def measured_rate(
    facts: ModelFacts, candidate: Candidate, common: StageSetup, layers: LayerRange, seconds: float
) -> float:
    """Bytes/s at which a peer reads weights, if a decode step of these layers takes ``seconds``."""
    costs = StageCosts.from_footprint(Footprint.of_stage(facts, stage_setup(candidate, common)))
    nbytes = costs.step_time(layers[1] - layers[0], 1.0, closes=layers[1] == facts.layers)
    return nbytes / max(seconds - candidate.step_overhead, seconds / 2)


def is_significant(candidate: Candidate, seconds: float) -> bool:
    """Whether a decode step that takes so long has weights enough to say how fast they are read."""
    return seconds >= _MIN_OVERHEADS * candidate.step_overhead


@dataclass(slots=True)
class _MeasuredRate:
    """Of one peer: ``rate`` in bytes/s by its stage's profile, which is as long ago as that."""

    profile: object
    rate: float
    #: How many times as long its steps take, and when that was told last.
    slowdown: float = 1.0
    reported_at: float = 0.0
    #: What it says now, and since when.
    trial_slowdown: float = 0.0
    trial_since: float = 0.0


class ReadRates:
    """Read rates by peer, as long as it is there; values are believed as told."""

    def __init__(self) -> None:
        self._measured: dict[str, _MeasuredRate] = {}
        #: Rates that the last placement saw.
        self._at_placement: dict[str, float] = {}
        #: Whether one is so different from that meanwhile that it may matter.
        self.has_changed = False

    def record_profile(self, peer: str, profile: object, rate: float) -> None:
        """Its stage has measured itself: it reads ``rate_of`` bytes/s by that ``profile``.

        A pace is one of a profile, so another profile ends it.
        """
        known = self._measured.get(peer)
        if known is None or known.profile != profile:
            self._measured[peer] = _MeasuredRate(profile, rate)

    def record_slowdown(self, peer: str, slowdown: float, now: float) -> None:
        """Its stage's steps take ``pace`` times as long as that profile says."""
        known = self._measured.get(peer)
        if known is None:
            return
        known.reported_at = now
        if abs(slowdown - known.trial_slowdown) > _SLOWDOWN_TOLERANCE * slowdown:
            known.trial_slowdown, known.trial_since = slowdown, now
        if now - known.trial_since >= SLOWDOWN_HOLD:
            known.slowdown = known.trial_slowdown
            self._compare_rate(peer)

    def drop_peer(self, peer: str) -> None:
        """The peer is gone: it may come back as another PC."""
        self._measured.pop(peer, None)
        self._at_placement.pop(peer, None)

    def expire_slowdowns(self, now: float) -> None:
        """Time has passed: what was told long ago may be over."""
        for peer, known in self._measured.items():
            if known.slowdown != 1.0 and now - known.reported_at > SLOWDOWN_TTL:
                known.slowdown = known.trial_slowdown = 1.0
                self._compare_rate(peer)

    def apply_rates(self, candidates: Iterable[Candidate]) -> tuple[Candidate, ...]:
        """Candidates with what was measured in place of what their devices say.

        A stage reads less than its device could; those of which nothing is known count as their
        kind does, or any newcomer would look faster than who serves. Devices of one name count as
        the one of them that reads fastest: each is measured once, and so is each stage, and
        whatever else its PC does then only takes away from it. A pace that has stayed is believed.
        """
        candidates = _equalize_rates(candidates, _NOISE)
        shares: dict[bool, list[float]] = defaultdict(list)
        for one in candidates:
            rate = self.rate_of(one.peer)
            if rate is not None and one.read_rate > 0:
                shares[one.cuda].append(rate / one.read_rate)
        share = {kind: median(found) for kind, found in shares.items()}
        rated = [
            replace(
                one, read_rate=self.rate_of(one.peer) or one.read_rate * share.get(one.cuda, 1.0)
            )
            for one in candidates
        ]
        levelled = _equalize_rates(
            [one for one in rated if not self._is_slowed(one.peer)], _STAGE_NOISE
        )
        known = {one.peer: one for one in levelled}
        return tuple(known.get(one.peer, one) for one in rated)

    def rate_of(self, peer: str) -> float | None:
        """Bytes/s, ``None`` if its stages have measured nothing."""
        known = self._measured.get(peer)
        return None if known is None else known.rate / known.slowdown

    def _is_slowed(self, peer: str) -> bool:
        known = self._measured.get(peer)
        return known is not None and known.slowdown != 1.0

    def mark_placed(self, candidates: Sequence[Candidate]) -> None:
        """A model is being placed by these rates."""
        self._at_placement = {one.peer: one.read_rate for one in candidates}
        self.has_changed = False

    def _compare_rate(self, peer: str) -> None:
        seen, rate = self._at_placement.get(peer), self.rate_of(peer)
        if seen is not None and rate is not None:
            self.has_changed |= abs(rate - seen) > _RELATIVE_CHANGE * max(rate, seen)


def _equalize_rates(candidates: Iterable[Candidate], noise: float) -> tuple[Candidate, ...]:
    """With devices of one name, of whatever PC, as fast as the fastest of them.

    One that is slower by more than ``noise`` times is used otherwise: on fewer threads, say.
    """
    candidates = tuple(candidates)
    best: dict[tuple[str, bool], float] = {}
    for one in candidates:
        if one.device and one.read_rate > 0:
            kind = one.device, one.cuda
            best[kind] = max(one.read_rate, best.get(kind, 0.0))
    return tuple(
        replace(one, read_rate=fastest)
        if (fastest := best.get((one.device, one.cuda), one.read_rate)) <= noise * one.read_rate
        else one
        for one in candidates
    )
