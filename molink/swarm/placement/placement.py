"""Places a model: decides which peer runs which layers.

Every decode step reads all weights once, but only the chosen experts. So a stage's time is its
bytes divided by the peer's measured read rate, plus a fixed overhead. Experts that don't fit a
device, but fit its PC's host memory, are read at the CPU's rate.
:mod:`molink.swarm.placement.ring_search` finds the peers, their order and their layers for the
objective; each further stage costs a link. Two things take precedence:

- A ring has :attr:`PlacementGoal.min_stages` stages, or as many as possible.
- It has room for KV: if KV room is short, memory is worth a further link.

The serving ring stays unless another one is better by :data:`MIN_GAIN`, or only the other one has
room for a conversation. If peers name their layers, users decide who participates: every ``auto``
peer takes some of the remaining layers, so that the slowest stage is as fast as possible,
regardless of links.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Literal

from molink.facts.device import Device, ExpertHost
from molink.facts.dtypes import DTYPE_SIZES, NarrowDType
from molink.facts.footprint import MIN_TOKENS, Footprint, StageSetup, host_setup
from molink.facts.layer_range import format_layers, parse_layers
from molink.facts.memory_plan import (
    CONVERSATION_TOKENS,
    explain_refusal,
    format_size,
    smaller_modes,
    usable_bytes,
)
from molink.facts.model import LayerRange, ModelFacts, Objective, Quantize
from molink.swarm.placement.link_times import (
    ANSWER_TOKENS,
    PROMPT_TOKENS,
    estimate_ask_times,
    estimate_link_times,
)
from molink.swarm.placement.links import Links
from molink.swarm.placement.partition import Gap, Split, StageCosts, StageHost, split_gaps
from molink.swarm.placement.ring_search import search_ring
from molink.swarm.placement.rings import (
    LinkTimeTable,
    RingCandidate,
    RingTask,
    evaluate_ring,
)

#: Bound of the ring in :class:`molink.wire.messages.instructions.FormPipeline`.
MAX_STAGES = 16
#: Bytes/s assumed while no peer has measured its own: about one CPU core. It is equal for all, so
#: it affects only displayed times.
ASSUMED_RATE = 10e9
#: Default time of a step besides reading weights, in seconds.
STEP_OVERHEAD_S = 0.0005
#: Minimum saving, as a fraction and in seconds, for which a serving ring is replaced.
MIN_GAIN = 0.1
MIN_GAIN_S = 0.001
#: Rows of the assumed micro-batch.
MICRO_BATCH_ROWS: dict[Objective, int] = {"latency": 1, "throughput": 16}
#: Bytes of a weight where bf16 is unsupported.
_F32_BYTES = DTYPE_SIZES["f32"]
_BF16_HINT = " (a CPU without bf16 computes in f32: its memory counts for less)"

#: A ring must have room for a conversation at any cost, if any ring has. Beyond that, four times
#: the room may raise the cost by this fraction …
ROOM_WORTH = 0.25
_ROOM_FACTOR = 4
#: … up to room for this many streams of MIN_TOKENS tokens.
_STREAMS: dict[Objective, int] = {"latency": 4, "throughput": 64}
_USUAL_SETUP = StageSetup()


@dataclass(frozen=True, slots=True)
class Candidate:
    """A peer that could take a stage. ``stage`` is ``auto``, ``none`` or ``A-B``.

    ``memory`` in bytes, ``read_rate`` in bytes/s (0 = not measured). With dtype ``auto``, a CPU
    without ``bf16`` needs four bytes per weight, except for weights that stay ``narrow``; one with
    ``blocks`` multiplies GGUF blocks directly. ``unreachable`` are peers to which it cannot
    connect. ``step_overhead`` is the time of a step besides reading weights, in seconds.
    ``primary_peer`` is set for a further device of a PC. ``device`` is the product name.
    ``draft_bytes`` are needed in addition to the first stage. ``expert_host`` may hold experts that
    don't fit the device.
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
    reads_pages: bool = False
    expert_host: ExpertHost | None = None


def candidate_from_device(
    peer: str, name: str, device: Device, *, stage: str = "auto", primary_peer: str = ""
) -> Candidate:
    """Create the candidate for a peer's measured device."""
    return Candidate(
        peer,
        name,
        device.memory,
        device.read_rate,
        stage,
        bf16=device.bf16,
        blocks=device.has_block_kernels,
        narrow=device.narrow_dtypes,
        cuda=device.kind == "cuda",
        primary_peer=primary_peer,
        device=f"{device.name}{device.instructions}, {device.threads} threads",
        draft_bytes=device.draft_bytes,
        reads_pages=device.reads_pages,
        expert_host=device.expert_host,
    )


@dataclass(frozen=True, slots=True)
class PlacementGoal:
    """A placement's objective, and its minimum number of stages if there are enough peers."""

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
    """Stages in ring order; ``spare_peers`` are auto peers without layers.

    ``kv_tokens`` is the minimum number of tokens whose KV fits. ``round_trip_time`` and ``cost``
    are those of :class:`~molink.swarm.placement.rings.RingCandidate`, in seconds; 0 if peers named
    their layers.
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
        """Predicted sum of all stages' times, in seconds."""
        return sum(stage.seconds for stage in self.stages)


@dataclass(frozen=True, slots=True)
class Unplaceable:
    """No placement; ``reason`` explains it to the user, with numbers."""

    reason: str


class _NoPlacementError(Exception):
    """Carries the reason out of :func:`place_model`."""


def place_model(
    facts: ModelFacts,
    candidates: Sequence[Candidate],
    setup: StageSetup = _USUAL_SETUP,
    *,
    goal: PlacementGoal = PlacementGoal(),
    links: Links | None = None,
    serving: Sequence[tuple[str, LayerRange]] = (),
    askers: Mapping[str, float] | None = None,
) -> Placement | Unplaceable:
    """Place a model on ``candidates``, which are in joining order and run it as ``setup`` says.

    Peers that name layers beyond the model's get none. ``serving`` is the running ring, if any.
    ``askers`` are the peers at which requests arrive, with the number of their requests. If draft
    models do not fit, the model is placed without them.
    """
    misfits = {one.peer: why for one in candidates if (why := explain_misfit(one.stage, facts))}
    fitting = [one for one in candidates if one.peer not in misfits]
    try:
        placer = _Placer(facts, fitting, setup, goal, links or Links(), askers or {})
        return placer.place_stages(serving)
    except _NoPlacementError as reason:
        if any(one.draft_bytes for one in candidates):
            without = [replace(one, draft_bytes=0) for one in candidates]
            return place_model(
                facts, without, setup, goal=goal, links=links, serving=serving, askers=askers
            )
        named = [
            f"{one.name} (--stage {one.stage}) {misfits[one.peer]}"
            for one in candidates
            if one.peer in misfits
        ]
        return Unplaceable("; ".join([str(reason), *named]))


def stage_setup(candidate: Candidate, common: StageSetup) -> StageSetup:
    """Return how a peer would run a stage; ``common`` is the same for all peers."""
    kind: Literal["cpu", "cuda"] = "cuda" if candidate.cuda else "cpu"
    return replace(
        common,
        kind=kind,
        bf16=candidate.bf16,
        has_block_kernels=candidate.blocks,
        narrow_dtypes=candidate.narrow,
        reads_pages=candidate.reads_pages,
        host=host_setup(candidate.expert_host, kind, common.dtype, common.quantize),
    )


def build_host(
    facts: ModelFacts,
    candidate: Candidate,
    common: StageSetup,
    rate: float,
    tokens: int = 0,
    rows: int = 1,
) -> StageHost:
    """Compute a peer's capacity for the model, with KV room for ``tokens`` tokens.

    ``rate`` is the bytes/s at which it reads weights; a decode step has ``rows`` rows.
    """
    need = Footprint.of_stage(facts, stage_setup(candidate, common))
    costs = StageCosts.from_footprint(need, tokens, candidate.draft_bytes, rows)
    memory, host = usable_bytes(candidate.memory), candidate.expert_host
    return StageHost(
        candidate.peer,
        memory,
        rate,
        costs,
        candidate.step_overhead,
        0 if host is None else usable_bytes(host.memory),
        0.0 if host is None else host.read_rate or rate,
    )


def row_bytes(facts: ModelFacts, dtype: str) -> int:
    """Return the bytes of an unpacked row between stages."""
    return facts.hidden * DTYPE_SIZES.get(dtype, facts.element_bytes)


def explain_misfit(stage: str, facts: ModelFacts) -> str:
    """Explain why a stage can't have the layers that a peer names (``A-B``); empty if it can."""
    layers, whole = parse_layers(stage), (0, facts.first_layers)
    if layers is None:
        return ""
    if 0 <= layers[0] < layers[1] <= facts.layers:
        if not any(0 < border < facts.first_layers for border in layers):
            return ""
        return f"cuts layers {format_layers(whole)} of {facts.name}, which one stage must hold"
    return f"names layers that {facts.name} doesn't have: it has {facts.layers}"


def kv_room_steps(facts: ModelFacts, objective: Objective) -> list[int]:
    """List the KV room to try in tokens, ascending from the required minimum to the desired
    maximum.
    """
    found = [min(facts.max_model_len, MIN_TOKENS)]
    most = _STREAMS[objective] * found[0]
    while found[-1] < most:
        found.append(min(found[-1] * _ROOM_FACTOR, most))
    return found


def is_room_worth(tokens: int, cost: float, before: float) -> bool:
    """Whether KV room for ``tokens`` is worth ``cost``; a quarter of it costs ``before``."""
    return tokens <= CONVERSATION_TOKENS or cost <= before * (1 + ROOM_WORTH)


class _Placer:
    """One call of :func:`place_model`."""

    def __init__(
        self,
        facts: ModelFacts,
        candidates: Sequence[Candidate],
        target: StageSetup,
        goal: PlacementGoal,
        links: Links,
        askers: Mapping[str, float],
    ) -> None:
        """``target`` has the settings that all peers share: dtype and quantization."""
        self.facts, self.candidates, self.setup = facts, candidates, target
        self.goal, self.links, self.askers = goal, links, askers
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
        rate = candidate.read_rate if candidate.read_rate > 0 else self.default_rate
        rows = MICRO_BATCH_ROWS[self.goal.objective]
        return build_host(self.facts, candidate, self.setup, rate, tokens, rows)

    def place_stages(self, serving: Sequence[tuple[str, LayerRange]]) -> Placement:
        if not self.auto_hosts and not self.named_stages:
            raise _NoPlacementError("no PC offers to hold layers")
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

    # --- all peers are auto ----------------------------------------------------------------------

    def find_ring(self, serving: Sequence[tuple[str, LayerRange]]) -> Placement:
        """Find the best ring; keep the serving ring if it is nearly as good."""
        link_times, ask_times = self.estimate_times()
        found: RingCandidate | None = None
        for tokens in kv_room_steps(self.facts, self.goal.objective):
            hosts = [self.build_host(c, tokens) for c in self.auto_candidates]
            task = RingTask(
                self.facts.layers,
                hosts,
                link_times,
                self.goal.objective,
                MAX_STAGES,
                ask_times,
                PROMPT_TOKENS / ANSWER_TOKENS,
            )
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
        self, task: RingTask, found: RingCandidate, serving: Sequence[tuple[str, LayerRange]]
    ) -> RingCandidate:
        """Return the serving ring, unless ``found`` is worth a change."""
        index = {one.peer: i for i, one in enumerate(task.hosts)}
        if not serving or not all(peer in index for peer, _ in serving):
            return found
        counts = [last - first for _, (first, last) in serving]
        old = evaluate_ring(task, [index[peer] for peer, _ in serving], counts)
        if old is None or len(old.order) < min(self.goal.min_stages, len(found.order)):
            return found
        gain = old.cost - found.cost
        return found if gain >= max(MIN_GAIN * old.cost, MIN_GAIN_S) else old

    def estimate_times(self) -> tuple[LinkTimeTable, Sequence[float]]:
        """Estimate the link times between auto peers, and the times of requests to each of them."""
        peers = [one.peer for one in self.auto_candidates]
        link_times = estimate_link_times(
            peers,
            [one.unreachable for one in self.auto_candidates],
            self.links,
            MICRO_BATCH_ROWS[self.goal.objective],
            row_bytes(self.facts, self.setup.dtype),
        )
        return link_times, estimate_ask_times(peers, self.askers, self.links)

    def build_placement(self, task: RingTask, ring: RingCandidate, tokens: int) -> Placement:
        """Build the placement of a ring."""
        stages: list[PlacedStage] = []
        at = 0
        for i, count in zip(ring.order, ring.counts, strict=True):
            host = task.hosts[i]
            closes = at + count == task.layers
            seconds = host.step_time(count, opens=at == 0, closes=closes)
            stages.append(PlacedStage(host.peer, (at, at + count), seconds))
            at += count
        used = {stage.peer for stage in stages}
        spares = tuple(one.peer for one in task.hosts if one.peer not in used)
        return Placement(tuple(stages), spares, tokens, ring.round_trip_time, ring.cost)

    # --- some peers name their layers ------------------------------------------------------------

    def place_named(self, layers: LayerRange, candidate: Candidate) -> PlacedStage:
        """Place the stage of a peer that names its layers."""
        first, last = layers
        named = f"{candidate.name} (--stage {candidate.stage})"
        opens, closes = first == 0, last == self.facts.layers
        host = self.build_host(candidate)
        if last - first > host.max_layers(opens=opens, closes=closes):
            beside = candidate.expert_host
            why = explain_refusal(
                self.facts,
                layers,
                stage_setup(candidate, self.setup),
                candidate.memory,
                0 if beside is None else beside.memory,
            )
            raise _NoPlacementError(f"{named}: {why}{self.hint}")
        seconds = host.step_time(last - first, opens=opens, closes=closes)
        return PlacedStage(candidate.peer, layers, seconds)

    def find_gaps(self) -> list[Gap]:
        """Find the ranges between the named ones."""
        if len(self.named_stages) > MAX_STAGES:
            raise _NoPlacementError(
                f"{len(self.named_stages)} peers named layers; a ring has at most {MAX_STAGES}"
            )
        gaps: list[Gap] = []
        at, before = 0, ""
        layers = self.facts.layers
        for (first, last), candidate in self.named_stages:
            if first < at:
                raise _NoPlacementError(
                    f"the layers of {before} and of {candidate.name} (--stage {candidate.stage}) "
                    "overlap; change one of them or use auto"
                )
            if first > at:
                gaps.append(Gap(at, first, at == 0, closes=False))
            at, before = last, f"{candidate.name} (--stage {candidate.stage})"
        if at < layers:
            gaps.append(Gap(at, layers, at == 0, closes=True))
        return gaps

    def fill_gaps(self, gaps: Sequence[Gap], floor: float) -> list[Split]:
        """Split the gaps over as many auto peers as possible; see :func:`split_gaps` for
        seconds."""
        if len(self.auto_hosts) < len(gaps):
            missing = ", ".join(format_layers((gap.first, gap.last)) for gap in gaps)
            raise _NoPlacementError(
                f"no PC holds layers {missing}: {len(self.auto_hosts)} PCs with --stage auto are "
                f"connected, {len(gaps)} needed"
            )
        for hosts in self.host_selections(gaps):
            best = split_gaps(gaps, hosts, floor)
            if best is not None:
                return best
        raise _NoPlacementError(self.explain_shortage(gaps))

    def host_selections(self, gaps: Sequence[Gap]) -> Iterable[list[StageHost]]:
        """Yield sets of hosts to try, largest first; each in joining order."""
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
            seconds = host.step_time(count, opens=at == 0, closes=closes)
            yield PlacedStage(host.peer, (at, at + count), seconds)
            at += count

    def explain_shortage(self, gaps: Sequence[Gap]) -> str:
        """Explain why memory is not enough, with figures and remedies."""
        costs = max((host.costs for host in self.auto_hosts), key=lambda one: one.layer_weights)
        needs = sum(
            costs.memory_needed(gap.layers, opens=gap.opens, closes=gap.closes) for gap in gaps
        )
        offers = sum(host.memory + host.host_memory for host in self.auto_hosts)
        layers = sum(gap.layers for gap in gaps)
        room = sum(max(0, host.max_layers()) for host in self.auto_hosts)
        peers = "1 peer" if len(self.auto_hosts) == 1 else f"{len(self.auto_hosts)} peers"
        name = self.facts.name if not self.named_stages else f"the rest of {self.facts.name}"
        need, offer = format_size(needs), format_size(offers)
        smaller = self.smaller_quantization()
        helps = f"serve it with --quantize {smaller}" if smaller else "serve a smaller model"
        if needs > offers:
            more = "memory" if costs.experts is None else "memory (--expert-memory for experts)"
            return (
                f"{name} needs {need}, the swarm offers {offer} on {peers}: room for "
                f"{min(room, layers - 1)} of {layers} layers; add a peer, allow more {more} or "
                f"{helps}{self.hint}"
            )
        if any(one.unreachable for one in self.auto_candidates) and self.fits_if_connected():
            return (
                f"{name} needs {need}: no ring of peers that can connect to each other has room "
                "for it; open the ports named for the excluded peers"
            )
        layer = format_size(costs.layer_weights + costs.layer_room)
        ends = format_size(costs.first), format_size(costs.last + costs.logits)
        return (
            f"{name} needs {need} and the swarm offers {offer} on {peers}, but no split fits: a "
            f"layer takes {layer}, a stage {format_size(costs.stage)} besides its layers, the "
            f"first {ends[0]} and the last {ends[1]} more; {helps}{self.hint}"
        )

    def fits_if_connected(self) -> bool:
        """Whether a placement would exist if all peers could connect."""
        opened = [replace(one, unreachable=frozenset()) for one in self.candidates]
        found = place_model(self.facts, opened, self.setup)
        return isinstance(found, Placement)

    def smaller_quantization(self) -> Quantize | None:
        """Return the quantization with the least loss for which a placement would exist, if any."""
        for mode in smaller_modes(self.facts, self.setup):
            found = place_model(self.facts, self.candidates, replace(self.setup, quantize=mode))
            if isinstance(found, Placement):
                return mode
        return None
