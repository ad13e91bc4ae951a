"""Members' own words are shown to people and dialled by other PCs: only clean ones pass."""

import math
import re

import msgspec

from molink.facts.pace import MAX_PACE
from molink.plaintext import printable
from molink.swarm.placement.placement import parse_range
from molink.wire.messages.reports import PeerReport, Prefetched, StageFailed

_ADDRESS = re.compile(r"[A-Za-z0-9._:%-]{1,64}\Z")
#: Characters of a name that a column of ``molink status`` has room for.
_MAX_NAME = 64
#: Characters of a reason: the headers that pass it on hold a ring's addresses too.
MAX_REASON = 512


def clean_name(name: str, otherwise: str) -> str:
    """A name without anything that a terminal would obey."""
    return "".join(c for c in name if c.isprintable()).strip()[:_MAX_NAME] or otherwise


def clean_report(report: PeerReport, peer: str) -> PeerReport:
    """A report with its texts cleaned and its measurements finite."""
    device = report.device
    rate = device.read_rate
    return msgspec.structs.replace(
        report,
        name=clean_name(report.name, peer),
        version=clean_name(report.version, "?"),
        system=clean_name(report.system, ""),
        pc="" if report.pc == peer else clean_name(report.pc, ""),
        endpoint=clean_name(report.endpoint, ""),
        addresses=tuple(a for a in report.addresses if _ADDRESS.match(a)),
        stage=report.stage if _is_stage(report.stage) else "none",
        models=tuple(model for model in report.models if is_model_name(model)),
        workers=tuple(
            msgspec.structs.replace(
                worker,
                pipeline=clean_name(worker.pipeline, "?"),
                pace=worker.pace if 1 / MAX_PACE <= worker.pace <= MAX_PACE else 0.0,
            )
            for worker in report.workers
        ),
        prefetched=_clean_prefetched(report.prefetched),
        transfers=tuple(
            msgspec.structs.replace(one, source=clean_name(one.source, ""))
            for one in report.transfers
            if is_model_name(one.model)
        ),
        device=msgspec.structs.replace(
            device,
            name=clean_name(device.name, device.kind),
            read_rate=rate if math.isfinite(rate) and rate > 0 else 0.0,
        ),
    )


def _clean_prefetched(said: Prefetched | None) -> Prefetched | None:
    if said is None:
        return None
    return msgspec.structs.replace(said, reason=printable(said.reason)[:MAX_REASON])


def clean_failed(message: StageFailed) -> StageFailed:
    """A reason that can be shown."""
    return msgspec.structs.replace(message, reason=printable(message.reason)[:MAX_REASON])


def is_model_name(name: str) -> bool:
    """Whether models may be called so. A name is never changed: peers ask each other by it."""
    return bool(name.strip()) and name.isprintable()


def _is_stage(stage: str) -> bool:
    return stage in ("auto", "none") or parse_range(stage) is not None
