"""Estimates what one more PC would bring to the running swarm, from measurements."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

from molink.facts.model import LayerRange, Objective
from molink.swarm.controller.planner import Planner
from molink.swarm.controller.records import DesiredModel
from molink.swarm.placement.placement import (
    MICRO_BATCH_ROWS,
    Candidate,
    Placement,
    PlacementGoal,
    place_model,
)

#: Kinds of PCs tried: one placement over many peers takes most of a second.
MAX_KINDS = 3
_NEW_PEER = "one more"


@dataclass(frozen=True, slots=True)
class RingEstimate:
    """A ring as placement predicts it with one more PC like ``device``; with none if empty.

    ``round_trip_s`` is the time per token of a micro-batch that waits for nothing. ``tokens_per_s``
    is the total over all streams: one for ``latency``, as many as the ring takes for
    ``throughput``.
    """

    device: str
    stages: int
    round_trip_s: float
    tokens_per_s: float


def estimate_ring(device: str, placed: Placement, objective: Objective) -> RingEstimate:
    """The estimate for a placement."""
    return RingEstimate(
        device,
        len(placed.stages),
        placed.round_trip_time,
        MICRO_BATCH_ROWS[objective] / placed.cost,
    )


def estimate_scale_out(
    planner: Planner,
    desired: DesiredModel,
    candidates: Iterable[Candidate],
    devices: dict[str, str],
    serving: list[tuple[str, LayerRange]],
) -> dict[str, Any]:
    """``now``, and ``more`` for each kind of PC; empty where peers have named their layers.

    ``devices`` maps peers to their devices; ``serving`` is the running ring.
    """
    known = planner.read_rates.apply_rates(candidates)
    links = planner.links.with_newcomer(_NEW_PEER, [one.peer for one in known])
    aim = PlacementGoal(desired.objective, desired.target_stages)

    def tried(candidates: list[Candidate], serving: list[tuple[str, LayerRange]]) -> Any:
        return place_model(
            desired.facts,
            candidates,
            desired.dtype,
            desired.quantize,
            goal=aim,
            links=links,
            serving=serving,
        )

    now = tried([*known], serving)
    if not isinstance(now, Placement) or not now.cost:
        return {}
    kinds = {devices.get(one.peer, ""): one for one in known if one.stage == "auto"}
    more = []
    for device, one in list(kinds.items())[:MAX_KINDS]:
        another = replace(one, peer=_NEW_PEER, name=_NEW_PEER, unreachable=frozenset())
        placed = tried([*known, another], [])
        if isinstance(placed, Placement):
            more.append(asdict(estimate_ring(device, placed, desired.objective)))
    return {"now": asdict(estimate_ring("", now, desired.objective)), "more": more}
