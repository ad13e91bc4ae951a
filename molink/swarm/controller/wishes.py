"""What a file says that the swarm is to serve: checked as a whole, and compared with what is."""

from collections.abc import Sequence
from dataclasses import replace

import msgspec

from molink.errors import NotAuthorized, RequestError
from molink.swarm.controller.planner import offer_of
from molink.swarm.controller.records import Desired, Pin
from molink.swarm.controller.registry import Registry
from molink.swarm.membership.hygiene import is_model_name
from molink.swarm.placement.allotment import Need, allot, fits, pinned
from molink.swarm.placement.links import Links
from molink.swarm.placement.placement import Candidate, Placement, misfit, parse_range, place
from molink.wire.messages.instructions import MAX_PIPELINES
from molink.wire.messages.requests import ModelWish, Wishes

#: Fields of which a change is told with both values.
_TOLD = ("replicas", "min_stages", "objective", "dtype", "quantize", "micro_batches")


def decode_wishes(payload: memoryview | None) -> Wishes:
    """Those in a message.

    Raises:
        RequestError: there are none.
    """
    try:
        return msgspec.msgpack.decode(payload or b"", type=Wishes)
    except (msgspec.MsgspecError, ValueError) as error:
        raise RequestError(f"this names no models: {error}") from None


def fulfil(wishes: Wishes, source: str, registry: Registry) -> tuple[Desired, ...]:
    """The desired state, which peer ``source`` asks for and holds the files of.

    Raises:
        RequestError: something in it can't be; nothing is done. Its text begins with the name of
            the model that is to blame, if one is, and a colon.
    """
    _check_version(wishes.molink, registry)
    names = [one.model.name for one in wishes.models]
    for name in names:
        if not is_model_name(name):
            raise RequestError("a model's name has to be printable text")
        if names.count(name) > 1:
            raise _refusal(name, "two models are called so: clients could not tell them apart")
    pipelines = sum(one.replicas for one in wishes.models)
    if pipelines > MAX_PIPELINES:
        raise RequestError(
            f"these are {pipelines} pipelines; a swarm has {MAX_PIPELINES} at most: ask for fewer "
            "replicas"
        )
    models = tuple(_desired(one, source, registry) for one in wishes.models)
    bound: dict[str, str] = {}
    for one in models:
        for peer, _ in one.pins:
            other = bound.setdefault(peer, one.facts.name)
            if other != one.facts.name:
                what = f"{registry.name(peer)} is named for {other} too: a PC holds layers of one"
                raise _refusal(one.facts.name, what)
    _check_room(models, registry)
    return models


def changes(old: Sequence[Desired], new: Sequence[Desired]) -> list[str]:
    """What becomes of ``old`` if ``new`` is served, for a person; empty if nothing does.

    Who has brought a model is no difference.
    """
    before = {one.facts.name: one for one in old}
    after = {one.facts.name: one for one in new}
    lines = [f"- {name} is stopped" for name in before if name not in after]
    for name, desired in after.items():
        known = before.get(name)
        if known is None:
            lines.append(f"+ {name}: {_described(desired)}")
        elif replace(known, source="", min_peers=1) != replace(desired, source="", min_peers=1):
            lines.append(f"~ {name}: {_differences(known, desired)}")
    return lines


def _described(desired: Desired) -> str:
    plural = "s" if desired.replicas > 1 else ""
    parts = [f"{desired.replicas} replica{plural}", f"for {desired.objective}"]
    if desired.min_stages:
        parts.append(f"at least {desired.min_stages} stages")
    if desired.mode != "none":
        parts.append(desired.mode)
    if desired.dtype != "auto":
        parts.append(desired.dtype)
    if desired.pins:
        parts.append(f"on {len(desired.pins)} named PC{'s' if len(desired.pins) > 1 else ''}")
    return ", ".join(parts)


def _differences(old: Desired, new: Desired) -> str:
    found = [
        f"{name} {getattr(old, name)} -> {getattr(new, name)}"
        for name in _TOLD
        if getattr(old, name) != getattr(new, name)
    ]
    if old.facts != new.facts:
        found.append("other files: all stages load anew")
    if old.pins != new.pins:
        found.append("other PCs or layers")
    if old.stopped != new.stopped:
        found.append("it is served again")
    if old.applied != new.applied:
        found.append("the file says so from now on")
    return ", ".join(found)


def switched(
    models: Sequence[Desired], name: str, *, served: bool, by: str = ""
) -> tuple[Desired, ...]:
    """All models, with the one called ``name`` served no more, or again.

    One that is written in no file is forgotten. ``by``: only what that peer has brought.

    Raises:
        RequestError: there is none, or it is so already; says what there is.
        NotAuthorized: another peer has brought it.
    """
    found = next((one for one in models if one.facts.name == name), None)
    if found is None:
        names = ", ".join(one.facts.name for one in models)
        what = f"its models are {names}" if names else "it serves no model"
        raise RequestError(f"no model of the swarm is called {name}; {what}")
    if by not in ("", found.source):
        what = "has it served again" if served else "has it stop"
        raise NotAuthorized(f"only the swarm's first PC, or the one that brought {name}, {what}")
    if found.stopped is not served:
        how = "served already" if served else f"stopped already; `molink run {name}` undoes that"
        raise RequestError(f"{name} is {how}")
    changed = replace(found, stopped=not served)
    everything = [changed if one is found else one for one in models]
    return tuple(one for one in everything if one.applied or not one.stopped)


# --- checks --------------------------------------------------------------------------------------


def _check_version(version: str, registry: Registry) -> None:
    if not version:
        return
    others = [
        f"{registry.name(peer)} runs {session.report.version}"
        for peer, session in registry.sessions.items()
        if session.report.version != version
    ]
    if others:
        raise RequestError(
            f"the file wants molink {version}, but {', '.join(others)}: update molink there",
        )


def _refusal(model: str, why: str) -> RequestError:
    return RequestError(f"{model}: {why}")


def _desired(wish: ModelWish, source: str, registry: Registry) -> Desired:
    name = wish.model.name
    named = [_pin(pin, wish, registry) for pin in wish.pins]
    peers = [peer for peer, _ in named]
    if len(set(peers)) < len(peers):
        raise _refusal(name, "a PC is named twice")
    # With a PC go its further devices.
    whole = {peer for peer, stage in named if stage == "auto"}
    devices = [one for one in registry.members if registry.pc(one) in whole and one not in peers]
    pins = tuple(sorted([*named, *((one, "auto") for one in devices)]))
    if wish.replicas > 1 and any(stage != "auto" for _, stage in pins):
        raise _refusal(name, f"of which of its {wish.replicas} replicas are the layers?")
    return Desired(
        facts=wish.model,
        source=source,
        dtype=wish.dtype,
        micro_batches=wish.micro_batches,
        quantize=wish.quantize,
        objective=wish.objective,
        min_stages=wish.min_stages,
        replicas=wish.replicas,
        pins=pins,
        applied=True,
    )


def _pin(pin: Pin, wish: ModelWish, registry: Registry) -> Pin:
    """A PC's id in place of its name, and its stage, which it has to be able to hold."""
    called, stage = pin
    name = wish.model.name
    found = [peer for peer, member in registry.members.items() if called in (peer, member.name)]
    if len(found) != 1:
        what = f"no PC of this swarm is called {called}; `molink status` shows them"
        if found:
            what = f"{len(found)} PCs are called {called}: name one by its id ({', '.join(found)})"
        raise _refusal(name, what)
    if stage != "auto" and parse_range(stage) is None:
        raise _refusal(name, f"layers of {called} are A:B with A < B, not {stage}")
    why = misfit(stage, wish.model)
    if why:
        raise _refusal(name, f"{called} with layers {stage} {why}")
    session = registry.sessions.get(found[0])
    own = session.report.stage if session is not None else "auto"
    if own == "none":
        raise _refusal(name, f"{called} holds no layers now (`--stage none`, or drained)")
    if stage != "auto" and own not in ("auto", stage):
        raise _refusal(name, f"{called} was started with `--stage {own}`; the file says {stage}")
    return found[0], stage


def _check_room(models: Sequence[Desired], registry: Registry) -> None:
    """Whether each model has room for one pipeline on the PCs that are here, beside the others."""
    offers = [
        offer
        for peer, session in registry.sessions.items()
        if (offer := offer_of(peer, session.report)) is not None
    ]
    needs = [Need((one.facts.name, 0), one) for one in models]
    owner = allot(needs, offers, {}, Links())
    for need in needs:
        mine = [one for one in offers if owner.get(one.peer) == need.key]
        if not fits(need.desired, mine):
            raise _refusal(need.key[0], _why_not(need.desired, models, offers))


def _why_not(desired: Desired, models: Sequence[Desired], offers: Sequence[Candidate]) -> str:
    name, pins = desired.facts.name, dict(desired.pins)
    bound = {peer for one in models for peer, _ in one.pins}
    usable = [
        pinned(one, pins) for one in offers if (one.peer in pins if pins else one.peer not in bound)
    ]
    found = place(desired.facts, usable, desired.dtype, desired.quantize)
    if not isinstance(found, Placement):
        return found.reason
    others = ", ".join(one.facts.name for one in models if one.facts.name != name)
    return (
        f"the PCs that are here have room for it, but not beside {others}, since each PC holds "
        "layers of one model: start more PCs, or take a model out"
    )
