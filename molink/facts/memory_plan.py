"""Plans a stage's memory: weights, activations, CUDA graphs, a margin, KV blocks."""

from bisect import bisect_right
from dataclasses import dataclass, replace

from molink.errors import UsageError
from molink.facts.footprint import Footprint, StageSetup
from molink.facts.layer_range import format_layers
from molink.facts.model import BLOCK_SIZE, LayerRange, ModelFacts, Quantize

#: Fragmentation and libraries get the budget divided by this.
MARGIN_DIVISOR = 20
#: Tokens of a long conversation, whose KV should fit if at all possible.
CONVERSATION_TOKENS = 8192
#: Quantization modes by ascending loss.
QUANTIZE_MODES: tuple[Quantize, ...] = ("none", "int8", "nf4")


def usable_bytes(budget: int) -> int:
    """Return the budget without the margin."""
    return budget - budget // MARGIN_DIVISOR


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """A stage's memory by purpose, in bytes; the total never exceeds ``budget``."""

    budget: int
    #: The stage's layers and ends of the model.
    weights: int
    #: Rows of the largest step, its logits, and attention's copies and masks.
    activations: int
    #: Captured decode graphs and their buffers; 0 on a CPU.
    graphs: int
    #: Fragmentation and libraries.
    margin: int
    #: The pool of KV blocks, and states of recurrent layers.
    kv: int
    #: Experts per layer in host memory, and the bytes they take there, outside the budget.
    host_experts: int = 0
    host_expert_bytes: int = 0

    @property
    def total(self) -> int:
        """All parts together."""
        return self.without_kv + self.margin + self.kv

    @property
    def without_kv(self) -> int:
        """Bytes that are used even without requests."""
        return self.weights + self.activations + self.graphs

    def __str__(self) -> str:
        """Format the non-empty parts for a person."""
        parts = (
            (self.weights, "weights"),
            (self.activations, "activations"),
            (self.graphs, "CUDA graphs"),
            (self.margin, "margin"),
            (self.kv, "KV"),
        )
        used = " + ".join(f"{format_size(nbytes)} {what}" for nbytes, what in parts if nbytes)
        if not self.host_experts:
            return used
        return f"{used}, {format_size(self.host_expert_bytes)} experts in host memory"


def plan_memory(
    facts: ModelFacts,
    layers: LayerRange,
    target: StageSetup,
    budget: int,
    *,
    expert_memory: int = 0,
    requests: int = 64,
    block_size: int = BLOCK_SIZE,
) -> MemoryPlan:
    """Divide ``budget`` bytes for layers ``first:last``; the rest becomes KV blocks.

    There are at most as many blocks as ``requests`` requests of the model's maximum length need. As
    few routed experts as possible go to host memory, where they may use ``expert_memory`` bytes.

    Raises:
        UsageError: the budget is too small; the message has the figures and what would fit.
    """
    need = Footprint.of_stage(facts, target)
    moved = _count_host_experts(facts, layers, need, budget, expert_memory)
    if moved is None:
        raise UsageError(explain_refusal(facts, layers, target, budget, expert_memory))

    def plan_blocks(blocks: int) -> MemoryPlan:
        return _plan(facts, layers, need, budget, blocks * block_size, moved)

    max_blocks = -(-need.max_model_len * requests // block_size)
    fitting = bisect_right(range(max_blocks + 1), budget, key=lambda each: plan_blocks(each).total)
    return plan_blocks(fitting - 1)


def _count_host_experts(
    facts: ModelFacts, layers: LayerRange, need: Footprint, budget: int, expert_memory: int
) -> int | None:
    """Count experts per layer that must lie in host memory; ``None`` if moving all is not enough.

    Room for a long conversation's KV comes before keeping a few experts on the device.
    """
    talk = max(need.min_tokens, min(need.max_model_len, CONVERSATION_TOKENS))
    for tokens in (talk, need.min_tokens):
        lacking = _plan(facts, layers, need, budget, tokens).total - budget
        if lacking <= 0:
            return 0
        if need.experts is not None and expert_memory:
            holding, usable = need.experts.count_layers(layers), usable_bytes(expert_memory)
            moved = need.experts.count_moved(lacking, holding, usable)
            if moved is not None:
                return moved
    return None


def _plan(
    facts: ModelFacts,
    layers: LayerRange,
    need: Footprint,
    budget: int,
    tokens: int,
    moved: int = 0,
) -> MemoryPlan:
    """Plan layers ``first:last`` and a pool of ``tokens`` tokens, even beyond the budget.

    ``moved`` experts per layer lie in host memory.
    """
    first, last = layers
    count, opens, closes = last - first, first == 0, last == facts.layers
    weights, beside = need.weight_bytes(count, opens=opens, closes=closes), 0
    if need.experts is not None:
        holding = need.experts.count_layers(layers)
        weights -= (count - holding) * need.experts.dense_saving
        weights -= moved * holding * need.experts.device_bytes
        beside = moved * holding * need.experts.host_bytes
    return MemoryPlan(
        budget=budget,
        weights=weights,
        activations=need.activation_bytes(tokens, closes=closes),
        graphs=need.cuda_graph_bytes(count),
        margin=budget - usable_bytes(budget),
        kv=need.pool_bytes(layers, tokens),
        host_experts=moved,
        host_expert_bytes=beside,
    )


def explain_refusal(
    facts: ModelFacts,
    layers: LayerRange,
    target: StageSetup,
    budget: int,
    expert_memory: int = 0,
) -> str:
    """Explain to a person why ``layers`` don't fit ``budget`` bytes, and what would.

    ``expert_memory`` is the number of bytes of host memory that experts may use.
    """
    first, last = layers
    named = f"layers {format_layers(layers)} of {facts.name}"
    need = Footprint.of_stage(facts, target)
    smallest = _plan(facts, layers, need, budget, need.min_tokens)
    room = need.max_layers(usable_bytes(budget), opens=first == 0, closes=False)
    fits = max(0, min(last - first - 1, room))
    layers_fit = f"{fits or 'no'} layer{'s' if fits > 1 else ''} would fit"
    smaller = smaller_mode(facts, layers, target, budget)
    better = f", or --quantize {smaller}" if smaller else ""
    better += _explain_experts(need, layers, smallest.total - budget, expert_memory)
    return (
        f"{named} need at least {format_size(smallest.total)} "
        f"({smallest}), the budget is {format_size(budget)}: {layers_fit}{better}"
    )


def _explain_experts(need: Footprint, layers: LayerRange, lacking: int, expert_memory: int) -> str:
    """Explain whether experts in host memory would free the ``lacking`` bytes."""
    experts = need.experts
    if experts is None:
        return ""
    holding = experts.count_layers(layers)
    moved = experts.count_moved(lacking, holding, 1 << 62)
    if moved is None:
        return "; not even all experts in host memory would free enough"
    asked = holding * moved * experts.host_bytes * MARGIN_DIVISOR // (MARGIN_DIVISOR - 1) + 1
    allowed = f", {format_size(expert_memory)} are allowed" if expert_memory else ""
    return f"; or --expert-memory {format_size(asked)} for experts in host memory{allowed}"


def smaller_mode(
    facts: ModelFacts, layers: LayerRange, target: StageSetup, budget: int
) -> Quantize | None:
    """Return the quantization with the least loss that makes ``layers`` fit, if any."""
    first, last = layers
    for mode in smaller_modes(facts, target):
        need = Footprint.of_stage(facts, replace(target, quantize=mode))
        needs = need.min_bytes(last - first, opens=first == 0, closes=last == facts.layers)
        if needs <= usable_bytes(budget):
            return mode
    return None


def smaller_modes(facts: ModelFacts, target: StageSetup) -> tuple[Quantize, ...]:
    """List modes with smaller projections than ``target`` has, by ascending loss."""
    if facts.quantized != "none" or not facts.projection_bytes:
        return ()
    return QUANTIZE_MODES[QUANTIZE_MODES.index(target.quantize) + 1 :]


def format_size(count: int) -> str:
    """Format bytes for a person: ``14.2 GB``."""
    for unit, factor in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= factor:
            return f"{count / factor:.1f} {unit}"
    return f"{count} bytes"
