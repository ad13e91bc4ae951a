"""Sanitizes what peers report before people see it or other PCs connect to it."""

import math
import re

import msgspec

from molink.facts.profile import MAX_SLOWDOWN
from molink.plaintext import printable
from molink.swarm.placement.placement import parse_layers
from molink.wire.messages.peer_reports import PeerReport, PrefetchState, StageFailed

_ADDRESS = re.compile(r"[A-Za-z0-9._:%-]{1,64}\Z")
#: Characters of a name; a column of ``molink status`` has room for them.
_MAX_NAME_CHARS = 64
#: Characters of a reason; the header that carries it holds a ring's addresses too.
MAX_REASON_CHARS = 512


def sanitize_name(name: str, default: str) -> str:
    """A name without control characters; ``default`` if nothing is left."""
    return "".join(c for c in name if c.isprintable()).strip()[:_MAX_NAME_CHARS] or default


def sanitize_report(report: PeerReport, peer: str) -> PeerReport:
    """A report with printable texts and finite measurements."""
    device, rate = report.device, report.device.read_rate
    return msgspec.structs.replace(
        report,
        name=sanitize_name(report.name, peer),
        version=sanitize_name(report.version, "?"),
        platform=sanitize_name(report.platform, ""),
        primary_peer="" if report.primary_peer == peer else sanitize_name(report.primary_peer, ""),
        api_address=sanitize_name(report.api_address, ""),
        addresses=tuple(a for a in report.addresses if _ADDRESS.match(a)),
        stage=report.stage if _is_valid_stage(report.stage) else "none",
        models=tuple(model for model in report.models if is_valid_model_name(model)),
        workers=tuple(
            msgspec.structs.replace(
                worker,
                pipeline=sanitize_name(worker.pipeline, "?"),
                slowdown=_sanitize_slowdown(worker.slowdown),
            )
            for worker in report.workers
        ),
        prefetch=_sanitize_prefetch(report.prefetch),
        transfers=tuple(
            msgspec.structs.replace(one, source=sanitize_name(one.source, ""))
            for one in report.transfers
            if is_valid_model_name(one.model)
        ),
        device=msgspec.structs.replace(
            device,
            name=sanitize_name(device.name, device.kind),
            read_rate=rate if math.isfinite(rate) and rate > 0 else 0.0,
        ),
    )


def _sanitize_slowdown(slowdown: float) -> float:
    return slowdown if 1 / MAX_SLOWDOWN <= slowdown <= MAX_SLOWDOWN else 0.0


def _sanitize_prefetch(prefetch: PrefetchState | None) -> PrefetchState | None:
    if prefetch is None:
        return None
    return msgspec.structs.replace(prefetch, reason=printable(prefetch.reason)[:MAX_REASON_CHARS])


def sanitize_failure(message: StageFailed) -> StageFailed:
    """A failure with a printable reason."""
    return msgspec.structs.replace(message, reason=printable(message.reason)[:MAX_REASON_CHARS])


def is_valid_model_name(name: str) -> bool:
    """Whether a model may have this name; names identify models, so they are never changed."""
    return bool(name.strip()) and name.isprintable()


def _is_valid_stage(stage: str) -> bool:
    return stage in ("auto", "none") or parse_layers(stage) is not None
