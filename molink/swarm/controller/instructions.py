"""Builds the messages that assign stages, form rings and publish routes."""

from molink.swarm.controller.formation import Formation
from molink.swarm.controller.holdings import partial_holders
from molink.swarm.controller.migration import Migration
from molink.swarm.controller.records import DesiredModel, PipelineRecord, StageRecord
from molink.swarm.controller.registry import Registry
from molink.swarm.membership.sanitize import MAX_REASON_CHARS
from molink.wire.messages.instructions import (
    Assign,
    FormPipeline,
    Prefetch,
    Route,
    StageAddress,
    StageProfile,
)

#: Maximum peers named as sources of a model; more would not be asked at once.
MAX_SOURCES = 8


def build_instruction(
    formation: Formation, stage: int, desired: DesiredModel, registry: Registry
) -> Assign | FormPipeline | None:
    """Build the next instruction for a stage's peer; ``None`` if it has nothing to do."""
    record = formation.record
    if formation.state == "loading" and stage not in formation.loaded:
        return Assign(
            pipeline=record.id,
            epoch=record.epoch,
            stage=stage,
            stages=len(record.stages),
            layers=record.stages[stage].layers,
            model=record.model,
            sources=find_sources(desired, registry),
            dtype=desired.dtype,
            block_size=record.block_size,
            quantize=desired.quantize,
            kv_cache_dtype=desired.kv_cache_dtype,
            root=desired.facts.root,
            partial_sources=partial_holders(desired.facts, registry),
            hub=desired.facts.hub,
            max_model_len=desired.facts.max_model_len,
        )
    if formation.state == "linking" and stage not in formation.ready:
        return FormPipeline(
            pipeline=record.id,
            epoch=record.epoch,
            ring=tuple(stage_address(one, registry) for one in record.stages),
            blocks=record.blocks,
            micro_batches=record.micro_batches,
        )
    return None


def build_profiles(formation: Formation, stage: int) -> tuple[StageProfile, ...]:
    """Build the messages with all stages' profiles.

    They are sent before the ring forms, since the scheduler and the links need them.
    """
    record = formation.record
    if formation.state != "linking" or stage in formation.ready:
        return ()
    return tuple(
        StageProfile(pipeline=record.id, epoch=record.epoch, stage=index, profile=one.profile)
        for index, one in enumerate(record.stages)
        if one.profile.is_known
    )


def build_prefetch(
    migration: Migration, peer: str, desired: DesiredModel, registry: Registry
) -> Prefetch:
    """Build the request to fetch the files of a peer's next stage."""
    return Prefetch(
        number=migration.number,
        layers=migration.layers_of(peer),
        model=desired.facts.name,
        sources=find_sources(desired, registry),
        root=desired.facts.root,
        partial_sources=partial_holders(desired.facts, registry),
        hub=desired.facts.hub,
    )


def build_route(
    pipeline: str,
    epoch: int,
    ready: PipelineRecord | None,
    desired: DesiredModel,
    registry: Registry,
    *,
    reason: str,
    forming_progress: int,
    sibling_pipelines: tuple[str, ...] = (),
) -> Route:
    """Build a route to the first stage of ``ready``, or to nowhere because of ``reason``.

    ``forming_progress`` rises as long as a forming epoch makes progress; ``sibling_pipelines`` are
    the model's other pipelines.
    """
    return Route(
        pipeline=pipeline,
        epoch=epoch,
        model=desired.facts.name,
        is_ready=ready is not None,
        scheduler=None if ready is None else stage_address(ready.stages[0], registry),
        max_model_len=_max_model_len(desired, ready),
        sources=find_sources(desired, registry),
        root=desired.facts.root,
        partial_sources=partial_holders(desired.facts, registry),
        hub=desired.facts.hub,
        reason=reason[:MAX_REASON_CHARS],
        forming_progress=forming_progress,
        sibling_pipelines=sibling_pipelines,
    )


def _max_model_len(desired: DesiredModel, ready: PipelineRecord | None) -> int:
    """Return the longest request in tokens: the lower of the model's limit and the KV blocks'
    capacity.
    """
    context = desired.facts.max_model_len
    return context if ready is None else min(context, ready.blocks * ready.block_size)


def find_sources(desired: DesiredModel, registry: Registry) -> tuple[str, ...]:
    """Return peers that hold all of the model's files.

    If no peer holds any, return the one that loaded the model first, since it may be about to
    reconnect.
    """
    whole = registry.find_holders(desired.facts.name)[:MAX_SOURCES]
    if whole or partial_holders(desired.facts, registry):
        return whole
    return (desired.source,)


def stage_address(stage: StageRecord, registry: Registry) -> StageAddress:
    """Return the address at which a stage's worker listens."""
    member = registry.members[stage.peer]
    return StageAddress(
        peer=stage.peer,
        public_key=member.public_key,
        addresses=member.announced.addresses if member.announced is not None else (),
        port=stage.port,
    )
