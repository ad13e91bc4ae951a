"""Resolves a file's desired models: validates them together, and compares them with the current
ones.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import msgspec

from molink.errors import ModelNotFound, NotAuthorized, RequestError
from molink.facts.layer_range import parse_layers
from molink.swarm.controller.planner import candidate_from_report
from molink.swarm.controller.records import DesiredModel, Pin
from molink.swarm.controller.registry import Registry
from molink.swarm.membership.sanitize import is_valid_model_name
from molink.swarm.placement.allocation import PeerDemand, allocate_peers, apply_pin, fits_model
from molink.swarm.placement.links import Links
from molink.swarm.placement.placement import (
    Candidate,
    Placement,
    explain_misfit,
    place_model,
)
from molink.wire.messages.admin import DesiredModels, ModelSpec
from molink.wire.messages.instructions import MAX_PIPELINES

#: Fields whose old and new values are displayed.
_COMPARED_FIELDS = (
    "replicas",
    "min_stages",
    "objective",
    "dtype",
    "quantize",
    "kv_cache_dtype",
    "micro_batches",
)


def decode_desired_models(payload: memoryview | None) -> DesiredModels:
    """Decode a message's payload.

    Raises:
        RequestError: it names no models.
    """
    try:
        return msgspec.msgpack.decode(payload or b"", type=DesiredModels)
    except (msgspec.MsgspecError, ValueError) as error:
        raise RequestError(f"the request names no models: {error}") from None


def resolve_desired_models(
    desired_models: DesiredModels, source: str, registry: Registry
) -> tuple[DesiredModel, ...]:
    """Resolve the desired state that peer ``source``, which holds the files, requests.

    Raises:
        RequestError: part of it is impossible, so nothing is applied. ``param`` names the cause,
            such as ``molink``, ``models[1]`` or ``models[1].pins[0]``.
    """
    _check_version(desired_models.molink, registry)
    specs = desired_models.models
    names = [one.model.name for one in specs]
    for index, name in enumerate(names):
        if not is_valid_model_name(name):
            raise RequestError("a model name must be printable text")
        if names.count(name) > 1:
            raise _request_error(
                index, name, "two models have this name; clients could not tell them apart"
            )
    pipelines = sum(one.replicas for one in specs)
    if pipelines > MAX_PIPELINES:
        raise RequestError(
            f"{pipelines} pipelines requested; a swarm has at most {MAX_PIPELINES}: use fewer "
            "replicas"
        )
    models = tuple(_resolve_model(index, one, source, registry) for index, one in enumerate(specs))
    bound: dict[str, str] = {}
    for index, one in enumerate(models):
        for peer, _ in one.pins:
            other = bound.setdefault(peer, one.facts.name)
            if other != one.facts.name:
                name = registry.name_of(peer)
                what = f"{name} is pinned to {other} too; a PC holds layers of one model"
                wanted = [pc for pc, _ in specs[index].pins]
                pin = next((n for n, pc in enumerate(wanted) if pc in (peer, name)), None)
                raise _request_error(index, one.facts.name, what, pin)
    _check_room(models, registry)
    return models


def describe_changes(old: Sequence[DesiredModel], new: Sequence[DesiredModel]) -> list[str]:
    """Describe the changes from ``old`` to ``new`` for the user; empty if there are none.

    A change of the peer that loaded a model doesn't count.
    """
    before = {one.facts.name: one for one in old}
    after = {one.facts.name: one for one in new}
    lines = [f"- {name} is stopped" for name in before if name not in after]
    for name, desired in after.items():
        known = before.get(name)
        if known is None:
            lines.append(f"+ {name}: {_describe_model(desired)}")
        elif replace(known, source="", min_peers=1) != replace(desired, source="", min_peers=1):
            lines.append(f"~ {name}: {_describe_differences(known, desired)}")
    return lines


def _describe_model(desired: DesiredModel) -> str:
    plural = "s" if desired.replicas > 1 else ""
    parts = [f"{desired.replicas} replica{plural}", f"for {desired.objective}"]
    if desired.min_stages:
        parts.append(f"at least {desired.min_stages} stages")
    if desired.quantization != "none":
        parts.append(desired.quantization)
    if desired.dtype != "auto":
        parts.append(desired.dtype)
    if desired.pins:
        parts.append(f"on {len(desired.pins)} named PC{'s' if len(desired.pins) > 1 else ''}")
    return ", ".join(parts)


def _describe_differences(old: DesiredModel, new: DesiredModel) -> str:
    found = [
        f"{name} {getattr(old, name)} -> {getattr(new, name)}"
        for name in _COMPARED_FIELDS
        if getattr(old, name) != getattr(new, name)
    ]
    if old.facts != new.facts:
        found.append("other files: all stages reload")
    if old.pins != new.pins:
        found.append("other PCs or layers")
    if old.stopped != new.stopped:
        found.append("served again")
    if old.applied != new.applied:
        found.append("managed by the file from now on")
    return ", ".join(found)


def switch_model(
    models: Sequence[DesiredModel], name: str, *, served: bool, requester: str = ""
) -> tuple[DesiredModel, ...]:
    """Return all models, with the one called ``name`` stopped or started again.

    A model that is defined in no file is removed when stopped. With a ``requester``, only models
    that this peer loaded may be switched.

    Raises:
        ModelNotFound: there is no such model; the message lists the models.
        RequestError: it is already in that state.
        NotAuthorized: another peer has loaded it.
    """
    found = next((one for one in models if one.facts.name == name), None)
    if found is None:
        names = ", ".join(one.facts.name for one in models)
        what = f"its models are {names}" if names else "it has no models"
        raise ModelNotFound(f"the swarm has no model {name}; {what}")
    if requester not in ("", found.source):
        what = "start" if served else "stop"
        raise NotAuthorized.owner_only(f"{what} {name}, or the PC that loaded it")
    if found.stopped is not served:
        how = "already served" if served else f"already stopped; start it with `molink run {name}`"
        raise RequestError(f"{name} is {how}")
    changed = replace(found, stopped=not served)
    everything = [changed if one is found else one for one in models]
    return tuple(one for one in everything if one.applied or not one.stopped)


# --- checks --------------------------------------------------------------------------------------


def _check_version(version: str, registry: Registry) -> None:
    if not version:
        return
    others = [
        f"{registry.name_of(peer)} runs {session.report.version}"
        for peer, session in registry.sessions.items()
        if session.report.version != version
    ]
    if others:
        raise RequestError(
            f"the file requires molink {version}, but {', '.join(others)}: update molink there",
            "molink",
        )


def _request_error(index: int, model: str, why: str, pin: int | None = None) -> RequestError:
    """Create the error of the request's model number ``index``, or of its ``pin``."""
    param = f"models[{index}]" + ("" if pin is None else f".pins[{pin}]")
    return RequestError(f"{model}: {why}", param)


def _resolve_model(index: int, spec: ModelSpec, source: str, registry: Registry) -> DesiredModel:
    name = spec.model.name
    named = [_resolve_pin(index, number, spec, registry) for number in range(len(spec.pins))]
    peers = [peer for peer, _ in named]
    if len(set(peers)) < len(peers):
        raise _request_error(index, name, "a PC is pinned twice")
    # A PC includes its further devices.
    whole = {peer for peer, stage in named if stage == "auto"}
    devices = [
        one for one in registry.members if registry.primary_peer(one) in whole and one not in peers
    ]
    pins = tuple(sorted([*named, *((one, "auto") for one in devices)]))
    if spec.replicas > 1 and any(stage != "auto" for _, stage in pins):
        raise _request_error(index, name, f"pinned layers need one replica, not {spec.replicas}")
    return DesiredModel(
        facts=spec.model,
        source=source,
        dtype=spec.dtype,
        micro_batches=spec.micro_batches,
        quantize=spec.quantize,
        kv_cache_dtype=spec.kv_cache_dtype,
        objective=spec.objective,
        min_stages=spec.min_stages,
        replicas=spec.replicas,
        pins=pins,
        applied=True,
    )


def _resolve_pin(index: int, pin: int, spec: ModelSpec, registry: Registry) -> Pin:
    """Resolve a PC's name to its id, and check that it can hold its stage."""
    wanted, stage = spec.pins[pin]
    refuse = partial(_request_error, index, spec.model.name, pin=pin)
    named = (peer for peer, member in registry.members.items() if member.name == wanted)
    peer = wanted if wanted in registry.members else next(named, None)
    if peer is None:
        raise refuse(f"no PC in this swarm is called {wanted}; see `molink status`")
    if stage != "auto" and parse_layers(stage) is None:
        raise refuse(f"layers of {wanted} must be A-B, such as 1-12, not {stage}")
    why = explain_misfit(stage, spec.model)
    if why:
        raise refuse(f"{wanted} with layers {stage} {why}")
    session = registry.sessions.get(peer)
    own = session.report.stage if session is not None else "auto"
    if own == "none":
        raise refuse(f"{wanted} holds no layers now (`--stage none`, or drained)")
    if stage != "auto" and own not in ("auto", stage):
        raise refuse(f"{wanted} was started with `--stage {own}`; the file says {stage}")
    return peer, stage


def _check_room(models: Sequence[DesiredModel], registry: Registry) -> None:
    """Check that each model has room for one pipeline on the live PCs, besides the other models."""
    offers = [
        offer
        for peer, session in registry.sessions.items()
        if (offer := candidate_from_report(peer, session.report)) is not None
    ]
    demands = [PeerDemand((one.facts.name, 0), one) for one in models]
    owners = allocate_peers(demands, offers, {}, Links())
    for index, demand in enumerate(demands):
        mine = [one for one in offers if owners.get(one.peer) == demand.key]
        if not fits_model(demand.desired, mine):
            why = _explain_no_room(demand.desired, models, offers)
            raise _request_error(index, demand.key[0], why)


def _explain_no_room(
    desired: DesiredModel, models: Sequence[DesiredModel], offers: Sequence[Candidate]
) -> str:
    name, pins = desired.facts.name, dict(desired.pins)
    bound = {peer for one in models for peer, _ in one.pins}
    usable = [
        apply_pin(one, pins)
        for one in offers
        if (one.peer in pins if pins else one.peer not in bound)
    ]
    found = place_model(desired.facts, usable, desired.setup)
    if not isinstance(found, Placement):
        return found.reason
    others = ", ".join(one.facts.name for one in models if one.facts.name != name)
    return (
        f"the connected PCs have room for it, but not together with {others}: each PC holds layers "
        "of one model. Start more PCs or remove a model"
    )
