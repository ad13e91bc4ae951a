"""Functions on epochs: what requires a new one, its record, and which peer failed it."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from msgspec import structs

from molink.facts.model import BLOCK_SIZE, LayerRange
from molink.swarm.controller.formation import Formation
from molink.swarm.controller.records import DesiredModel, PipelineRecord, StageRecord
from molink.swarm.controller.registry import Registry
from molink.swarm.placement.placement import Placement
from molink.wire.messages.peer_reports import StageFailed, StageLoaded


def epoch_spec(desired: DesiredModel) -> DesiredModel:
    """The part of a desired model whose change requires a new pipeline or epoch."""
    facts = structs.replace(desired.facts, hub="")
    return replace(
        desired, facts=facts, source="", min_peers=1, replicas=1, applied=False, stopped=False
    )


def stage_layout(stages: Iterable[StageRecord]) -> list[tuple[str, LayerRange]]:
    """Peer and layers of each stage. Epochs with equal layouts differ in nothing else."""
    return [(stage.peer, stage.layers) for stage in stages]


def has_layout(record: PipelineRecord, placed: Placement) -> bool:
    """Whether a pipeline has the stages of a placement."""
    return stage_layout(record.stages) == [(stage.peer, stage.layers) for stage in placed.stages]


def choose_block_size(
    stages: Iterable[StageRecord], desired: DesiredModel, registry: Registry
) -> int:
    """The largest KV block size that any stage's attention asks for, if it can run this model.

    Kernels that read pages in place support neither float32 nor capped scores.
    """
    facts, dtype = desired.facts, desired.dtype
    wide = dtype == "f32" or (dtype == "auto" and facts.element_bytes > 2)
    if wide or facts.score_heads:
        return BLOCK_SIZE
    sessions = [registry.sessions.get(stage.peer) for stage in stages]
    wanted = [one.report.device.block_size for one in sessions if one is not None]
    return max([BLOCK_SIZE, *wanted])


def formed_record(
    record: PipelineRecord, loaded: Sequence[StageLoaded], blocks: int, micro_batches: int
) -> PipelineRecord:
    """``record`` after all stages have loaded; ``micro_batches`` 0 lets the scheduler choose."""
    stages = tuple(
        replace(stage, port=said.port, max_blocks=said.max_blocks, profile=said.profile)
        for stage, said in zip(record.stages, loaded, strict=True)
    )
    return replace(
        record,
        stages=stages,
        formed=True,
        blocks=blocks,
        micro_batches=micro_batches,
    )


def attribute_failure(
    formation: Formation, message: StageFailed, registry: Registry
) -> tuple[str, str]:
    """The peer at fault for a failed stage, and what happened, for the user."""
    peers = formation.peers
    peer = peers[message.stage]
    text = f"stage {message.stage} on {registry.name_of(peer)}: {message.reason}"
    if message.next_lost:
        peer = peers[(message.stage + 1) % len(peers)]
        text += f" (next is {registry.name_of(peer)})"
    elif message.previous_blocked:
        peer = peers[message.stage - 1]
        text += f" (it had to cut off {registry.name_of(peer)})"
    return peer, text
