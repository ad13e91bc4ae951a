"""Decides which peer runs which layers.

Every decode step reads all weights once, so a stage's time is its bytes over the peer's measured
read rate, and a fixed time for each step. :mod:`molink.swarm.placement.ring_search` finds the
peers, their order and their layers for the objective: a stage more costs a hop. Two things count
before that:

- A ring has :attr:`Aim.stages` stages, or as many as there can be.
- It has room for KV (:mod:`molink.swarm.kv_room`): memory is worth a hop where that would be short.

What serves stays unless another ring is better by :data:`GAIN`, or it has no room for a
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
from molink.facts.kept import NarrowDType
from molink.facts.memory_plan import refusal, size, smaller_modes, usable
from molink.facts.model import LayerRange, ModelFacts, Objective, Quantize
from molink.facts.ringtimes import HANDLING_S, TOKEN_BYTES
from molink.swarm.kv_room import CONVERSATION, is_worth, rooms
from molink.swarm.placement.links import Links
from molink.swarm.placement.partition import Gap, Runner, Split, StageCosts, share_out
from molink.swarm.placement.ring_search import search
from molink.swarm.placement.rings import Hops, HopTimes, JudgedRing, Task, judge

#: Bound of the ring in :class:`molink.wire.messages.instructions.Form`.
MAX_STAGES = 16
#: Bytes/s that are assumed where no peer has measured its own: what one core reads. All have the
#: same then, so it decides nothing but the time that is shown.
ASSUMED_RATE = 10e9
#: Seconds that a step takes beside reading weights, where nothing better is known.
STEP_S = 0.0005
#: What serves is left for a ring that costs less by this part, and by so many seconds.
GAIN = 0.1
GAIN_S = 0.001
#: Rows of the micro-batch that is reckoned with.
ROWS: dict[Objective, int] = {"latency": 1, "throughput": 16}
#: Bytes of a weight where bf16 can't be computed with.
_WIDE = DTYPE_SIZES["f32"]
_WIDER = " (a CPU without bf16 computes in f32: its memory counts for less)"


@dataclass(frozen=True, slots=True)
class Candidate:
    """A peer that could take a stage. ``stage`` is ``auto``, ``none`` or ``A:B``.

    ``memory`` in bytes, ``read_rate`` in bytes/s (0 = not measured). A CPU without ``bf16`` takes
    four bytes per weight with the dtype ``auto``, but for those that stay ``narrow``; one with
    ``blocks`` multiplies by those of a GGUF file. ``blocked`` are those to whom it can't connect.
    ``step`` is what its steps take beside reading weights, in seconds. ``pc`` is the PC's own peer,
    where this one is a further device of it. ``device`` is the device's product name. ``draft`` are
    the bytes that a draft model takes there beside the first stage.
    """

    peer: str
    name: str
    memory: int
    read_rate: float
    stage: str = "auto"
    bf16: bool = True
    cuda: bool = False
    blocked: frozenset[str] = frozenset()
    step: float = STEP_S
    pc: str = ""
    device: str = ""
    blocks: bool = False
    narrow: tuple[NarrowDType, ...] = ()
    draft: int = 0


@dataclass(frozen=True, slots=True)
class Aim:
    """What a placement is for, and how many stages it has at least, if there are so many peers."""

    objective: Objective = "latency"
    stages: int = 1


@dataclass(frozen=True, slots=True)
class Placed:
    """One stage: ``layers`` is half-open, ``seconds`` the predicted time of a decode step."""

    peer: str
    layers: LayerRange
    seconds: float


@dataclass(frozen=True, slots=True)
class Placement:
    """Stages in ring order; ``spares`` are auto peers that got no layers.

    ``tokens`` is for how many tokens' KV there is room at least. ``turn`` and ``cost`` are those of
    :class:`~molink.swarm.placement.rings.JudgedRing`, in seconds; 0 where peers have named their
    layers.
    """

    stages: tuple[Placed, ...]
    spares: tuple[str, ...] = ()
    tokens: int = 0
    turn: float = 0.0
    cost: float = 0.0

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
    facts: ModelFacts,
    candidates: Sequence[Candidate],
    dtype: str = "auto",
    quantize: Quantize = "none",
    *,
    aim: Aim = Aim(),
    links: Links | None = None,
    serving: Sequence[tuple[str, LayerRange]] = (),
) -> Placement | Unplaceable:
    """Place a model over ``candidates``, which are in the order in which they joined.

    One that has named layers which the model doesn't have gets none. ``serving`` is the ring that
    is there, if one is. If there is no room for draft models, it is placed as if there were none.
    """
    misfits = {one.peer: why for one in candidates if (why := misfit(one.stage, facts))}
    fitting = [one for one in candidates if one.peer not in misfits]
    try:
        setup = StageSetup(dtype=dtype, quantize=quantize)
        return _Placer(facts, fitting, setup, aim, links or Links()).place(serving)
    except _NoPlacement as reason:
        if any(one.draft for one in candidates):
            without = [replace(one, draft=0) for one in candidates]
            return place(facts, without, dtype, quantize, aim=aim, links=links, serving=serving)
        named = [
            f"{one.name} (--stage {one.stage}) {misfits[one.peer]}"
            for one in candidates
            if one.peer in misfits
        ]
        return Unplaceable("; ".join([str(reason), *named]))


def setup_of(candidate: Candidate, common: StageSetup) -> StageSetup:
    """How a peer would run a stage; ``common`` has what is the same at every peer."""
    kind: Literal["cpu", "cuda"] = "cuda" if candidate.cuda else "cpu"
    return replace(
        common, kind=kind, bf16=candidate.bf16, blocks=candidate.blocks, narrow=candidate.narrow
    )


def row_bytes(facts: ModelFacts, dtype: str) -> int:
    """Bytes of a row on its way from stage to stage, unpacked."""
    return facts.hidden * DTYPE_SIZES.get(dtype, facts.element_bytes)


def parse_range(stage: str) -> LayerRange | None:
    """The half-open range of ``A:B``; ``None`` for ``auto``, ``none`` and what is no range."""
    first, colon, last = stage.partition(":")
    if not (colon and first.isascii() and first.isdigit() and last.isascii() and last.isdigit()):
        return None
    return int(first), int(last)


def misfit(stage: str, facts: ModelFacts) -> str:
    """Why the layers that a peer has named (``A:B``) can't be of a model; empty if they can."""
    layers = parse_range(stage)
    if layers is None or 0 <= layers[0] < layers[1] <= facts.layers:
        return ""
    return f"names layers that {facts.name} doesn't have: it has {facts.layers}"


class _Placer:
    """One call of :func:`place`."""

    def __init__(
        self,
        facts: ModelFacts,
        candidates: Sequence[Candidate],
        target: StageSetup,
        aim: Aim,
        links: Links,
    ) -> None:
        """``target`` has what is the same at every peer: dtype and quantization."""
        self.facts, self.candidates, self.common = facts, candidates, target
        self.aim, self.links = aim, links
        widens = target.dtype == "auto" and facts.element_bytes < _WIDE
        used = [c for c in candidates if c.stage != "none"]
        self.hint = _WIDER if widens and not all(c.bf16 or c.cuda for c in used) else ""
        known = [c.read_rate for c in candidates if c.stage != "none" and c.read_rate > 0]
        self.default_rate = median(known) if known else ASSUMED_RATE
        self.free = [c for c in candidates if c.stage == "auto"]
        self.autos = [self.runner(c) for c in self.free]
        self.fixed = sorted(
            ((layers, c) for c in candidates if (layers := parse_range(c.stage)) is not None),
            key=lambda pair: pair[0],
        )

    def runner(self, candidate: Candidate, tokens: int = 0) -> Runner:
        """What a peer has, and what the model takes there with room for ``tokens`` tokens."""
        rate = candidate.read_rate if candidate.read_rate > 0 else self.default_rate
        need = Footprint.of(self.facts, setup_of(candidate, self.common))
        costs = StageCosts.of(need, tokens, candidate.draft)
        return Runner(candidate.peer, usable(candidate.memory), rate, costs, candidate.step)

    def place(self, serving: Sequence[tuple[str, LayerRange]]) -> Placement:
        if not self.autos and not self.fixed:
            raise _NoPlacement("no peer offers to run layers")
        if not self.fixed:
            return self.ring(serving)
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

    # --- all are auto ----------------------------------------------------------------------------

    def ring(self, serving: Sequence[tuple[str, LayerRange]]) -> Placement:
        """The best ring, or the one that serves if it is nearly as good."""
        hops = self.hops()
        found: JudgedRing | None = None
        for tokens in rooms(self.facts, self.aim.objective):
            runners = [self.runner(c, tokens) for c in self.free]
            task = Task(self.facts.layers, runners, hops, self.aim.objective, MAX_STAGES)
            ring = search(task, self.aim.stages)
            if ring is None or not (found is None or is_worth(tokens, ring.cost, found.cost)):
                break
            found, room = ring, tokens
            if tokens <= CONVERSATION:
                needed = task
        if found is None:
            raise _NoPlacement(self.shortage(self.gaps()))
        return self.placement(task, self.kept(needed, found, serving), room)

    def kept(
        self, task: Task, found: JudgedRing, serving: Sequence[tuple[str, LayerRange]]
    ) -> JudgedRing:
        """The ring that serves, unless ``found`` is worth a change."""
        index = {one.peer: i for i, one in enumerate(task.runners)}
        if not serving or not all(peer in index for peer, _ in serving):
            return found
        counts = [last - first for _, (first, last) in serving]
        old = judge(task, [index[peer] for peer, _ in serving], counts)
        if old is None or len(old.order) < min(self.aim.stages, len(found.order)):
            return found
        gain = old.cost - found.cost
        return found if gain >= max(GAIN * old.cost, GAIN_S) else old

    def hops(self) -> Hops:
        """The links between all auto peers."""
        rows = ROWS[self.aim.objective]
        volume = rows * row_bytes(self.facts, self.common.dtype)

        def hop(one: Candidate, other: Candidate) -> HopTimes | None:
            if one is other or other.peer in one.blocked:
                return None
            latency, rate = self.links.between(one.peer, other.peer)
            latency += HANDLING_S
            busy, tokens_busy = volume / rate, rows * TOKEN_BYTES / rate
            return HopTimes(latency + busy, busy, latency + tokens_busy, tokens_busy)

        return [[hop(one, other) for other in self.free] for one in self.free]

    def placement(self, task: Task, ring: JudgedRing, tokens: int) -> Placement:
        """A ring's stages."""
        stages: list[Placed] = []
        at = 0
        for i, count in zip(ring.order, ring.counts, strict=True):
            runner = task.runners[i]
            closes = at + count == task.layers
            seconds = runner.seconds(count, closes=closes)
            stages.append(Placed(runner.peer, (at, at + count), seconds))
            at += count
        used = {stage.peer for stage in stages}
        spares = tuple(one.peer for one in task.runners if one.peer not in used)
        return Placement(tuple(stages), spares, tokens, ring.turn, ring.cost)

    # --- some have named their layers ------------------------------------------------------------

    def explicit(self, layers: LayerRange, candidate: Candidate) -> Placed:
        """The stage of a peer that named its own layers."""
        first, last = layers
        named = f"{candidate.name} (--stage {first}:{last})"
        opens, closes = first == 0, last == self.facts.layers
        runner = self.runner(candidate)
        if last - first > runner.capacity(opens=opens, closes=closes):
            why = refusal(self.facts, layers, setup_of(candidate, self.common), candidate.memory)
            raise _NoPlacement(f"{named}: {why}{self.hint}")
        return Placed(candidate.peer, layers, runner.seconds(last - first, closes=closes))

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
            best = share_out(gaps, runners, floor)
            if best is not None:
                return best
        raise _NoPlacement(self.shortage(gaps))

    def selections(self, gaps: Sequence[Gap]) -> Iterable[list[Runner]]:
        """Sets of auto peers to try, largest first; each in the order of joining."""
        able = [runner for runner in self.autos if runner.capacity() >= 1]
        room = min(sum(gap.layers for gap in gaps), MAX_STAGES - len(self.fixed))
        if len(able) > room:
            quickest = sorted(able, key=lambda runner: runner.seconds(1))[:room]
            yield [runner for runner in able if runner in quickest]
        largest = sorted(able, key=lambda runner: -runner.capacity())
        for count in range(min(room, len(able)), len(gaps) - 1, -1):
            yield [runner for runner in able if runner in largest[:count]]

    def stages_of(self, gap: Gap, found: Split) -> Iterable[Placed]:
        at = gap.first
        for runner, count in found.shares:
            closes = at + count == self.facts.layers
            seconds = runner.seconds(count, closes=closes)
            yield Placed(runner.peer, (at, at + count), seconds)
            at += count

    def shortage(self, gaps: Sequence[Gap]) -> str:
        """Why memory isn't enough, with the numbers and what would help."""
        costs = max((runner.costs for runner in self.autos), key=lambda one: one.layer_weights)
        needs = sum(costs.memory(gap.layers, opens=gap.opens, closes=gap.closes) for gap in gaps)
        offers = sum(runner.memory for runner in self.autos)
        layers = sum(gap.layers for gap in gaps)
        room = sum(max(0, runner.capacity()) for runner in self.autos)
        peers = "1 peer" if len(self.autos) == 1 else f"{len(self.autos)} peers"
        what = self.facts.name if not self.fixed else f"the rest of {self.facts.name}"
        smaller = self.smaller()
        helps = f"serve it with --quantize {smaller}" if smaller else "serve a smaller model"
        if needs > offers:
            return (
                f"{what} needs {size(needs)}, the swarm offers {size(offers)} on {peers}: room for "
                f"{min(room, layers - 1)} of {layers} layers; add a peer, give more memory or "
                f"{helps}{self.hint}"
            )
        if any(one.blocked for one in self.free) and self.opened():
            return (
                f"{what} needs {size(needs)}: no ring of peers that can connect to each other has "
                "room for it; open the ports that are named to those who are left out"
            )
        layer = costs.layer_weights + costs.layer_room
        return (
            f"{what} needs {size(needs)} and the swarm offers {size(offers)} on {peers}, but no "
            f"split fits: a layer takes {size(layer)}, a stage {size(costs.stage)} beside its "
            f"layers, the first {size(costs.first)} and the last {size(costs.last + costs.logits)} "
            f"more; {helps}{self.hint}"
        )

    def opened(self) -> bool:
        """Whether there would be a placement if all could connect to all."""
        opened = [replace(one, blocked=frozenset()) for one in self.candidates]
        found = place(self.facts, opened, self.common.dtype, self.common.quantize)
        return isinstance(found, Placement)

    def smaller(self) -> Quantize | None:
        """The gentlest quantization with which there would be a placement, if any."""
        for mode in smaller_modes(self.facts, self.common):
            found = place(self.facts, self.candidates, self.common.dtype, mode)
            if isinstance(found, Placement):
                return mode
        return None
