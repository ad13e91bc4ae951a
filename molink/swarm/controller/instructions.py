"""The messages that say what a stage has to do, and where requests go."""

from molink.swarm.controller.formation import Formation
from molink.swarm.controller.holdings import part_holders
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

#: Peers that are named to fetch a model from: more would not be asked at once.
MAX_SOURCES = 8


def build_instruction(
    formation: Formation, stage: int, desired: DesiredModel, registry: Registry
) -> Assign | FormPipeline | None:
    """What a stage's peer should be told now; ``None`` if it has done all it can."""
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
            root=desired.facts.root,
            partial_sources=part_holders(desired.facts, registry),
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
    """What a peer is told before it forms the ring: its head and links go by all stages' times."""
    record = formation.record
    if formation.state != "linking" or stage in formation.ready:
        return ()
    return tuple(
        StageProfile(pipeline=record.id, epoch=record.epoch, stage=index, profile=one.profile)
        for index, one in enumerate(record.stages)
        if one.profile.is_known
    )


def build_prefetch(
    move: Migration, peer: str, desired: DesiredModel, registry: Registry
) -> Prefetch:
    """The wish that a peer gets its files for the stage that it is to have."""
    return Prefetch(
        number=move.number,
        layers=move.layers_of(peer),
        model=desired.facts.name,
        sources=find_sources(desired, registry),
        root=desired.facts.root,
        partial_sources=part_holders(desired.facts, registry),
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
    """Where requests go: to the first stage of ``ready``, or nowhere, for that ``reason``.

    ``forming`` rises as long as an epoch is being formed and gets on; ``beside`` are the model's
    other pipelines.
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
        partial_sources=part_holders(desired.facts, registry),
        hub=desired.facts.hub,
        reason=reason[:MAX_REASON_CHARS],
        forming_progress=forming_progress,
        sibling_pipelines=sibling_pipelines,
    )


def _max_model_len(desired: DesiredModel, ready: PipelineRecord | None) -> int:
    """Tokens that a request may have: the model's context, or what the KV blocks hold of it."""
    context = desired.facts.max_model_len
    return context if ready is None else min(context, ready.blocks * ready.block_size)


def find_sources(desired: DesiredModel, registry: Registry) -> tuple[str, ...]:
    """Peers to fetch all of the model's files from.

    If nobody has any, the one that brought it: it may be about to come back.
    """
    whole = registry.find_holders(desired.facts.name)[:MAX_SOURCES]
    if whole or part_holders(desired.facts, registry):
        return whole
    return (desired.source,)


def stage_address(stage: StageRecord, registry: Registry) -> StageAddress:
    """Where the worker of a member's stage listens."""
    member = registry.members[stage.peer]
    return StageAddress(
        peer=stage.peer,
        public_key=member.public_key,
        addresses=member.announced.addresses if member.announced is not None else (),
        port=stage.port,
    )
