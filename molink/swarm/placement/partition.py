"""Splits one contiguous range of layers over hosts: exact, for hosts in any order.

All layers cost the same, so order matters only at the model's ends: the first stage also holds the
embedding, and the last one the output head, which it also reads at every step.
"""

import heapq
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import ceil, floor, inf

from molink.facts.footprint import Footprint, MovableExperts

#: Maximum assignments of hosts to gaps tried exhaustively, since the control plane waits meanwhile.
MAX_ASSIGNMENTS = 256


@dataclass(frozen=True, slots=True)
class StageCosts:
    """A stage's memory as a linear function of its layers, in bytes."""

    #: Bytes of a layer's weights, and of its minimum KV and CUDA graphs.
    layer_weights: int
    layer_room: int
    #: Extra bytes of the first stage (including a draft model) and of the last one, and bytes that
    #: both share.
    first: int
    last: int
    shared: int = 0
    #: Activations of any stage, and logits of the last one.
    stage: int = 0
    logits: int = 0
    #: Bytes of a layer's weights that a step doesn't read, of experts that no row chooses.
    unread: int = 0
    #: Experts that may lie in host memory, the number of layers with experts, and the share of
    #: experts that is read.
    experts: MovableExperts | None = None
    layers: int = 0
    read_share: float = 1.0
    #: Minimum layers of the first stage.
    first_layers: int = 1

    @classmethod
    def from_footprint(
        cls, need: Footprint, tokens: int = 0, draft: int = 0, rows: int = 1
    ) -> "StageCosts":
        """Create the costs that :meth:`~molink.facts.footprint.Footprint.min_bytes` sums.

        They include KV for ``tokens`` tokens, if above the minimum, and ``draft`` bytes of a draft
        model besides the first stage. A decode step has ``rows`` rows.
        """
        share = 1.0 if need.experts is None else need.experts.read_share(rows)
        experts = 0 if need.experts is None else need.experts.layer_bytes
        tokens = max(tokens, need.min_tokens)
        pool, excess = need.average_pool_bytes(tokens)
        return cls(
            layer_weights=need.layer_bytes,
            layer_room=need.layer_graph_bytes + pool,
            first=need.first_bytes + draft,
            last=need.last_bytes,
            shared=need.shared_bytes,
            stage=need.activation_bytes(tokens, closes=False) + need.graph_bytes + excess,
            logits=need.logits_bytes,
            unread=int(experts * (1 - share)),
            experts=need.experts,
            layers=need.layers,
            read_share=share,
            first_layers=need.first_layers,
        )

    def memory_needed(self, layers: int, *, opens: bool, closes: bool) -> int:
        """Return the minimum bytes of a stage of ``layers`` layers."""
        ends = self.first * opens + (self.last + self.logits) * closes
        shared = self.shared * (opens and closes)
        return layers * (self.layer_weights + self.layer_room) + ends - shared + self.stage

    def step_time(self, layers: int, rate: float, *, closes: bool) -> float:
        """Return the seconds of a decode step, which reads each weight and each chosen expert once.

        Embedding rows cost nothing.
        """
        return (layers * (self.layer_weights - self.unread) + self.last * closes) / rate

    def max_layers(self, memory: int, *, opens: bool, closes: bool) -> int:
        """Return the maximum layers that fit ``memory`` bytes; negative if the ends do not fit."""
        free = memory - self.memory_needed(0, opens=opens, closes=closes)
        layer = self.layer_weights + self.layer_room
        return free // layer if layer else (1 << 30 if free >= 0 else -1)


@dataclass(frozen=True, slots=True)
class StageHost:
    """A peer that can hold any layers: usable bytes, and bytes/s at which it reads weights.

    ``costs`` are the model's on its kind of device. ``step_overhead`` is the time of a step besides
    reading weights, in seconds. Experts that don't fit may take ``host_memory`` bytes, which the
    CPU reads at ``host_rate`` bytes/s.
    """

    peer: str
    memory: int
    rate: float
    costs: StageCosts
    step_overhead: float = 0.0
    host_memory: int = 0
    host_rate: float = 0.0

    def max_layers(self, *, opens: bool = False, closes: bool = False) -> int:
        """Return the maximum layers that the host can hold."""
        count = self.costs.max_layers(self.memory, opens=opens, closes=closes)
        experts = self._movable_experts
        if experts is None:
            return count
        count = max(0, count)
        while count < self.costs.layers:
            more = count + 1
            lacking = self.costs.memory_needed(more, opens=opens, closes=closes) - self.memory
            dense = min(more, len(experts.dense_layers))
            if experts.count_moved(lacking, more, self.host_memory, dense) is None:
                break
            count = more
        return count

    def step_time(self, layers: int, *, opens: bool = False, closes: bool = False) -> float:
        """Return the seconds of a decode step of ``layers`` layers."""
        seconds = self.step_overhead + self.costs.step_time(layers, self.rate, closes=closes)
        bend, steeper = self._find_bend(opens=opens, closes=closes)
        return seconds + max(0.0, layers - bend) * steeper if layers else seconds

    def bends_before(self, layers: int, *, opens: bool, closes: bool) -> bool:
        """Whether some experts of ``layers`` layers lie in host memory."""
        return self._find_bend(opens=opens, closes=closes)[0] < layers

    def linear_time(self, *, opens: bool, closes: bool) -> "LinearTime":
        """Return the step time as a function of the layers, for a position in the ring."""
        fixed = self.step_time(0, closes=closes)
        cap = self.max_layers(opens=opens, closes=closes)
        per_layer = (self.costs.layer_weights - self.costs.unread) / self.rate
        bend = self._find_bend(opens=opens, closes=closes)
        return LinearTime(cap, fixed, per_layer, *bend, self.costs.first_layers if opens else 1)

    @property
    def _movable_experts(self) -> MovableExperts | None:
        return self.costs.experts if self.host_memory > 0 and self.host_rate > 0 else None

    def _find_bend(self, *, opens: bool, closes: bool) -> tuple[float, float]:
        """Find the number of layers from which a further layer takes longer, and by how many
        seconds.

        A layer that doesn't fit moves as many bytes of experts, its own or other layers', to the
        slower memory. Computation by the device meanwhile isn't deducted.
        """
        experts = self._movable_experts
        layer = self.costs.layer_weights + self.costs.layer_room
        if experts is None or not experts.device_bytes or not layer:
            return inf, 0.0
        free = self.memory - self.costs.memory_needed(0, opens=opens, closes=closes)
        slower = experts.host_bytes / self.host_rate - experts.device_bytes / self.rate
        moved = layer / experts.device_bytes
        return free / layer, max(0.0, moved * slower * self.costs.read_share)


@dataclass(frozen=True, slots=True)
class Gap:
    """Layers ``first:last`` to split."""

    first: int
    last: int
    opens: bool
    closes: bool

    @property
    def layers(self) -> int:
        """Number of layers."""
        return self.last - self.first


@dataclass(frozen=True, slots=True)
class Split:
    """Hosts in ring order with their number of layers.

    ``slowest_time`` is the longest stage time, or the given floor; ``total_time`` is the sum.
    """

    slowest_time: float
    total_time: float
    shares: tuple[tuple[StageHost, int], ...]


def split_gaps(
    gaps: Sequence[Gap], hosts: Sequence[StageHost], floor: float = 0.0
) -> list[Split] | None:
    """Assign *all* ``hosts`` to ``gaps`` and split each gap; return the best of all assignments.

    ``floor`` (seconds) is as in :func:`split_gap`. With more than :data:`MAX_ASSIGNMENTS`, only a
    greedy assignment is tried.
    """
    best: tuple[float, float] | None = None
    result: list[Split] | None = None
    for choice in _assignments(gaps, hosts):
        groups = [
            [host for host, at in zip(hosts, choice, strict=True) if at == i]
            for i in range(len(gaps))
        ]
        splits = _split_all(gaps, groups, floor)
        if splits is None:
            continue
        cost = (splits[0].slowest_time, sum(found.total_time for found in splits))
        if best is None or cost < best:
            best, result = cost, splits
    return result


def _assignments(gaps: Sequence[Gap], hosts: Sequence[StageHost]) -> Iterator[tuple[int, ...]]:
    """Yield the assignments to try: the gap of each host."""
    if len(gaps) ** len(hosts) <= MAX_ASSIGNMENTS:
        yield from itertools.product(range(len(gaps)), repeat=len(hosts))
    else:
        yield _assign_greedily(gaps, hosts)


def _assign_greedily(gaps: Sequence[Gap], hosts: Sequence[StageHost]) -> tuple[int, ...]:
    """Repeatedly assign the largest host to the gap that lacks most."""
    lacking = [gap.layers for gap in gaps]
    slots = [gap.layers for gap in gaps]
    choice = [0] * len(hosts)
    for i in sorted(range(len(hosts)), key=lambda i: (-hosts[i].max_layers(), i)):
        at = max((g for g in range(len(gaps)) if slots[g]), key=lambda g: lacking[g])
        choice[i] = at
        slots[at] -= 1
        lacking[at] -= hosts[i].max_layers()
    return tuple(choice)


def _split_all(
    gaps: Sequence[Gap], groups: Sequence[Sequence[StageHost]], floor: float
) -> list[Split] | None:
    """Split each gap; the slowest stage of all then is the floor of each."""
    if not all(0 < len(group) <= gap.layers for gap, group in zip(gaps, groups, strict=True)):
        return None
    splits: list[Split] = []
    for _ in range(2):
        found = [split_gap(gap, group, floor) for gap, group in zip(gaps, groups, strict=True)]
        splits = [one for one in found if one is not None]
        if len(splits) < len(gaps):
            return None
        floor = max(one.slowest_time for one in splits)
    return splits


def split_gap(gap: Gap, hosts: Sequence[StageHost], floor: float = 0.0) -> Split | None:
    """Split ``gap`` among *all* ``hosts``: minimize the slowest stage, then the total time.

    A slowest stage below ``floor`` seconds gains nothing, since another stage takes that long
    anyway. ``None`` if memory is not enough. Ties are resolved by the order of ``hosts``.
    """
    best: Split | None = None
    for order in _orders(gap, hosts):
        found = _split_in_order(gap, order, floor)
        if found is None:
            continue
        if best is None or (found.slowest_time, found.total_time) < (
            best.slowest_time,
            best.total_time,
        ):
            best = found
    return best


def _orders(gap: Gap, hosts: Sequence[StageHost]) -> Iterator[list[StageHost]]:
    """Yield the distinct orders, given by the hosts that open and close the model."""
    count = len(hosts)
    openers = range(count) if gap.opens else (None,)
    closers = range(count - 1, -1, -1) if gap.closes else (None,)
    for opener in openers:
        for closer in closers:
            if opener is not None and opener == closer and count > 1:
                continue
            middle = [r for i, r in enumerate(hosts) if i not in (opener, closer)]
            start = [] if opener is None else [hosts[opener]]
            end = [] if closer is None or closer == opener else [hosts[closer]]
            yield [*start, *middle, *end]


def _split_in_order(gap: Gap, order: Sequence[StageHost], floor: float) -> Split | None:
    last = len(order) - 1
    stages = [
        host.linear_time(opens=gap.opens and i == 0, closes=gap.closes and i == last)
        for i, host in enumerate(order)
    ]
    if any(stage.max_layers < stage.min_layers for stage in stages):
        return None
    least, most = sum(one.min_layers for one in stages), sum(one.max_layers for one in stages)
    if not least <= gap.layers <= most:
        return None
    slowest = max(floor, min_slowest_time(gap.layers, stages))
    counts = split_layers(gap.layers, stages, slowest)
    assert counts is not None
    total = sum(stage.time_of(count) for stage, count in zip(stages, counts, strict=True))
    return Split(slowest, total, tuple(zip(order, counts, strict=True)))


@dataclass(frozen=True, slots=True)
class LinearTime:
    """A stage's time as a linear function of its layers, from ``min_layers`` to ``max_layers``.

    From ``bend`` layers on, each layer takes ``steeper`` seconds more than ``per_layer``.
    """

    max_layers: int
    fixed: float
    per_layer: float
    bend: float = inf
    steeper: float = 0.0
    min_layers: int = 1

    def time_of(self, layers: int) -> float:
        """Return the seconds of ``layers`` layers, at least one."""
        seconds = self.fixed + layers * self.per_layer
        return seconds if layers <= self.bend else seconds + (layers - self.bend) * self.steeper

    def layer_s(self, layers: int) -> float:
        """Return the seconds of the last of ``layers`` layers."""
        if layers <= self.bend:
            return self.per_layer
        return self.per_layer + min(1.0, layers - self.bend) * self.steeper

    def pieces(self) -> tuple[tuple[float, int], ...]:
        """Yield the seconds of a further layer and the number of layers up to which they apply."""
        if self.bend >= self.max_layers:
            return ((self.per_layer, self.max_layers),)
        flat = max(0, floor(self.bend))
        steep = self.per_layer + self.steeper, self.max_layers
        return ((self.per_layer, flat), steep) if flat else (steep,)

    def max_within(self, seconds: float) -> int:
        """Return the maximum layers within ``seconds``, computed exactly as in :meth:`time_of`."""
        if self.time_of(self.max_layers) <= seconds:
            return self.max_layers
        if self.time_of(1) > seconds:
            return 0
        count = self.max_layers
        if self.per_layer:
            count = min(count, int((seconds - self.fixed) / self.per_layer) + 1)
        if self.bend < count and self.steeper:
            slope = self.per_layer + self.steeper
            beyond = (seconds - self.fixed - self.per_layer * self.bend) / slope
            count = min(count, max(ceil(self.bend), int(self.bend + beyond) + 1))
        while self.time_of(count) > seconds:
            count -= 1
        return min(self.max_layers, count)


def min_slowest_time(layers: int, stages: Sequence[LinearTime]) -> float:
    """Return the slowest stage's time in the best split.

    Each layer goes to the stage that finishes it first.
    """
    counts = [stage.min_layers for stage in stages]
    heap = [
        (stage.time_of(stage.min_layers + 1), i)
        for i, stage in enumerate(stages)
        if stage.max_layers > stage.min_layers
    ]
    heapq.heapify(heap)
    slowest = max(stage.time_of(stage.min_layers) for stage in stages)
    for _ in range(layers - sum(counts)):
        seconds, i = heapq.heappop(heap)
        slowest = max(slowest, seconds)
        counts[i] += 1
        if counts[i] < stages[i].max_layers:
            heapq.heappush(heap, (stages[i].time_of(counts[i] + 1), i))
    return slowest


def split_layers(
    layers: int, stages: Sequence[LinearTime], ceiling: float = inf
) -> list[int] | None:
    """Return each stage's layers for the minimum total time, with no stage over ``ceiling``
    seconds.
    """
    counts = [stage.min_layers for stage in stages]
    left = layers - sum(counts)
    most = [stage.max_within(ceiling) for stage in stages]
    if left < 0 or any(upto < count for upto, count in zip(most, counts, strict=True)):
        return None
    for _, i, upto in order_pieces(enumerate(stages)):
        more = min(left, max(0, min(most[i], upto) - counts[i]))
        counts[i] += more
        left -= more
    return counts if left == 0 else None


def order_pieces(stages: Iterable[tuple[int, LinearTime]]) -> list[tuple[float, int, int]]:
    """Sort the pieces of numbered stages' times, fastest first: seconds, number, last layer."""
    return sorted((slope, i, upto) for i, stage in stages for slope, upto in stage.pieces())
