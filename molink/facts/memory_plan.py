"""Plans a stage's memory: weights, activations, CUDA graphs, a margin, KV blocks."""

from bisect import bisect_right
from dataclasses import dataclass, replace

from molink.errors import UsageError
from molink.facts.footprint import Footprint, StageSetup
from molink.facts.layer_range import format_layers
from molink.facts.model import BLOCK_SIZE, LayerRange, ModelFacts, Quantize

#: The budget divided by this is left for fragmentation and libraries.
MARGIN_DIVISOR = 20
#: Quantization modes by ascending loss.
QUANTIZE_MODES: tuple[Quantize, ...] = ("none", "int8", "nf4")


def usable_bytes(budget: int) -> int:
    """The budget without the margin."""
    return budget - budget // MARGIN_DIVISOR


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """A stage's memory by purpose, in bytes; the total never exceeds ``budget``."""

    budget: int
    #: The stage's layers and ends of the model.
    weights: int
    #: Rows of the largest step, its logits, attention's copies and masks.
    activations: int
    #: Captured decode graphs and their buffers; 0 on a CPU.
    graphs: int
    #: Fragmentation and libraries.
    margin: int
    #: The pool of KV blocks, and states of recurrent layers.
    kv: int

    @property
    def total(self) -> int:
        """All parts together."""
        return self.without_kv + self.margin + self.kv

    @property
    def without_kv(self) -> int:
        """What is used whether requests live or not."""
        return self.weights + self.activations + self.graphs

    def __str__(self) -> str:
        """The non-empty parts, for a person."""
        parts = (
            (self.weights, "weights"),
            (self.activations, "activations"),
            (self.graphs, "CUDA graphs"),
            (self.margin, "margin"),
            (self.kv, "KV"),
        )
        return " + ".join(f"{format_size(nbytes)} {what}" for nbytes, what in parts if nbytes)


def plan_memory(
    facts: ModelFacts,
    layers: LayerRange,
    target: StageSetup,
    budget: int,
    *,
    requests: int = 64,
    block_size: int = BLOCK_SIZE,
) -> MemoryPlan:
    """Divide ``budget`` bytes for layers ``first:last``; the rest becomes KV blocks.

    The number of blocks is bounded by ``requests`` requests of the model's maximum length.

    Raises:
        UsageError: the budget is too small; tells the numbers and what would fit.
    """
    need = Footprint.of_stage(facts, target)
    smallest = _plan(facts, layers, need, budget, need.min_tokens)
    if smallest.total > budget:
        raise UsageError(explain_refusal(facts, layers, target, budget))

    def plan_blocks(blocks: int) -> MemoryPlan:
        return _plan(facts, layers, need, budget, blocks * block_size)

    max_blocks = -(-need.max_model_len * requests // block_size)
    fitting = bisect_right(range(max_blocks + 1), budget, key=lambda each: plan_blocks(each).total)
    return plan_blocks(fitting - 1)


def _plan(
    facts: ModelFacts, layers: LayerRange, need: Footprint, budget: int, tokens: int
) -> MemoryPlan:
    """The plan for layers ``first:last`` and a pool of ``tokens`` tokens, even over budget."""
    first, last = layers
    count, opens, closes = last - first, first == 0, last == facts.layers
    return MemoryPlan(
        budget=budget,
        weights=need.weight_bytes(count, opens=opens, closes=closes),
        activations=need.activation_bytes(tokens, closes=closes),
        graphs=need.cuda_graph_bytes(count),
        margin=budget - usable_bytes(budget),
        kv=need.pool_bytes(layers, tokens),
    )


def explain_refusal(facts: ModelFacts, layers: LayerRange, target: StageSetup, budget: int) -> str:
    """Why ``layers`` don't fit ``budget`` bytes, and what would; for a person."""
    first, last = layers
    named = f"layers {format_layers(layers)} of {facts.name}"
    need = Footprint.of_stage(facts, target)
    smallest = _plan(facts, layers, need, budget, need.min_tokens)
    room = need.max_layers(usable_bytes(budget), opens=first == 0, closes=False)
    fits = max(0, min(last - first - 1, room))
    layers_fit = f"{fits or 'no'} layer{'s' if fits > 1 else ''} would fit"
    smaller = smaller_mode(facts, layers, target, budget)
    better = f", or --quantize {smaller}" if smaller else ""
    return (
        f"{named} need at least {format_size(smallest.total)} "
        f"({smallest}), the budget is {format_size(budget)}: {layers_fit}{better}"
    )


def smaller_mode(
    facts: ModelFacts, layers: LayerRange, target: StageSetup, budget: int
) -> Quantize | None:
    """The mildest quantization with which ``layers`` would fit, if any."""
    first, last = layers
    for mode in smaller_modes(facts, target):
        need = Footprint.of_stage(facts, replace(target, quantize=mode))
        needs = need.min_bytes(last - first, opens=first == 0, closes=last == facts.layers)
        if needs <= usable_bytes(budget):
            return mode
    return None


def smaller_modes(facts: ModelFacts, target: StageSetup) -> tuple[Quantize, ...]:
    """Modes with smaller projections than those of ``target``, by ascending loss."""
    if facts.quantized != "none" or not facts.projection_bytes:
        return ()
    return QUANTIZE_MODES[QUANTIZE_MODES.index(target.quantize) + 1 :]


def format_size(count: int) -> str:
    """Bytes for a person: ``14.2 GB``."""
    for unit, factor in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= factor:
            return f"{count / factor:.1f} {unit}"
    return f"{count} bytes"
