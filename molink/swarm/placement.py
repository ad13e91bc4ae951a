"""Decides which peer runs which layers.

Every decode step reads all weights once, so a stage's time is its bytes over the peer's measured
read rate. With several streams the ring yields one token per stream and turn of its *slowest*
stage: that time is minimized first, the sum over the stages (a lone stream's latency) second.

Every ``auto`` peer takes part, up to the number of layers and :data:`MAX_STAGES`: whoever started
a daemon offered the PC's memory, and room for KV is worth more than the hop that it saves. A peer
without room for one layer is a spare; further ones become spares, smallest first, only where no
split has all of them.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from molink.swarm.partition import Costs, Gap, Runner, Split, share_out
from molink.wire.base import DTYPE_SIZES
from molink.wire.control import LayerRange, ModelFacts

#: Bound of the ring in :class:`molink.wire.control.Form`.
MAX_STAGES = 16
#: Part of a peer's memory that placement leaves for activations and buffers.
MARGIN = 0.1
#: Bytes/s that are assumed where no peer has measured its own.
ASSUMED_RATE = 10e9
#: Bytes of a weight where bf16 can't be computed with.
_WIDE = DTYPE_SIZES["f32"]
_WIDER = " (a CPU without bf16 computes in f32: its memory counts for less)"


@dataclass(frozen=True, slots=True)
class Candidate:
    """A peer that could take a stage. ``stage`` is ``auto``, ``none`` or ``A:B``.

    ``memory`` in bytes, ``read_rate`` in bytes/s (0 = not measured). Without ``bf16`` the dtype
    ``auto`` takes four bytes per weight there.
    """

    peer: str
    name: str
    memory: int
    read_rate: float
    stage: str = "auto"
    bf16: bool = True


@dataclass(frozen=True, slots=True)
class Placed:
    """One stage: ``layers`` is half-open, ``seconds`` the predicted time of a decode step."""

    peer: str
    layers: LayerRange
    seconds: float


@dataclass(frozen=True, slots=True)
class Placement:
    """Stages in ring order; ``spares`` are auto peers that got no layers."""

    stages: tuple[Placed, ...]
    spares: tuple[str, ...] = ()

    @property
    def slowest(self) -> float:
        """Predicted time of the slowest stage, in seconds."""
        return max(stage.seconds for stage in self.stages)

    @property
    def total(self) -> float:
        """Predicted time of all stages one after the other, in seconds."""
        return sum(stage.seconds for stage in self.stages)


@dataclass(frozen=True, slots=True)
class Unplaceable:
    """No placement: ``reason`` is for a person, with the numbers."""

    reason: str


class _NoPlacement(Exception):
    """Carries the reason out of the steps of :func:`place`."""


def place(
    facts: ModelFacts, candidates: Sequence[Candidate], dtype: str = "auto"
) -> Placement | Unplaceable:
    """Place a model over ``candidates``, which are in the order in which they joined."""
    try:
        return _Placer(facts, candidates, dtype).place()
    except _NoPlacement as reason:
        return Unplaceable(str(reason))


def parse_range(stage: str) -> LayerRange | None:
    """The half-open range of ``A:B``; ``None`` for ``auto``, ``none`` and what is no range."""
    first, colon, last = stage.partition(":")
    if not (colon and first.isascii() and first.isdigit() and last.isascii() and last.isdigit()):
        return None
    return int(first), int(last)


class _Placer:
    """One call of :func:`place`."""

    def __init__(self, facts: ModelFacts, candidates: Sequence[Candidate], dtype: str) -> None:
        self.facts = facts
        self.costs = Costs.of(facts, dtype)
        self.widens = dtype == "auto" and facts.element_bytes < _WIDE
        used = [c for c in candidates if c.stage != "none"]
        self.hint = _WIDER if self.widens and not all(c.bf16 for c in used) else ""
        known = [c.read_rate for c in candidates if c.stage != "none" and c.read_rate > 0]
        self.default_rate = median(known) if known else ASSUMED_RATE
        self.autos = [self.runner(c) for c in candidates if c.stage == "auto"]
        self.fixed = sorted(
            ((layers, c) for c in candidates if (layers := parse_range(c.stage)) is not None),
            key=lambda pair: pair[0],
        )

    def runner(self, candidate: Candidate) -> Runner:
        """What a peer has, in bytes as the model is stored: where those widen it has room for less.

        A rate is scaled alike: so many stored bytes are read per second.
        """
        part = self.facts.element_bytes / _WIDE if self.widens and not candidate.bf16 else 1.0
        rate = candidate.read_rate if candidate.read_rate > 0 else self.default_rate
        return Runner(candidate.peer, int(candidate.memory * (1 - MARGIN) * part), rate * part)

    def place(self) -> Placement:
        if not self.autos and not self.fixed:
            raise _NoPlacement("no peer offers to run layers")
        explicit = [self.explicit(layers, c) for layers, c in self.fixed]
        gaps = self.gaps()
        floor = max((stage.seconds for stage in explicit), default=0.0)
        splits = self.fill(gaps, floor) if gaps else []
        stages = [*explicit]
        for gap, found in zip(gaps, splits, strict=True):
            stages.extend(self.stages_of(gap, found))
        stages.sort(key=lambda stage: stage.layers)
        used = {stage.peer for stage in stages}
        spares = tuple(runner.peer for runner in self.autos if runner.peer not in used)
        return Placement(tuple(stages), spares)

    def explicit(self, layers: LayerRange, candidate: Candidate) -> Placed:
        """The stage of a peer that named its own layers."""
        first, last = layers
        named = f"{candidate.name} (--stage {first}:{last})"
        if not 0 <= first < last <= self.facts.layers:
            raise _NoPlacement(
                f"{named} names layers that {self.facts.name} doesn't have: it has "
                f"{self.facts.layers}"
            )
        opens, closes = first == 0, last == self.facts.layers
        runner = self.runner(candidate)
        needs = self.costs.memory(last - first, opens=opens, closes=closes)
        if needs > runner.memory:
            raise _NoPlacement(
                f"{named} needs {size(needs)} for its layers, but has {size(runner.memory)}"
                f"{self.hint}"
            )
        seconds = self.costs.seconds(last - first, runner.rate, closes=closes)
        return Placed(candidate.peer, layers, seconds)

    def gaps(self) -> list[Gap]:
        """Ranges between the explicit ones."""
        if len(self.fixed) > MAX_STAGES:
            raise _NoPlacement(f"{len(self.fixed)} peers named layers; a ring has {MAX_STAGES}")
        gaps: list[Gap] = []
        at, before = 0, ""
        layers = self.facts.layers
        for (first, last), candidate in self.fixed:
            if first < at:
                raise _NoPlacement(
                    f"the layers of {before} and of {candidate.name} (--stage {first}:{last}) "
                    "overlap; give one of them others, or auto"
                )
            if first > at:
                gaps.append(Gap(at, first, at == 0, closes=False))
            at, before = last, f"{candidate.name} (--stage {first}:{last})"
        if at < layers:
            gaps.append(Gap(at, layers, at == 0, closes=True))
        return gaps

    def fill(self, gaps: Sequence[Gap], floor: float) -> list[Split]:
        """Splits of the gaps over as many auto peers as possible."""
        if len(self.autos) < len(gaps):
            missing = ", ".join(f"{gap.first}:{gap.last}" for gap in gaps)
            raise _NoPlacement(
                f"no peer runs layers {missing}: {len(self.autos)} peers with --stage auto are "
                f"there, {len(gaps)} are needed"
            )
        for runners in self.selections(gaps):
            best = share_out(gaps, runners, self.costs, floor)
            if best is not None:
                return best
        raise _NoPlacement(self.shortage(gaps))

    def selections(self, gaps: Sequence[Gap]) -> Iterable[list[Runner]]:
        """Sets of auto peers to try, largest first; each in the order of joining."""
        able = [
            runner
            for runner in self.autos
            if self.costs.capacity(runner.memory, opens=False, closes=False) >= 1
        ]
        room = min(sum(gap.layers for gap in gaps), MAX_STAGES - len(self.fixed))
        if len(able) > room:
            quickest = sorted(able, key=lambda runner: -runner.rate)[:room]
            yield [runner for runner in able if runner in quickest]
        largest = sorted(able, key=lambda runner: -runner.memory)
        for count in range(min(room, len(able)), len(gaps) - 1, -1):
            yield [runner for runner in able if runner in largest[:count]]

    def stages_of(self, gap: Gap, found: Split) -> Iterable[Placed]:
        at = gap.first
        for runner, count in found.shares:
            closes = at + count == self.facts.layers
            seconds = self.costs.seconds(count, runner.rate, closes=closes)
            yield Placed(runner.peer, (at, at + count), seconds)
            at += count

    def shortage(self, gaps: Sequence[Gap]) -> str:
        """Why memory isn't enough, with the numbers."""
        needs = sum(
            self.costs.memory(gap.layers, opens=gap.opens, closes=gap.closes) for gap in gaps
        )
        offers = sum(runner.memory for runner in self.autos)
        peers = "1 peer" if len(self.autos) == 1 else f"{len(self.autos)} peers"
        what = self.facts.name if not self.fixed else f"the rest of {self.facts.name}"
        if needs > offers:
            return (
                f"{what} needs {size(needs)}, the swarm offers {size(offers)} on {peers}; add a "
                f"peer, give more memory or serve a smaller model{self.hint}"
            )
        layer = self.costs.memory(1, opens=False, closes=False)
        return (
            f"{what} needs {size(needs)} and the swarm offers {size(offers)} on {peers}, but no "
            f"split fits: a layer takes {size(layer)}, the first stage {size(self.costs.first)} "
            f"and the last one {size(self.costs.last)} more{self.hint}"
        )


def size(count: int) -> str:
    """Bytes for a person: ``14.2 GB``."""
    for unit, factor in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= factor:
            return f"{count / factor:.1f} {unit}"
    return f"{count} bytes"
