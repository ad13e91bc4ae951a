"""``molink ps``: the models that the swarm serves."""

import json
from dataclasses import asdict, dataclass

from molink.swarm.controller.status_schema import PipelineStatus, SwarmStatus, decode_status
from molinkd.cli import daemon_client
from molinkd.cli.local_models import JsonOption
from molinkd.cli.plain_table import format_rows
from molinkd.cli.swarm_verbs import HomeOption
from molinkd.cli.units import format_size


@dataclass(frozen=True, slots=True)
class ServedPipeline:
    """A pipeline of a served model; ``size`` in bytes of memory, weights and KV cache."""

    model: str
    size: int
    pcs: int
    stages: int
    layers: int
    running: int
    waiting: int
    state: str


def ps(as_json: JsonOption = False, home: HomeOption = None) -> None:
    """List the served models: memory, PCs, stages, layers and requests of each pipeline."""
    _, text = daemon_client.wait_until_ready(home, 0.0)
    found = list_pipelines(decode_status(text))
    if as_json:
        print(json.dumps([asdict(one) for one in found], indent=2))
        return
    rows = [("model", "size", "PCs", "stages", "layers", "requests", "state")]
    for one in found:
        counts = ("", "", "", "")
        if one.stages:
            waiting = f", {one.waiting} waiting" if one.waiting else ""
            requests = f"{one.running}{waiting}"
            counts = (str(one.pcs), str(one.stages), str(one.layers), requests)
        size = format_size(one.size) if one.size else ""
        rows.append((one.model, size, *counts, one.state))
    print(format_rows(rows))


def list_pipelines(status: SwarmStatus) -> list[ServedPipeline]:
    """All pipelines, and the models that have none (``waiting`` or ``stopped``)."""
    found = [_describe_pipeline(status, one) for one in status.pipelines]
    formed = {one.model for one in status.pipelines}
    for model in status.models:
        if model.name not in formed:
            state = "stopped" if model.stopped else "waiting"
            found.append(ServedPipeline(model.name, 0, 0, 0, 0, 0, 0, state))
    return found


def _describe_pipeline(status: SwarmStatus, pipeline: PipelineStatus) -> ServedPipeline:
    peers = {one.id: one for one in status.peers}
    pcs = {peers[one.peer].pc or one.peer for one in pipeline.stages if one.peer in peers}
    loads = [
        worker.load
        for peer in status.peers
        for worker in peer.workers
        if worker.pipeline == pipeline.id and worker.load is not None
    ]
    scheduler = pipeline.scheduler
    return ServedPipeline(
        model=pipeline.model or status.model or "",
        size=sum(one.weights + one.kv for one in loads),
        pcs=len(pcs),
        stages=len(pipeline.stages),
        layers=max((one.layers[1] for one in pipeline.stages), default=0),
        running=0 if scheduler is None else scheduler.running,
        waiting=0 if scheduler is None else scheduler.waiting,
        state="ready" if pipeline.ready else pipeline.state or "waiting",
    )
