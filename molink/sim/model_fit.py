"""Whether a model fits into given PCs, and how fast it would be there."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from molink.facts.footprint import Footprint, StageSetup
from molink.facts.memory_plan import MARGIN_DIVISOR, smaller_modes
from molink.facts.model import ModelFacts, Quantize
from molink.facts.ring_times import HANDLING_S, TOKEN_BYTES
from molink.sim.model_description import ModelDescription
from molink.swarm.placement.links import Links
from molink.swarm.placement.placement import (
    Candidate,
    Placement,
    Unplaceable,
    place_model,
    row_bytes,
    stage_setup,
)

#: Number of tokens before the one whose time is estimated.
_CONTEXT = 512
#: The PC that :func:`needed_memory` assumes: a card on which molink's kernels work.
_USUAL_CARD = StageSetup(kind="cuda", has_block_kernels=True, reads_pages=True)


@dataclass(frozen=True, slots=True)
class ModelFit:
    """How a model fits: ``quantize`` is the least quantization that fits, or ``None``.

    ``tokens_per_s`` is the speed of a single request; 0 if a PC has not been measured. ``reason``
    says why the model does not fit in the requested mode.
    """

    quantize: Quantize | None
    num_stages: int = 0
    tokens_per_s: float = 0.0
    reason: str = ""

    @property
    def fits(self) -> bool:
        """Whether the model fits in any mode."""
        return self.quantize is not None


def needed_memory(facts: ModelFacts) -> int:
    """Return the bytes that a model takes on one card, with room for a short conversation."""
    need = Footprint.of_stage(facts, _USUAL_CARD).min_bytes(facts.layers, opens=True, closes=True)
    return need * MARGIN_DIVISOR // (MARGIN_DIVISOR - 1)


def estimate_fit(
    model: ModelDescription,
    candidates: Sequence[Candidate],
    links: Links | None = None,
    quantize: Quantize = "none",
) -> ModelFit:
    """Place ``model`` as the coordinator would if it were the only one.

    ``quantize`` is the mode in which it would be served. If it does not fit, only modes that take
    less memory are tried.
    """
    links, usual = links or Links(), StageSetup(quantize=quantize)
    reason = ""
    for mode in (quantize, *smaller_modes(model.facts, usual)):
        setup = replace(usual, quantize=mode)
        placed = place_model(model.facts, candidates, setup, links=links)
        if isinstance(placed, Unplaceable):
            reason = reason or placed.reason
            continue
        speed = _tokens_per_s(model, placed, candidates, setup, links)
        return ModelFit(mode, len(placed.stages), speed, reason)
    return ModelFit(None, reason=reason)


def _tokens_per_s(
    model: ModelDescription,
    placed: Placement,
    candidates: Sequence[Candidate],
    setup: StageSetup,
    links: Links,
) -> float:
    """Return a single request's tokens/s: each stage reads its weights and KV once per token."""
    peers: Mapping[str, Candidate] = {one.peer: one for one in candidates}
    facts, seconds = model.facts, 0.0
    for index, stage in enumerate(placed.stages):
        peer = peers[stage.peer]
        if peer.read_rate <= 0:
            return 0.0
        need = Footprint.of_stage(facts, stage_setup(peer, setup))
        count = stage.layers[1] - stage.layers[0]
        layer = need.layer_bytes * model.shape.read_share(1) + _CONTEXT * need.token_bytes
        closes = stage.layers[1] == facts.layers
        seconds += (count * layer + need.last_bytes * closes) / peer.read_rate
        seconds += peer.step_overhead
        if len(placed.stages) > 1:
            after = placed.stages[(index + 1) % len(placed.stages)]
            latency, rate = links.latency_and_rate(stage.peer, after.peer)
            sent = TOKEN_BYTES if closes else row_bytes(facts, setup.dtype)
            seconds += latency + HANDLING_S + sent / rate
    return 1 / seconds
