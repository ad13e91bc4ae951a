"""The state of the swarm as one peer sees it, for when the coordinator can't be asked."""

import json
from collections.abc import Collection, Sequence
from typing import Any

from molink.swarm.controller.status import report_status, scheduler_status
from molink.wire.messages.instructions import Route
from molink.wire.messages.peer_reports import PeerReport
from molinkd.peer.membership.membership_record import MembershipRecord

_UNREACHABLE = "this PC can't reach its first stage"


def local_status(
    membership: MembershipRecord,
    me: str,
    report: PeerReport,
    routes: Sequence[Route],
    reason: str,
    usable: Collection[str],
) -> bytes:
    """``molink status --json`` (UTF-8) of this peer alone; ``reason`` says why no more.

    ``usable`` are the pipelines whose heads this peer can reach.
    """
    peer = {
        "id": me,
        "name": report.name,
        "address": report.addresses[0] if report.addresses else "",
        **report_status(report),
    }
    status: dict[str, Any] = {
        "swarm": membership.swarm,
        "coordinator": {"addresses": list(membership.addresses), "state": "unreachable"},
        "model": routes[0].model if routes else None,
        "models": [{"name": name} for name in dict.fromkeys(route.model for route in routes)],
        "peers": [peer],
        "pipelines": [
            {
                "id": route.pipeline,
                "model": route.model,
                "epoch": route.epoch,
                "ready": route.pipeline in usable,
                "stages": [],
                "scheduler": scheduler_status(report, route.pipeline),
                "reason": "" if route.pipeline in usable else route.reason or _UNREACHABLE,
            }
            for route in routes
        ],
        "trouble": reason,
    }
    return json.dumps(status).encode("utf-8")
