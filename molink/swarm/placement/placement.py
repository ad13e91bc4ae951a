"""Decides which peer runs which layers.

Every decode step reads all weights once, so a stage's time is its bytes over the peer's measured
read rate, and a fixed time for each step. :mod:`molink.swarm.placement.ring_search` finds the
peers, their order and their layers for the objective: a stage more costs a hop. Two things count
before that:

- A ring has :attr:`PlacementGoal.stages` stages, or as many as there can be.
- It has room for KV (:mod:`molink.swarm.kv_room`): memory is worth a hop where that would be short.

What serves stays unless another ring is better by :data:`MIN_GAIN`, or it has no room for a
conversation and another one has.

Where peers name their layers, who is in the ring is decided by hand: every ``auto`` peer takes part
in what is left, for the least slowest stage, whatever the links are.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Literal

from molink.facts.dtypes import DTYPE_SIZES
from molink.facts.footprint import Footprint, StageSetup
from molink.facts.memory_plan import explain_refusal, format_size, smaller_modes, usable_bytes
from molink.facts.model import LayerRange, ModelFacts, Objective, Quantize
from molink.facts.narrow_weights import NarrowDType
from molink.facts.ring_times import HANDLING_S, TOKEN_BYTES
from molink.swarm.kv_room import CONVERSATION_TOKENS, is_room_worth, kv_room_steps
from molink.swarm.placement.links import Links
from molink.swarm.placement.partition import Gap, Split, StageCosts, StageHost, split_gaps
from molink.swarm.placement.ring_search import search_ring
from molink.swarm.placement.rings import Hops, HopTimes, RatedRing, RingTask, rate_ring

#: Bound of the ring in :class:`molink.wire.messages.instructions.FormPipeline`.
MAX_STAGES = 16
#: Bytes/s that are assumed where no peer has measured its own: what one core reads. All have the
#: same then, so it decides nothing but the time that is shown.
ASSUMED_RATE = 10e9
#: Seconds that a step takes beside reading weights, where nothing better is known.
STEP_OVERHEAD_S = 0.0005
#: What serves is left for a ring that costs less by this part, and by so many seconds.
MIN_GAIN = 0.1
MIN_GAIN_S = 0.001
#: Rows of the micro-batch that is reckoned with.
MICRO_BATCH_ROWS: dict[Objective, int] = {"latency": 1, "throughput": 16}
#: Bytes of a weight where bf16 can't be computed with.
_F32_BYTES = DTYPE_SIZES["f32"]
_BF16_HINT = " (a CPU without bf16 computes in f32: its memory counts for less)"


@dataclass(frozen=True, slots=True)
class Candidate:
    """A peer that could take a stage. ``stage`` is ``auto``, ``none`` or ``A:B``.

    ``memory`` in bytes, ``read_rate`` in bytes/s (0 = not measured). A CPU without ``bf16`` takes
    four bytes per weight with the dtype ``auto``, but for those that stay ``narrow``; one with
    ``blocks`` multiplies by those of a GGUF file. ``unreachable`` are those to whom it can't
    connect. ``step_overhead`` is what its steps take beside reading weights, in seconds.
    ``primary_peer`` is the PC's own peer, where this one is a further device of it. ``device`` is
    the device's product name. ``draft_bytes`` are the bytes that a draft model takes there beside
    the first stage.
    """

    peer: str
    name: str
    memory: int
    read_rate: float
    stage: str = "auto"
    bf16: bool = True
    cuda: bool = False
    unreachable: frozenset[str] = frozenset()
    step_overhead: float = STEP_OVERHEAD_S
    primary_peer: str = ""
    device: str = ""
    blocks: bool = False
    narrow: tuple[NarrowDType, ...] = ()
    draft_bytes: int = 0


@dataclass(frozen=True, slots=True)
class PlacementGoal:
    """What a placement is for, and how many stages it has at least, if there are so many peers."""

    objective: Objective = "latency"
    min_stages: int = 1


@dataclass(frozen=True, slots=True)
class PlacedStage:
    """One stage: ``layers`` is half-open, ``seconds`` the predicted time of a decode step."""

    peer: str
    layers: LayerRange
    seconds: float


@dataclass(frozen=True, slots=True)
class Placement:
    """Stages in ring order; ``spare_peers`` are auto peers that got no layers.

    ``kv_tokens`` is for how many tokens' KV there is room at least. ``round_trip_time`` and
    ``cost`` are those of :class:`~molink.swarm.placement.rings.RatedRing`, in seconds; 0 where
    peers have named their layers.
    """

    stages: tuple[PlacedStage, ...]
    spare_peers: tuple[str, ...] = ()
    kv_tokens: int = 0
    round_trip_time: float = 0.0
    cost: float = 0.0

    @property
    def slowest_time(self) -> float:
        """Predicted time of the slowest stage, in seconds."""
        return max(stage.seconds for stage in self.stages)

    @property
    def total_time(self) -> float:
        """Predicted time of all stages one after the other, in seconds."""
        return sum(stage.seconds for stage in self.stages)


@dataclass(frozen=True, slots=True)
class Unplaceable:
    """No placement: ``reason`` is for a person, with the numbers."""

    reason: str


class _NoPlacementError(Exception):
    """Carries the reason out of the steps of :func:`place_model`."""


def place_model(
    facts: ModelFacts,
    candidates: Sequence[Candidate],
    dtype: str = "auto",
    quantize: Quantize = "none",
    *,
    goal: PlacementGoal = PlacementGoal(),
    links: Links | None = None,
    serving: Sequence[tuple[str, LayerRange]] = (),
) -> Placement | Unplaceable:
    """Place a model over ``candidates``, which are in the order in which they joined.

    One that has named layers which the model doesn't have gets none. ``serving`` is the ring that
    is there, if one is. If there is no room for draft models, it is placed as if there were none.
    """
    misfits = {one.peer: why for one in candidates if (why := explain_misfit(one.stage, facts))}
    fitting = [one for one in candidates if one.peer not in misfits]
    try:
        setup = StageSetup(dtype=dtype, quantize=quantize)
        return _Placer(facts, fitting, setup, goal, links or Links()).place_stages(serving)
    except _NoPlacementError as reason:
        if any(one.draft_bytes for one in candidates):
            without = [replace(one, draft_bytes=0) for one in candidates]
            return place_model(
                facts, without, dtype, quantize, goal=goal, links=links, serving=serving
            )
        named = [
            f"{one.name} (--stage {one.stage}) {misfits[one.peer]}"
            for one in candidates
            if one.peer in misfits
        ]
        return Unplaceable("; ".join([str(reason), *named]))


def stage_setup(candidate: Candidate, common: StageSetup) -> StageSetup:
    """How a peer would run a stage; ``common`` has what is the same at every peer."""
    kind: Literal["cpu", "cuda"] = "cuda" if candidate.cuda else "cpu"
    return replace(
        common,
        kind=kind,
        bf16=candidate.bf16,
        has_block_kernels=candidate.blocks,
        narrow_dtypes=candidate.narrow,
    )


def row_bytes(facts: ModelFacts, dtype: str) -> int:
    """Bytes of a row on its way from stage to stage, unpacked."""
    return facts.hidden * DTYPE_SIZES.get(dtype, facts.element_bytes)


def parse_layers(stage: str) -> LayerRange | None:
    """The half-open range of ``A:B``; ``None`` for ``auto``, ``none`` and what is no range."""
    first, colon, last = stage.partition(":")
    if not (colon and first.isascii() and first.isdigit() and last.isascii() and last.isdigit()):
        return None
    return int(first), int(last)


def explain_misfit(stage: str, facts: ModelFacts) -> str:
    """Why the layers that a peer has named (``A:B``) can't be of a model; empty if they can."""
    layers = parse_layers(stage)
    if layers is None or 0 <= layers[0] < layers[1] <= facts.layers:
        return ""
    return f"names layers that {facts.name} doesn't have: it has {facts.layers}"


class _Placer:
    """One call of :func:`place_stages`."""

    def __init__(
        self,
        facts: ModelFacts,
        candidates: Sequence[Candidate],
        target: StageSetup,
        goal: PlacementGoal,
        links: Links,
    ) -> None:
        """``target`` has what is the same at every peer: dtype and quantization."""
        self.facts, self.candidates, self.setup = facts, candidates, target
        self.goal, self.links = goal, links
        widens = target.dtype == "auto" and facts.element_bytes < _F32_BYTES
        used = [c for c in candidates if c.stage != "none"]
        self.hint = _BF16_HINT if widens and not all(c.bf16 or c.cuda for c in used) else ""
        known = [c.read_rate for c in candidates if c.stage != "none" and c.read_rate > 0]
        self.default_rate = median(known) if known else ASSUMED_RATE
        self.auto_candidates = [c for c in candidates if c.stage == "auto"]
        self.auto_hosts = [self.build_host(c) for c in self.auto_candidates]
        self.named_stages = sorted(
            ((layers, c) for c in candidates if (layers := parse_layers(c.stage)) is not None),
            key=lambda pair: pair[0],
        )

    def build_host(self, candidate: Candidate, tokens: int = 0) -> StageHost:
        """What a peer has, and what the model takes there with room for ``tokens`` tokens."""
        rate = candidate.read_rate if candidate.read_rate > 0 else self.default_rate
        need = Footprint.of_stage(self.facts, stage_setup(candidate, self.setup))
        costs = StageCosts.from_footprint(need, tokens, candidate.draft_bytes)
        return StageHost(
            candidate.peer, usable_bytes(candidate.memory), rate, costs, candidate.step_overhead
        )

    def place_stages(self, serving: Sequence[tuple[str, LayerRange]]) -> Placement:
        if not self.auto_hosts and not self.named_stages:
            raise _NoPlacementError("no peer offers to run layers")
        if not self.named_stages:
            return self.find_ring(serving)
        explicit = [self.place_named(layers, c) for layers, c in self.named_stages]
        gaps = self.find_gaps()
        floor = max((stage.seconds for stage in explicit), default=0.0)
        splits = self.fill_gaps(gaps, floor) if gaps else []
        stages = [*explicit]
        for gap, found in zip(gaps, splits, strict=True):
            stages.extend(self.build_stages(gap, found))
        stages.sort(key=lambda stage: stage.layers)
        used = {stage.peer for stage in stages}
        spares = tuple(host.peer for host in self.auto_hosts if host.peer not in used)
        return Placement(tuple(stages), spares)

    # --- all are auto ----------------------------------------------------------------------------

    def find_ring(self, serving: Sequence[tuple[str, LayerRange]]) -> Placement:
        """The best ring, or the one that serves if it is nearly as good."""
        hops = self.build_hops()
        found: RatedRing | None = None
        for tokens in kv_room_steps(self.facts, self.goal.objective):
            hosts = [self.build_host(c, tokens) for c in self.auto_candidates]
            task = RingTask(self.facts.layers, hosts, hops, self.goal.objective, MAX_STAGES)
            ring = search_ring(task, self.goal.min_stages)
            if ring is None or not (found is None or is_room_worth(tokens, ring.cost, found.cost)):
                break
            found, room = ring, tokens
            if tokens <= CONVERSATION_TOKENS:
                needed = task
        if found is None:
            raise _NoPlacementError(self.explain_shortage(self.find_gaps()))
        return self.build_placement(task, self.prefer_serving(needed, found, serving), room)

    def prefer_serving(
        self, task: RingTask, found: RatedRing, serving: Sequence[tuple[str, LayerRange]]
    ) -> RatedRing:
        """The ring that serves, unless ``found`` is worth a change."""
        index = {one.peer: i for i, one in enumerate(task.hosts)}
        if not serving or not all(peer in index for peer, _ in serving):
            return found
        counts = [last - first for _, (first, last) in serving]
        old = rate_ring(task, [index[peer] for peer, _ in serving], counts)
        if old is None or len(old.order) < min(self.goal.min_stages, len(found.order)):
            return found
        gain = old.cost - found.cost
        return found if gain >= max(MIN_GAIN * old.cost, MIN_GAIN_S) else old

    def build_hops(self) -> Hops:
        """The links between all auto peers."""
        rows = MICRO_BATCH_ROWS[self.goal.objective]
        volume = rows * row_bytes(self.facts, self.setup.dtype)

        def hop(one: Candidate, other: Candidate) -> HopTimes | None:
            if one is other or other.peer in one.unreachable:
                return None
            latency, rate = self.links.latency_and_rate(one.peer, other.peer)
            latency += HANDLING_S
            busy, tokens_busy = volume / rate, rows * TOKEN_BYTES / rate
            return HopTimes(latency + busy, busy, latency + tokens_busy, tokens_busy)

        return [[hop(one, other) for other in self.auto_candidates] for one in self.auto_candidates]

    def build_placement(self, task: RingTask, ring: RatedRing, tokens: int) -> Placement:
        """A ring's stages."""
        stages: list[PlacedStage] = []
        at = 0
        for i, count in zip(ring.order, ring.counts, strict=True):
            host = task.hosts[i]
            closes = at + count == task.layers
            seconds = host.step_time(count, closes=closes)
            stages.append(PlacedStage(host.peer, (at, at + count), seconds))
            at += count
        used = {stage.peer for stage in stages}
        spares = tuple(one.peer for one in task.hosts if one.peer not in used)
        return Placement(tuple(stages), spares, tokens, ring.round_trip_time, ring.cost)

    # --- some have named their layers ------------------------------------------------------------

    def place_named(self, layers: LayerRange, candidate: Candidate) -> PlacedStage:
        """The stage of a peer that named its own layers."""
        first, last = layers
        named = f"{candidate.name} (--stage {first}:{last})"
        opens, closes = first == 0, last == self.facts.layers
        host = self.build_host(candidate)
        if last - first > host.max_layers(opens=opens, closes=closes):
            why = explain_refusal(
                self.facts, layers, stage_setup(candidate, self.setup), candidate.memory
            )
            raise _NoPlacementError(f"{named}: {why}{self.hint}")
        return PlacedStage(candidate.peer, layers, host.step_time(last - first, closes=closes))

    def find_gaps(self) -> list[Gap]:
        """Ranges between the explicit ones."""
        if len(self.named_stages) > MAX_STAGES:
            raise _NoPlacementError(
                f"{len(self.named_stages)} peers named layers; a ring has {MAX_STAGES}"
            )
        gaps: list[Gap] = []
        at, before = 0, ""
        layers = self.facts.layers
        for (first, last), candidate in self.named_stages:
            if first < at:
                raise _NoPlacementError(
                    f"the layers of {before} and of {candidate.name} (--stage {first}:{last}) "
                    "overlap; give one of them others, or auto"
                )
            if first > at:
                gaps.append(Gap(at, first, at == 0, closes=False))
            at, before = last, f"{candidate.name} (--stage {first}:{last})"
        if at < layers:
            gaps.append(Gap(at, layers, at == 0, closes=True))
        return gaps

    def fill_gaps(self, gaps: Sequence[Gap], floor: float) -> list[Split]:
        """Splits of the gaps over as many auto peers as possible."""
        if len(self.auto_hosts) < len(gaps):
            missing = ", ".join(f"{gap.first}:{gap.last}" for gap in gaps)
            raise _NoPlacementError(
                f"no peer runs layers {missing}: {len(self.auto_hosts)} peers with --stage auto "
                "are "
                f"there, {len(gaps)} are needed"
            )
        for hosts in self.host_selections(gaps):
            best = split_gaps(gaps, hosts, floor)
            if best is not None:
                return best
        raise _NoPlacementError(self.explain_shortage(gaps))

    def host_selections(self, gaps: Sequence[Gap]) -> Iterable[list[StageHost]]:
        """Sets of auto peers to try, largest first; each in the order of joining."""
        able = [host for host in self.auto_hosts if host.max_layers() >= 1]
        room = min(sum(gap.layers for gap in gaps), MAX_STAGES - len(self.named_stages))
        if len(able) > room:
            quickest = sorted(able, key=lambda host: host.step_time(1))[:room]
            yield [host for host in able if host in quickest]
        largest = sorted(able, key=lambda host: -host.max_layers())
        for count in range(min(room, len(able)), len(gaps) - 1, -1):
            yield [host for host in able if host in largest[:count]]

    def build_stages(self, gap: Gap, found: Split) -> Iterable[PlacedStage]:
        at = gap.first
        for host, count in found.shares:
            closes = at + count == self.facts.layers
            seconds = host.step_time(count, closes=closes)
            yield PlacedStage(host.peer, (at, at + count), seconds)
            at += count

    def explain_shortage(self, gaps: Sequence[Gap]) -> str:
        """Why memory isn't enough, with the numbers and what would help."""
        costs = max((host.costs for host in self.auto_hosts), key=lambda one: one.layer_weights)
        needs = sum(
            costs.memory_needed(gap.layers, opens=gap.opens, closes=gap.closes) for gap in gaps
        )
        offers = sum(host.memory for host in self.auto_hosts)
        layers = sum(gap.layers for gap in gaps)
        room = sum(max(0, host.max_layers()) for host in self.auto_hosts)
        peers = "1 peer" if len(self.auto_hosts) == 1 else f"{len(self.auto_hosts)} peers"
        what = self.facts.name if not self.named_stages else f"the rest of {self.facts.name}"
        smaller = self.smaller_quantization()
        helps = f"serve it with --quantize {smaller}" if smaller else "serve a smaller model"
        if needs > offers:
            return (
                f"{what} needs {format_size(needs)}, the swarm offers {format_size(offers)} on "
                f"{peers}: room for "
                f"{min(room, layers - 1)} of {layers} layers; add a peer, give more memory or "
                f"{helps}{self.hint}"
            )
        if any(one.unreachable for one in self.auto_candidates) and self.fits_if_connected():
            return (
                f"{what} needs {format_size(needs)}: no ring of peers that can connect to each "
                "other has "
                "room for it; open the ports that are named to those who are left out"
            )
        layer = costs.layer_weights + costs.layer_room
        return (
            f"{what} needs {format_size(needs)} and the swarm offers {format_size(offers)} on "
            f"{peers}, but no "
            f"split fits: a layer takes {format_size(layer)}, a stage {format_size(costs.stage)} "
            "beside its "
            f"layers, the first {format_size(costs.first)} and the last "
            f"{format_size(costs.last + costs.logits)} "
            f"more; {helps}{self.hint}"
        )

    def fits_if_connected(self) -> bool:
        """Whether there would be a placement if all could connect to all."""
        opened = [replace(one, unreachable=frozenset()) for one in self.candidates]
        found = place_model(self.facts, opened, self.setup.dtype, self.setup.quantize)
        return isinstance(found, Placement)

    def smaller_quantization(self) -> Quantize | None:
        """The gentlest quantization with which there would be a placement, if any."""
        for mode in smaller_modes(self.facts, self.setup):
            found = place_model(self.facts, self.candidates, self.setup.dtype, mode)
            if isinstance(found, Placement):
                return mode
        return None
