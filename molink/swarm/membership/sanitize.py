"""Sanitizes peers' reports before people see them or other PCs use their addresses."""

import math
import re
import unicodedata

import msgspec

from molink.facts.device import ExpertHost
from molink.facts.layer_range import parse_layers
from molink.facts.profile import MAX_SLOWDOWN
from molink.plaintext import printable
from molink.wire.messages.instructions import PendingPairing
from molink.wire.messages.peer_reports import PeerReport, PrefetchState, StageFailed

_ADDRESS = re.compile(r"[A-Za-z0-9._:%-]{1,64}\Z")
#: Maximum characters of a name, for which a column of ``molink status`` has room.
_MAX_NAME_CHARS = 64
#: Characters allowed in names of PCs, besides letters of every language with their marks, and
#: digits.
_NAME_CATEGORIES = frozenset({"Lu", "Ll", "Lt", "Lm", "Lo", "Mn", "Mc", "Nd"})
_NAME_PUNCTUATION = frozenset("-_.'\N{RIGHT SINGLE QUOTATION MARK} ")
#: Refused letters, which are invisible or look like quotes and colons.
_UNUSUAL_LETTERS = re.compile(
    "[\u02b0-\u02ff\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u3164\ufe00-\ufe0f\uffa0"
    "\U000e0100-\U000e01ef]"
)
#: Suffix of the name of a PC's further device.
_DEVICE = re.compile(r"/(?:cpu|cuda:[0-9]{1,2})(?:\.[0-9]{1,2})?\Z")
_CODE = re.compile(r"[0-9]{4}-[0-9]{4}\Z")
#: Maximum characters of a reason; its header also holds a ring's addresses.
MAX_REASON_CHARS = 512


def sanitize_name(name: str, default: str) -> str:
    """Sanitize the name of a PC or swarm; ``default`` if nothing is left.

    Only characters allowed in names are kept, so that a name can't imitate the surrounding text.
    """
    device = _DEVICE.search(name)
    label = device[0] if device else ""
    kept = "".join(c for c in _UNUSUAL_LETTERS.sub("", name.removesuffix(label)) if _is_of_name(c))
    kept = " ".join(kept.split())[: _MAX_NAME_CHARS - len(label)].strip()
    return f"{kept}{label}" if kept else default


def add_number(name: str, number: int) -> str:
    """Add a number to a sanitized name, to distinguish PCs with the same name."""
    device = _DEVICE.search(name)
    end = f"-{number}{device[0] if device else ''}"
    return f"{name.removesuffix(device[0] if device else '')[: _MAX_NAME_CHARS - len(end)]}{end}"


def _is_of_name(character: str) -> bool:
    return character in _NAME_PUNCTUATION or unicodedata.category(character) in _NAME_CATEGORIES


def quote_name(name: str) -> str:
    """Quote the name of a PC that is no member, for a sentence; it can't end the quotes."""
    return f'"{sanitize_name(name, "?")}"'


def sanitize_label(text: str, default: str) -> str:
    """Return a short text without control characters; ``default`` if nothing is left."""
    return "".join(c for c in text if c.isprintable()).strip()[:_MAX_NAME_CHARS] or default


def sanitize_pairings(pairings: tuple[PendingPairing, ...]) -> tuple[PendingPairing, ...]:
    """Sanitize the leader's pending requests; drop those without a valid code."""
    return tuple(
        msgspec.structs.replace(
            one,
            name=sanitize_name(one.name, "?"),
            address=one.address if _ADDRESS.match(one.address) else "?",
        )
        for one in pairings
        if _CODE.match(one.code)
    )


def sanitize_report(report: PeerReport, peer: str, name: str) -> PeerReport:
    """Return a report with printable texts, finite measurements and the peer's unique name."""
    device = report.device
    return msgspec.structs.replace(
        report,
        name=name,
        version=sanitize_label(report.version, "?"),
        platform=sanitize_label(report.platform, ""),
        primary_peer="" if report.primary_peer == peer else sanitize_label(report.primary_peer, ""),
        api_address=sanitize_label(report.api_address, ""),
        addresses=tuple(a for a in report.addresses if _ADDRESS.match(a)),
        stage=report.stage if _is_valid_stage(report.stage) else "none",
        models=tuple(model for model in report.models if is_valid_model_name(model)),
        workers=tuple(
            msgspec.structs.replace(
                worker,
                pipeline=sanitize_label(worker.pipeline, "?"),
                slowdown=_sanitize_slowdown(worker.slowdown),
            )
            for worker in report.workers
        ),
        prefetch=_sanitize_prefetch(report.prefetch),
        transfers=tuple(
            msgspec.structs.replace(one, source=sanitize_label(one.source, ""))
            for one in report.transfers
            if is_valid_model_name(one.model)
        ),
        device=msgspec.structs.replace(
            device,
            name=sanitize_label(device.name, device.kind),
            read_rate=_sanitize_rate(device.read_rate),
            expert_host=_sanitize_host(device.expert_host),
        ),
    )


def _sanitize_host(host: ExpertHost | None) -> ExpertHost | None:
    if host is None:
        return None
    return msgspec.structs.replace(host, read_rate=_sanitize_rate(host.read_rate))


def _sanitize_rate(rate: float) -> float:
    return rate if math.isfinite(rate) and rate > 0 else 0.0


def _sanitize_slowdown(slowdown: float) -> float:
    return slowdown if 1 / MAX_SLOWDOWN <= slowdown <= MAX_SLOWDOWN else 0.0


def _sanitize_prefetch(prefetch: PrefetchState | None) -> PrefetchState | None:
    if prefetch is None:
        return None
    return msgspec.structs.replace(prefetch, reason=printable(prefetch.reason)[:MAX_REASON_CHARS])


def sanitize_failure(message: StageFailed) -> StageFailed:
    """Return a failure with a printable reason."""
    return msgspec.structs.replace(message, reason=printable(message.reason)[:MAX_REASON_CHARS])


def is_valid_model_name(name: str) -> bool:
    """Whether a model may have this name; names identify models, so they are never changed."""
    return bool(name.strip()) and name.isprintable()


def _is_valid_stage(stage: str) -> bool:
    return stage in ("auto", "none") or parse_layers(stage) is not None
