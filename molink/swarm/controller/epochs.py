"""Plain functions about an epoch: what makes a new one, its record, and who failed it."""

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
    """What of a desired state needs another pipeline, or epoch, if it changes."""
    facts = structs.replace(desired.facts, hub="")
    return replace(
        desired, facts=facts, source="", min_peers=1, replicas=1, applied=False, stopped=False
    )


def stage_layout(stages: Iterable[StageRecord]) -> list[tuple[str, LayerRange]]:
    """Which peer runs which layers; epochs with the same layout differ in nothing else."""
    return [(stage.peer, stage.layers) for stage in stages]


def has_layout(record: PipelineRecord, placed: Placement) -> bool:
    """Whether a pipeline has the stages of a placement."""
    return stage_layout(record.stages) == [(stage.peer, stage.layers) for stage in placed.stages]


def choose_block_size(
    stages: Iterable[StageRecord], desired: DesiredModel, registry: Registry
) -> int:
    """The largest KV block that the attention of any stage wants, if it can run this model.

    Kernels that read pages in place know neither float32 nor scores that are capped.
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
    """``record`` once all stages have ``loaded``; ``micro_batches`` 0 leaves it to the head."""
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
    """The peer whose fault a failed stage is, and what happened, for a person."""
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
