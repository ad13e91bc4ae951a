"""How many layers each peer takes of one unbroken range: exact, for peers in any order.

All layers weigh the same, so the order of the peers matters only at the model's ends: the first
stage also holds the embedding, the last one the output head, which it reads at every step too.
"""

import heapq
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from molink.facts.footprint import Footprint

#: Ways to spread peers over gaps that are tried one by one: the control plane waits meanwhile.
MAX_SPREADS = 256


@dataclass(frozen=True, slots=True)
class StageCosts:
    """Bytes that a model takes on a peer: a stage's needs as a line over its layers."""

    #: Weights of a layer, and what it needs beside: the least KV, CUDA graphs.
    layer_weights: int
    layer_room: int
    #: What the first and the last stage hold beside, a draft model too, and what they share.
    first: int
    last: int
    shared: int = 0
    #: What any stage needs for a step, and what the last one does for logits.
    stage: int = 0
    logits: int = 0

    @classmethod
    def of(cls, need: Footprint, tokens: int = 0, draft: int = 0) -> "StageCosts":
        """Those that :meth:`~molink.facts.footprint.Footprint.needs` sums up.

        With room for the KV of ``tokens`` tokens, if that is more than any stage must have, and
        ``draft`` bytes of a draft model beside the first stage.
        """
        tokens = max(tokens, need.min_tokens)
        return cls(
            layer_weights=need.layer,
            layer_room=need.layer_graphs + tokens * need.token,
            first=need.first + draft,
            last=need.last,
            shared=need.shared,
            stage=need.activations(tokens, closes=False) + need.graphs,
            logits=need.logits,
        )

    def memory(self, layers: int, *, opens: bool, closes: bool) -> int:
        """Bytes that a stage of ``layers`` layers needs at least."""
        ends = self.first * opens + (self.last + self.logits) * closes
        shared = self.shared * (opens and closes)
        return layers * (self.layer_weights + self.layer_room) + ends - shared + self.stage

    def seconds(self, layers: int, rate: float, *, closes: bool) -> float:
        """Time of a decode step: each weight is read once. An embedding row costs nothing."""
        return (layers * self.layer_weights + self.last * closes) / rate

    def capacity(self, memory: int, *, opens: bool, closes: bool) -> int:
        """Most layers that fit ``memory`` bytes; negative if not even the ends do."""
        free = memory - self.memory(0, opens=opens, closes=closes)
        layer = self.layer_weights + self.layer_room
        return free // layer if layer else (1 << 30 if free >= 0 else -1)


@dataclass(frozen=True, slots=True)
class Runner:
    """A peer that can take any layers: usable bytes, and bytes/s at which it reads weights.

    ``costs`` are the model's there: in its dtype, with what its kind of device needs. ``step`` is
    what each step takes beside reading weights, in seconds.
    """

    peer: str
    memory: int
    rate: float
    costs: StageCosts
    step: float = 0.0

    def capacity(self, *, opens: bool = False, closes: bool = False) -> int:
        """Most layers that it can hold."""
        return self.costs.capacity(self.memory, opens=opens, closes=closes)

    def seconds(self, layers: int, *, closes: bool = False) -> float:
        """Time of a decode step of ``layers`` layers."""
        return self.step + self.costs.seconds(layers, self.rate, closes=closes)

    def line(self, *, opens: bool, closes: bool) -> "Line":
        """Its stage at that place in the ring."""
        fixed = self.seconds(0, closes=closes)
        cap = self.capacity(opens=opens, closes=closes)
        return Line(cap, fixed, self.costs.layer_weights / self.rate)


@dataclass(frozen=True, slots=True)
class Gap:
    """Layers ``first:last`` to be shared out among peers."""

    first: int
    last: int
    opens: bool
    closes: bool

    @property
    def layers(self) -> int:
        """How many."""
        return self.last - self.first


@dataclass(frozen=True, slots=True)
class Split:
    """Peers in ring order with their number of layers.

    ``slowest`` is the longest stage time, or the floor that was given; ``total`` is the sum.
    """

    slowest: float
    total: float
    shares: tuple[tuple[Runner, int], ...]


def share_out(
    gaps: Sequence[Gap], runners: Sequence[Runner], floor: float = 0.0
) -> list[Split] | None:
    """Spread *all* ``runners`` over ``gaps`` and split each: the best of all ways to do so.

    With more than :data:`MAX_SPREADS` ways, one of them: gaps are filled greedily.
    """
    best: tuple[float, float] | None = None
    result: list[Split] | None = None
    for choice in _spreads(gaps, runners):
        groups = [
            [runner for runner, at in zip(runners, choice, strict=True) if at == i]
            for i in range(len(gaps))
        ]
        splits = _split_all(gaps, groups, floor)
        if splits is None:
            continue
        cost = (splits[0].slowest, sum(found.total for found in splits))
        if best is None or cost < best:
            best, result = cost, splits
    return result


def _spreads(gaps: Sequence[Gap], runners: Sequence[Runner]) -> Iterator[tuple[int, ...]]:
    """Ways to spread: the gap of each runner."""
    if len(gaps) ** len(runners) <= MAX_SPREADS:
        yield from itertools.product(range(len(gaps)), repeat=len(runners))
    else:
        yield _greedy(gaps, runners)


def _greedy(gaps: Sequence[Gap], runners: Sequence[Runner]) -> tuple[int, ...]:
    """The largest runner to the gap that lacks most, again and again."""
    lacking = [gap.layers for gap in gaps]
    slots = [gap.layers for gap in gaps]
    choice = [0] * len(runners)
    for i in sorted(range(len(runners)), key=lambda i: (-runners[i].capacity(), i)):
        at = max((g for g in range(len(gaps)) if slots[g]), key=lambda g: lacking[g])
        choice[i] = at
        slots[at] -= 1
        lacking[at] -= runners[i].capacity()
    return tuple(choice)


def _split_all(
    gaps: Sequence[Gap], groups: Sequence[Sequence[Runner]], floor: float
) -> list[Split] | None:
    """Split each gap; the slowest stage of all is then the floor of each."""
    if not all(0 < len(group) <= gap.layers for gap, group in zip(gaps, groups, strict=True)):
        return None
    splits: list[Split] = []
    for _ in range(2):
        found = [split(gap, group, floor) for gap, group in zip(gaps, groups, strict=True)]
        splits = [one for one in found if one is not None]
        if len(splits) < len(gaps):
            return None
        floor = max(one.slowest for one in splits)
    return splits


def split(gap: Gap, runners: Sequence[Runner], floor: float = 0.0) -> Split | None:
    """Share ``gap`` out among *all* ``runners``: least slowest stage, then least total time.

    A slowest stage below ``floor`` seconds is worth nothing: another stage takes that long anyway.
    ``None`` if memory isn't enough. Ties go to the order of ``runners``.
    """
    best: Split | None = None
    for order in _orders(gap, runners):
        found = _share(gap, order, floor)
        if found is None:
            continue
        if best is None or (found.slowest, found.total) < (best.slowest, best.total):
            best = found
    return best


def _orders(gap: Gap, runners: Sequence[Runner]) -> Iterator[list[Runner]]:
    """The orders that differ: who opens and who closes the model."""
    count = len(runners)
    openers = range(count) if gap.opens else (None,)
    closers = range(count - 1, -1, -1) if gap.closes else (None,)
    for opener in openers:
        for closer in closers:
            if opener is not None and opener == closer and count > 1:
                continue
            middle = [r for i, r in enumerate(runners) if i not in (opener, closer)]
            begin = [] if opener is None else [runners[opener]]
            end = [] if closer is None or closer == opener else [runners[closer]]
            yield [*begin, *middle, *end]


def _share(gap: Gap, order: Sequence[Runner], floor: float) -> Split | None:
    tail = len(order) - 1
    stages = [
        runner.line(opens=gap.opens and i == 0, closes=gap.closes and i == tail)
        for i, runner in enumerate(order)
    ]
    caps = [stage.cap for stage in stages]
    if min(caps) < 1 or sum(caps) < gap.layers or len(order) > gap.layers:
        return None
    slowest = max(floor, min_slowest(gap.layers, stages))
    counts = cheapest(gap.layers, stages, slowest)
    total = sum(stage.seconds(count) for stage, count in zip(stages, counts, strict=True))
    return Split(slowest, total, tuple(zip(order, counts, strict=True)))


@dataclass(frozen=True, slots=True)
class Line:
    """A stage's time as a function of its layers, up to ``cap`` of them."""

    cap: int
    fixed: float
    each: float

    def seconds(self, layers: int) -> float:
        return self.fixed + layers * self.each

    def max_within(self, seconds: float) -> int:
        """Most layers in at most ``seconds`` (exactly as :meth:`seconds` computes them)."""
        if self.each == 0 or self.seconds(self.cap) <= seconds:
            return self.cap
        count = int((seconds - self.fixed) / self.each) + 1
        while self.seconds(count) > seconds:
            count -= 1
        return min(self.cap, count)


def min_slowest(layers: int, stages: Sequence[Line]) -> float:
    """Hand out layers one by one to whoever is done soonest with it: no split is better."""
    counts = [1] * len(stages)
    heap = [(stage.seconds(2), i) for i, stage in enumerate(stages) if stage.cap > 1]
    heapq.heapify(heap)
    slowest = max(stage.seconds(1) for stage in stages)
    for _ in range(layers - len(stages)):
        seconds, i = heapq.heappop(heap)
        slowest = max(slowest, seconds)
        counts[i] += 1
        if counts[i] < stages[i].cap:
            heapq.heappush(heap, (stages[i].seconds(counts[i] + 1), i))
    return slowest


def cheapest(layers: int, stages: Sequence[Line], slowest: float) -> list[int]:
    """At least one layer for each, the others to the quickest, none over ``slowest`` seconds."""
    counts = [1] * len(stages)
    left = layers - len(stages)
    for i in sorted(range(len(stages)), key=lambda i: (stages[i].each, i)):
        more = min(left, stages[i].max_within(slowest) - 1)
        counts[i] += more
        left -= more
    return counts
