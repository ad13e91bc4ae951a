"""What one PC more would bring to the swarm that there is, by what was measured of it."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

from molink.facts.model import LayerRange, Objective
from molink.swarm.controller.planner import Planner
from molink.swarm.controller.records import Desired
from molink.swarm.placement.placement import ROWS, Aim, Candidate, Placement, place

#: Kinds of PCs that are tried: a placement among many takes most of a second.
MOST = 3
_NEW = "one more"


@dataclass(frozen=True, slots=True)
class RingProspect:
    """A ring as placement predicts it, with a PC more like that of ``device``; none if empty.

    ``turn_s`` is the time per token of a micro-batch that waits for nothing, ``tokens_per_s`` what
    all streams get: one of them for ``latency``, as many as the ring takes for ``throughput``.
    """

    device: str
    stages: int
    turn_s: float
    tokens_per_s: float


def prospect(device: str, placed: Placement, objective: Objective) -> RingProspect:
    """That of a placement."""
    return RingProspect(device, len(placed.stages), placed.turn, ROWS[objective] / placed.cost)


def outlook(
    planner: Planner,
    desired: Desired,
    candidates: Iterable[Candidate],
    devices: dict[str, str],
    serving: list[tuple[str, LayerRange]],
) -> dict[str, Any]:
    """``now`` and, for each kind of PC, ``more``; nothing where peers have named their layers.

    ``devices`` are what peers have, ``serving`` is the ring that is there.
    """
    known = planner.paces.applied(candidates)
    links = planner.links.with_newcomer(_NEW, [one.peer for one in known])
    aim = Aim(desired.objective, desired.stages)

    def tried(candidates: list[Candidate], serving: list[tuple[str, LayerRange]]) -> Any:
        return place(
            desired.facts,
            candidates,
            desired.dtype,
            desired.quantize,
            aim=aim,
            links=links,
            serving=serving,
        )

    now = tried([*known], serving)
    if not isinstance(now, Placement) or not now.cost:
        return {}
    kinds = {devices.get(one.peer, ""): one for one in known if one.stage == "auto"}
    more = []
    for device, one in list(kinds.items())[:MOST]:
        another = replace(one, peer=_NEW, name=_NEW, blocked=frozenset())
        placed = tried([*known, another], [])
        if isinstance(placed, Placement):
            more.append(asdict(prospect(device, placed, desired.objective)))
    return {"now": asdict(prospect("", now, desired.objective)), "more": more}
