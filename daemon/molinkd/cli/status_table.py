"""``molink status`` for people: fits a terminal of 80 columns."""

from collections.abc import Callable, Iterator

from rich.console import Console
from rich.table import Table
from rich.text import Text

from molink.plaintext import printable
from molink.swarm.controller.status_schema import (
    ModelStatus,
    PeerStatus,
    PipelineStatus,
    SwarmStatus,
    TransferStatus,
    WorkerStatus,
    duplicate_names,
    short_device_name,
)
from molink.swarm.terms import epoch_text
from molink.wire.messages.peer_reports import TransferState
from molinkd.cli.daemon_console import transfer_text
from molinkd.cli.units import format_size


def show_status(
    status: SwarmStatus, *, demo: bool, format_command: Callable[[str], str] = "`molink {}`".format
) -> None:
    """Print the state of a swarm; ``format_command`` is the ``Home.typed`` of the home here."""
    console = Console(highlight=False)

    def say(text: str, style: str = "") -> None:
        console.print(_plain_text(text, style), soft_wrap=True)

    console.print(_title_line(status, demo=demo), soft_wrap=True)
    for warning in _first_warnings(status):
        say(warning, "yellow")
    console.print(_stage_table(status))
    console.print()
    console.print(_pc_table(status))
    for peer in status.peers:
        if peer.reason:
            say(f"{peer.name} is {peer.reason}", "yellow")
        for line in filter(None, map(_loading_text, peer.workers)):
            say(f"{peer.name} {line}")
        for transfer in peer.transfers:
            say(f"{peer.name} {_transfer_line(transfer)}")
    for warning in filter(None, (*duplicate_names(status), status.files)):
        say(warning, "yellow")
    for pipeline in status.pipelines:
        of = f" of {pipeline.model}" if len(status.pipelines) > 1 else ""
        say(_pipeline_text(pipeline, of))
    for knock in status.pairing_requests:
        approve = format_command(f"approve {knock.code}")
        text = f"{knock.name} ({knock.address}) wants to join: {approve}"
        say(f"{text} if it shows that code", "yellow")
    if status.revoked:
        revoked = ", ".join(f"{one.name} ({one.id})" for one in status.revoked)
        say(f"Revoked: {revoked}")
    for cut in status.banned_peers:
        text = f"{cut.name} ({cut.peer}) was cut off by {cut.banned_by}: {cut.reason}"
        say(text, "yellow")


def _title_line(status: SwarmStatus, *, demo: bool) -> Text:
    name = f"{status.name} ({status.swarm})" if status.name else status.swarm
    title = _plain_text(
        f"Swarm {name}{' (demo)' if demo else ''}, {_models_text(status)}: ", "bold"
    )
    ready = ("ready", "bold green") if status.is_ready else ("not ready", "bold red")
    return title.append(*ready)


def _first_warnings(status: SwarmStatus) -> Iterator[str]:
    if status.coordinator.state != "running":
        yield f"Only what this PC knows: {status.trouble}"
    elif not status.pipelines:
        yield f"No pipeline: {status.trouble}"


def _stage_table(status: SwarmStatus) -> Table:
    """What each PC does: one line for each of its stages."""
    table = _make_table(
        "peer", "address", "role", "layers", ">memory", ">tokens/s", wrap="peer address role"
    )
    rates = {
        pipeline.id: pipeline.scheduler.tokens_per_s
        for pipeline in status.pipelines
        if pipeline.scheduler is not None
    }
    for peer in status.peers:
        leads = ", leads" if peer.id == status.leader else ""
        for worker in peer.workers or (None,):
            rate = rates.get(worker.pipeline) if worker is not None else None
            cells = (
                peer.name,
                peer.address,
                _role_text(peer, worker) + leads,
                "none" if worker is None else f"{worker.layers[0]}:{worker.layers[1]}",
                _memory_text(peer, worker),
                "" if rate is None else f"{rate:.1f}",
            )
            table.add_row(*map(_plain_text, cells))
    return table


def _pc_table(status: SwarmStatus) -> Table:
    """What each PC is."""
    versions = {peer.version for peer in status.peers if peer.version}
    differ = ("version",) if len(versions) > 1 else ()
    table = _make_table("peer", "id", "device", "copy", "endpoint", *differ, wrap="peer device")
    for peer in status.peers:
        device = short_device_name(peer.device)
        cells = (peer.name, peer.id, device, _copy_text(peer.copied), peer.endpoint, peer.version)
        table.add_row(*map(_plain_text, cells[: len(table.columns)]))
    return table


def _make_table(*columns: str, wrap: str) -> Table:
    """A table without cells that are cut; figures of columns with ``>`` stand to the right.

    ``wrap`` are the columns that get narrower where there is no room.
    """
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for column in columns:
        name = column.lstrip(">")
        table.add_column(
            name,
            justify="left" if name == column else "right",
            overflow="fold",
            no_wrap=name not in wrap.split(),
        )
    return table


def _plain_text(text: str, style: str = "") -> Text:
    """Text of peers: neither markup nor anything else that is obeyed."""
    return Text(printable(text), style=style)


def _role_text(peer: PeerStatus, worker: WorkerStatus | None) -> str:
    if peer.state != "here":
        return peer.state
    if worker is None:
        return peer.paused or ("endpoint only" if peer.stage == "none" else "spare")
    role = f"stage {worker.stage}" if worker.stage else "head"
    return f"{role} {worker.activity}" if worker.activity else role


def _memory_text(peer: PeerStatus, worker: WorkerStatus | None) -> str:
    """What weights and KV take of what molink may use there."""
    load = worker.load if worker is not None else None
    if not peer.memory:
        return ""
    used = load.weights + load.kv if load is not None else 0
    if not used:
        return format_size(peer.memory)
    (taken, unit), (all_of_it, same) = (
        format_size(used).split(" "),
        format_size(peer.memory).split(" "),
    )
    return f"{taken}{'' if unit == same else f' {unit}'}/{all_of_it} {same}"


def _loading_text(worker: WorkerStatus) -> str:
    """How far it is with loading its layers into memory; empty if that isn't told."""
    one = worker.loading
    if one is None:
        return ""
    layers = f"layers {worker.layers[0]}:{worker.layers[1]}"
    state = TransferState(model=layers, done=one.done, total=one.total, rate=round(one.rate))
    return f"loads {transfer_text(state)}"


def _transfer_line(one: TransferStatus) -> str:
    state = TransferState(
        model=one.model, done=one.bytes, total=one.total, rate=round(one.rate), source=one.source
    )
    return f"{'copies' if one.copy else 'fetches'} {transfer_text(state)}"


def _copy_text(percent: int) -> str:
    """How much of the model lies on a PC's disk."""
    return "whole" if percent == 100 else f"{percent} %" if percent else ""


def _models_text(status: SwarmStatus) -> str:
    """What is to be served."""
    if len(status.models) > 1:
        return "models " + ", ".join(map(_model_text, status.models))
    told = status.models[0] if status.models else ModelStatus()
    only = ModelStatus(
        name=status.model or "none",
        quantize=status.quantize,
        replicas=told.replicas,
        ready=told.ready,
        stopped=told.stopped,
    )
    return f"model {_model_text(only)}"


def _model_text(model: ModelStatus) -> str:
    kept, replicas = model.quantize, model.replicas
    times = f" ({model.ready} of {replicas} replicas ready)" if replicas > 1 else ""
    times = " (stopped)" if model.stopped else times
    return f"{model.name}{f' in {kept}' if kept != 'none' else ''}{times}"


def _pipeline_text(pipeline: PipelineStatus, of: str) -> str:
    ready = "ready" if pipeline.ready else "not ready"
    reason = f": {pipeline.reason}" if pipeline.reason else ""
    head, epoch = pipeline.scheduler, epoch_text(pipeline.epoch)
    busy = ""
    if pipeline.ready and not reason and head is not None:
        rate = f"{head.tokens_per_s:.1f} tokens/s"
        busy = f": {head.running} requests, {head.waiting} waiting, {rate}"
    return f"Pipeline {pipeline.id}{of} (epoch {epoch}) is {ready}{reason}{busy}"
