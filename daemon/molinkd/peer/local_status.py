"""Status of the swarm as one peer sees it, used while the coordinator is unreachable."""

from collections.abc import Collection, Sequence

import msgspec

from molink.swarm.controller.status import peer_status, scheduler_status
from molink.swarm.controller.status_schema import (
    CoordinatorStatus,
    ModelStatus,
    PipelineStatus,
    SwarmStatus,
)
from molink.wire.messages.instructions import Route
from molink.wire.messages.peer_reports import PeerReport
from molinkd.peer.membership.membership_record import MembershipRecord

_UNREACHABLE = "this PC can't reach the first stage"


def local_status(
    membership: MembershipRecord,
    me: str,
    report: PeerReport,
    routes: Sequence[Route],
    reason: str,
    usable: Collection[str],
) -> bytes:
    """``molink status --json`` (UTF-8) of this peer alone; ``reason`` tells why.

    ``usable`` are the pipelines whose schedulers this peer can reach.
    """
    pipelines = tuple(
        PipelineStatus(
            id=route.pipeline,
            model=route.model,
            epoch=route.epoch,
            ready=route.pipeline in usable,
            scheduler=scheduler_status(report, route.pipeline),
            reason="" if route.pipeline in usable else route.reason or _UNREACHABLE,
        )
        for route in routes
    )
    status = SwarmStatus(
        swarm=membership.swarm,
        coordinator=CoordinatorStatus("unreachable", tuple(membership.addresses)),
        model=routes[0].model if routes else None,
        models=tuple(map(ModelStatus, dict.fromkeys(route.model for route in routes))),
        peers=(peer_status(me, report),),
        pipelines=pipelines,
        trouble=reason,
    )
    return msgspec.json.encode(status)
