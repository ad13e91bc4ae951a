"""Effective weight-read rates of peers, as their stages measured them, for placement.

A device states how fast it reads memory. A loaded stage has measured how long its steps take
(``T_d``), and a serving stage measures how much longer they take now, because a game runs, a laptop
is hot, or the profile was measured on a busy PC. Loaded stages' measurements count in every later
placement. A rate is *confirmed* when a stage's steps have been equally slow for
:data:`SLOWDOWN_HOLD`. Only confirmed rates cause a placement, and only they distinguish devices of
one kind.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import median

from molink.facts.footprint import StageSetup
from molink.facts.model import LayerRange, ModelFacts
from molink.swarm.placement.placement import Candidate, build_host
from molink.util.change_detector import differs

#: Seconds for which a slowdown must be constant before it counts …
SLOWDOWN_HOLD = 60.0
#: … and seconds after its last report when it expires, since games end.
SLOWDOWN_TTL = 900.0
#: Fraction below which different slowdowns count as constant.
_SLOWDOWN_TOLERANCE = 0.1
#: Fraction by which a rate must differ from the last placement's to be significant.
_RELATIVE_CHANGE = 0.25
#: Ratio of rates up to which devices of one kind count as equal. Stages of one CPU have rates of
#: 15.5 and 10.1 GB/s with and without the output layer (8 of 30 layers in 3.1 ms, 22 in 4.8 ms).
_MAX_RATIO = 1.6
#: Step overheads that a decode step must exceed to reveal the read rate.
_MIN_OVERHEADS = 4.0


def measured_rate(
    facts: ModelFacts, candidate: Candidate, common: StageSetup, layers: LayerRange, seconds: float
) -> float:
    """Return the bytes/s at which a peer reads weights if a decode step of layers takes
    ``seconds``.

    One time can't determine the rates of two memories. So with experts in host memory, the stated
    rate is scaled by the ratio of the predicted to the measured time.
    """
    count, opens, closes = layers[1] - layers[0], layers[0] == 0, layers[1] == facts.layers
    host = build_host(facts, candidate, common, candidate.read_rate or 1.0)
    if candidate.read_rate > 0 and host.bends_before(count, opens=opens, closes=closes):
        predicted = host.step_time(count, opens=opens, closes=closes)
        return candidate.read_rate * predicted / seconds
    nbytes = host.costs.step_time(count, 1.0, closes=closes)
    return nbytes / max(seconds - candidate.step_overhead, seconds / 2)


def is_significant(candidate: Candidate, seconds: float) -> bool:
    """Whether a decode step is long enough to reveal the read rate."""
    return seconds >= _MIN_OVERHEADS * candidate.step_overhead


@dataclass(slots=True)
class _MeasuredRate:
    """One peer's ``rate`` in bytes/s by its stage's profile.

    ``confirmed`` is its confirmed rate (0: none), perhaps of an earlier stage; ``is_slowed`` means
    that it is slower than that stage's profile, which may end.
    """

    profile: object
    rate: float
    confirmed: float = 0.0
    is_slowed: bool = False
    #: When it last reported as a serving peer.
    reported_at: float = 0.0
    #: The reported slowdown, and the time since which it has been constant.
    trial_slowdown: float = 0.0
    trial_since: float = 0.0


class ReadRates:
    """Read rates by live peer; reported values are trusted."""

    def __init__(self) -> None:
        self._measured: dict[str, _MeasuredRate] = {}
        #: Rates at the last placement.
        self._at_placement: dict[str, float] = {}
        #: Whether a rate has changed significantly since then.
        self.has_changed = False

    def record_profile(self, peer: str, profile: object, rate: float) -> None:
        """Record a loaded stage's rate (bytes/s) by its ``profile``.

        It doesn't replace a confirmed rate: it was measured only once.
        """
        known = self._measured.get(peer)
        if known is None:
            self._measured[peer] = _MeasuredRate(profile, rate)
        elif known.profile != profile:
            known.profile, known.rate, known.trial_slowdown = profile, rate, 0.0

    def record_slowdown(self, peer: str, slowdown: float, now: float) -> None:
        """Record that a stage's steps take ``slowdown`` times as long as its profile says.

        0 means that it serves, but has not measured a slowdown lately.
        """
        known = self._measured.get(peer)
        if known is None:
            return
        known.reported_at = now
        if not slowdown:
            return
        if differs(slowdown, known.trial_slowdown, _SLOWDOWN_TOLERANCE):
            known.trial_slowdown, known.trial_since = slowdown, now
        if now - known.trial_since >= SLOWDOWN_HOLD:
            known.confirmed = known.rate / known.trial_slowdown
            known.is_slowed = known.trial_slowdown > 1 + _SLOWDOWN_TOLERANCE
            self._compare_rate(peer)

    def drop_peer(self, peer: str) -> None:
        """Drop a peer that has left, since it may return on other hardware."""
        self._measured.pop(peer, None)
        self._at_placement.pop(peer, None)

    def expire_slowdowns(self, now: float) -> None:
        """Expire slowdowns that were last reported long ago."""
        for peer, known in self._measured.items():
            if known.is_slowed and now - known.reported_at > SLOWDOWN_TTL:
                known.confirmed, known.is_slowed, known.trial_slowdown = 0.0, False, 0.0
                self._compare_rate(peer)

    def apply_rates(self, candidates: Iterable[Candidate]) -> tuple[Candidate, ...]:
        """Replace the devices' stated read rates with measured ones.

        A stage reads more slowly than its device states, so unmeasured peers are scaled like
        measured ones; otherwise any newcomer would look faster. Devices of one kind count as fast
        as the fastest of them, since other load on a PC only makes it slower, except those whose
        confirmed rate is far lower.
        """
        candidates = _equalize_rates(candidates)
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
        confirmed = {peer for peer, one in self._measured.items() if one.confirmed}
        return _equalize_rates(rated, confirmed)

    def rate_of(self, peer: str) -> float | None:
        """Return the rate in bytes/s; ``None`` if not measured."""
        known = self._measured.get(peer)
        return None if known is None else known.confirmed or known.rate

    def mark_placed(self, candidates: Sequence[Candidate]) -> None:
        """Record the rates of these candidates as those of the last placement."""
        self._at_placement = {
            one.peer: self.rate_of(one.peer) or one.read_rate for one in candidates
        }
        self.has_changed = False

    def _compare_rate(self, peer: str) -> None:
        seen, rate = self._at_placement.get(peer), self.rate_of(peer)
        if seen is not None and rate is not None:
            self.has_changed |= differs(rate, seen, _RELATIVE_CHANGE)


def _equalize_rates(
    candidates: Iterable[Candidate], confirmed: Collection[str] = ()
) -> tuple[Candidate, ...]:
    """Raise devices of one kind to the fastest of them.

    Peers in ``confirmed`` that are much slower keep their rates.
    """
    candidates = tuple(candidates)
    best: dict[tuple[str, bool], float] = {}
    for one in candidates:
        if one.device and one.read_rate > 0:
            kind = one.device, one.cuda
            best[kind] = max(one.read_rate, best.get(kind, 0.0))
    return tuple(
        one
        if (fastest := best.get((one.device, one.cuda), 0.0)) <= one.read_rate
        or (one.peer in confirmed and one.read_rate * _MAX_RATIO < fastest)
        else replace(one, read_rate=fastest)
        for one in candidates
    )
