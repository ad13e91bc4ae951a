"""``molink status`` as tables for a terminal of 80 columns."""

from collections.abc import Callable, Collection, Iterator

from rich.console import Console
from rich.table import Table
from rich.text import Text

from molink.facts.layer_range import format_layers, stage_number
from molink.plaintext import printable
from molink.swarm.controller.status_schema import (
    ModelStatus,
    PeerStatus,
    PipelineStatus,
    SwarmStatus,
    TransferStatus,
    WorkerStatus,
    short_device_name,
)
from molink.swarm.election.terms import epoch_text
from molink.swarm.membership.sanitize import quote_name
from molink.wire.messages.peer_reports import TransferState
from molinkd.cli.transfer_line import transfer_text
from molinkd.cli.translation import tr
from molinkd.cli.units import format_size, format_usage


def show_status(
    status: SwarmStatus, *, demo: bool, format_command: Callable[[str], str] = "`molink {}`".format
) -> None:
    """Print the state of a swarm."""
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
            say(tr("{pc} is {state}", pc=peer.name, state=peer.reason), "yellow")
        for line in filter(None, map(_loading_text, peer.workers)):
            say(f"{peer.name} {line}")
        for transfer in peer.transfers:
            say(f"{peer.name} {_transfer_line(transfer)}")
    if status.files:
        say(status.files, "yellow")
    for line in _pipeline_lines(status):
        say(line)
    for request in status.pairing_requests:
        approve = format_command(f"approve {request.code}")
        text = tr(
            "{pc} ({address}) wants to join: {command} if that PC shows the same code",
            pc=quote_name(request.name),
            address=request.address,
            command=approve,
        )
        say(text, "yellow")
    if status.revoked:
        revoked = ", ".join(f"{one.name} ({one.id})" for one in status.revoked)
        say(tr("Revoked: {pcs}", pcs=revoked))
    for cut in status.banned_peers:
        text = tr(
            "{pc} was banned by {by}: {reason}",
            pc=f"{cut.name} ({cut.peer})",
            by=cut.banned_by,
            reason=cut.reason,
        )
        say(text, "yellow")


def _title_line(status: SwarmStatus, *, demo: bool) -> Text:
    name = f"{status.name} ({status.swarm})" if status.name else status.swarm
    if demo:
        name += tr(" (demo)")
    text = tr("Swarm {name}, {models}: ", name=name, models=_models_text(status))
    title = _plain_text(text, "bold")
    ready = (tr("ready"), "bold green") if status.is_ready else (tr("not ready"), "bold red")
    return title.append(*ready)


def _first_warnings(status: SwarmStatus) -> Iterator[str]:
    if status.coordinator.state != "running":
        yield tr("Coordinator unavailable; local information only: {reason}", reason=status.trouble)
    elif not status.pipelines:
        yield tr("No pipeline: {reason}", reason=status.trouble)


def _stage_table(status: SwarmStatus) -> Table:
    """List each PC's stages, one per line."""
    table = _make_table(
        tr("peer"),
        tr("address"),
        tr("role"),
        tr("layers"),
        ">" + tr("weights+KV/all"),
        ">" + tr("tokens/s"),
        wrap=(tr("peer"), tr("address"), tr("role")),
    )
    rates = {
        pipeline.id: pipeline.scheduler.tokens_per_s
        for pipeline in status.pipelines
        if pipeline.scheduler is not None
    }
    for peer in status.peers:
        leads = tr(", leads") if peer.id == status.leader else ""
        for worker in peer.workers or (None,):
            rate = rates.get(worker.pipeline) if worker is not None else None
            cells = (
                peer.name,
                peer.address,
                _role_text(peer, worker) + leads,
                tr("none") if worker is None else format_layers(worker.layers),
                _memory_text(peer, worker),
                "" if rate is None else f"{rate:.1f}",
            )
            table.add_row(*map(_plain_text, cells))
    return table


def _pc_table(status: SwarmStatus) -> Table:
    """List the PCs."""
    versions = {peer.version for peer in status.peers if peer.version}
    differ = (tr("version"),) if len(versions) > 1 else ()
    columns = tr("peer"), tr("id"), tr("device"), tr("copy"), tr("endpoint"), *differ
    table = _make_table(*columns, wrap=(tr("peer"), tr("device")))
    for peer in status.peers:
        device = short_device_name(peer.device)
        cells = (peer.name, peer.id, device, _copy_text(peer.copied), peer.endpoint, peer.version)
        table.add_row(*map(_plain_text, cells[: len(table.columns)]))
    return table


def _make_table(*columns: str, wrap: Collection[str]) -> Table:
    """Create a table without truncated cells; columns with ``>`` are right-aligned.

    ``wrap`` names the columns that shrink if there is no room.
    """
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for column in columns:
        name = column.lstrip(">")
        table.add_column(
            name,
            justify="left" if name == column else "right",
            overflow="fold",
            no_wrap=name not in wrap,
        )
    return table


def _plain_text(text: str, style: str = "") -> Text:
    """Return untrusted text without markup or control characters."""
    return Text(printable(text), style=style)


def _role_text(peer: PeerStatus, worker: WorkerStatus | None) -> str:
    if peer.state != "online":
        return peer.state
    if worker is None:
        return peer.paused or (tr("endpoint only") if peer.stage == "none" else tr("standby"))
    role = tr("stage {number}", number=stage_number(worker.stage))
    return f"{role} {worker.activity}" if worker.activity else role


def _memory_text(peer: PeerStatus, worker: WorkerStatus | None) -> str:
    """Format the memory of weights and that reserved for KV, of the available memory."""
    load = worker.load if worker is not None else None
    if not peer.memory:
        return ""
    if load is None:
        return format_size(peer.memory)
    return format_usage((load.weights, load.kv), peer.memory)


def _loading_text(worker: WorkerStatus) -> str:
    """Format the progress of loading weights; empty if unknown."""
    one = worker.loading
    if one is None:
        return ""
    layers = tr("layers {range}", range=format_layers(worker.layers))
    state = TransferState(model=layers, done=one.done, total=one.total, rate=round(one.rate))
    return tr("loads {transfer}", transfer=transfer_text(state))


def _transfer_line(one: TransferStatus) -> str:
    state = TransferState(
        model=one.model, done=one.bytes, total=one.total, rate=round(one.rate), source=one.source
    )
    text = transfer_text(state)
    return (
        tr("copies {transfer}", transfer=text)
        if one.copy
        else tr("fetches {transfer}", transfer=text)
    )


def _copy_text(percent: int) -> str:
    """Format how much of the model is on a PC's disk."""
    return tr("whole") if percent == 100 else f"{percent} %" if percent else ""


def _models_text(status: SwarmStatus) -> str:
    """Format the served models."""
    if len(status.models) > 1:
        return tr("models {names}", names=", ".join(map(_model_text, status.models)))
    first = status.models[0] if status.models else ModelStatus()
    only = ModelStatus(
        name=status.model or tr("none"),
        quantize=status.quantize,
        kv_cache_dtype=first.kv_cache_dtype,
        replicas=first.replicas,
        ready=first.ready,
        stopped=first.stopped,
    )
    return tr("model {name}", name=_model_text(only))


def _model_text(model: ModelStatus) -> str:
    kept, replicas = model.quantize, model.replicas
    form = tr(" in {format}", format=kept) if kept != "none" else ""
    if model.kv_cache_dtype != "auto":
        form += tr(", KV in {format}", format=model.kv_cache_dtype)
    times = ""
    if replicas > 1:
        times = tr(" ({ready} of {all} replicas ready)", ready=model.ready, all=replicas)
    times = tr(" (stopped)") if model.stopped else times
    return f"{model.name}{form}{times}"


def _pipeline_lines(status: SwarmStatus) -> Iterator[str]:
    for pipeline in status.pipelines:
        of = tr(" of {model}", model=pipeline.model) if len(status.pipelines) > 1 else ""
        yield _pipeline_text(pipeline, of)
        used, reserved = status.kv_usage(pipeline)
        if reserved:
            yield tr(
                "KV cache{of}: {used} of {reserved} used",
                of=of,
                used=format_size(used),
                reserved=format_size(reserved),
            )


def _pipeline_text(pipeline: PipelineStatus, of: str) -> str:
    ready = tr("ready") if pipeline.ready else tr("not ready")
    reason = f": {pipeline.reason}" if pipeline.reason else ""
    scheduler, epoch = pipeline.scheduler, epoch_text(pipeline.epoch)
    busy = ""
    if pipeline.ready and not reason and scheduler is not None:
        busy = tr(
            ": {running} requests, {waiting} waiting, {rate} tokens/s",
            running=scheduler.running,
            waiting=scheduler.waiting,
            rate=f"{scheduler.tokens_per_s:.1f}",
        )
    text = tr(
        "Pipeline {id}{of} (epoch {epoch}) is {state}",
        id=pipeline.id,
        of=of,
        epoch=epoch,
        state=ready,
    )
    return f"{text}{reason}{busy}"
