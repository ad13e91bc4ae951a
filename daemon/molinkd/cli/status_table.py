"""``molink status`` for people."""

from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from molink.plaintext import printable
from molink.swarm.terms import epoch_text
from molink.wire.messages.reports import TransferState
from molinkd.cli.console import transfer_text


def show_status(
    state: dict[str, Any], *, demo: bool, typed: Callable[[str], str] = "`molink {}`".format
) -> None:
    """Print the state of a swarm; ``typed`` is the ``Home.typed`` of the home here."""
    console = Console(highlight=False)
    title = f"Swarm {state['swarm']}" + (" (demo)" if demo else "")
    console.print(_text(f"{title}, {_models(state)}", "bold"))
    coordinator = state.get("coordinator")
    if not isinstance(coordinator, dict) or coordinator.get("state") != "running":
        console.print(_text(f"Only what this PC knows: {state.get('trouble')}", "yellow"))
    elif not state.get("pipelines"):
        console.print(_text(f"No pipeline: {state.get('trouble')}"))
    console.print(_peers(state.get("peers", ())))
    for peer in state.get("peers", ()):
        if peer.get("reason"):
            console.print(_text(f"{peer.get('name')} is {peer['reason']}", "yellow"))
        for one in peer.get("transfers", ()):
            console.print(_text(f"{peer.get('name')} {_transfer(one)}"))
    if state.get("files"):
        console.print(_text(state["files"], "yellow"))
    for pipeline in state.get("pipelines", ()):
        of = f" of {pipeline['model']}" if len(state["pipelines"]) > 1 else ""
        console.print(_text(_pipeline(pipeline, of)))
    for one in state.get("knocks", ()):
        approve = typed(f"approve {one['code']}")
        text = f"{one['name']} ({one['address']}) wants to join: {approve}"
        console.print(_text(f"{text} if it shows that code", "yellow"))
    revoked = [f"{one['name']} ({one['id']})" for one in state.get("revoked", ())]
    if revoked:
        console.print(_text(f"Revoked: {', '.join(revoked)}"))
    for one in state.get("cut_off", ()):
        text = f"{one['name']} ({one['peer']}) was cut off by {one['by']}: {one['reason']}"
        console.print(_text(text, "yellow"))


def _peers(peers: Sequence[dict[str, Any]]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    versions = {peer["version"] for peer in peers if peer.get("version")}
    differ = ("version",) if len(versions) > 1 else ()
    for column in ("peer", "state", "stage", "copy", "device", "endpoint", "pid", *differ):
        table.add_column(column)
    for peer in peers:
        stages = ", ".join(_stage(worker) for worker in peer.get("workers", ()))
        cells = (
            peer.get("name"),
            peer.get("state"),
            stages or peer.get("paused") or "none",
            _copy(peer.get("copied", 0)),
            peer.get("device"),
            peer.get("endpoint"),
            peer.get("daemon_pid"),
            *(peer.get(column) for column in differ),
        )
        table.add_row(*(_text(str(cell or "")) for cell in cells))
    return table


def _text(text: str, style: str = "") -> Text:
    """Text of peers: neither markup nor anything else that is obeyed."""
    return Text(printable(text), style=style)


def _stage(worker: dict[str, Any]) -> str:
    first, last = worker["layers"]
    state = worker.get("state", "")
    return f"layers {first}:{last}" + (f" ({state})" if state not in ("", "ready") else "")


def _transfer(one: dict[str, Any]) -> str:
    source = one.get("from", "")
    state = TransferState(
        model=one["model"], done=one["bytes"], total=one["total"], rate=one["rate"], source=source
    )
    return f"{'copies' if one.get('copy') else 'fetches'} {transfer_text(state)}"


def _copy(percent: int) -> str:
    """How much of the model lies on a PC's disk."""
    return "whole" if percent == 100 else f"{percent} %" if percent else ""


def _models(state: dict[str, Any]) -> str:
    """What is to be served."""
    models = state.get("models", ())
    if len(models) > 1:
        return "models " + ", ".join(map(_model, models))
    only = {"name": state.get("model") or "none", "quantize": state.get("quantize", "none")}
    return f"model {_model(models[0] | only if models else only)}"


def _model(model: dict[str, Any]) -> str:
    kept, replicas = model.get("quantize", "none"), model.get("replicas", 1)
    times = f" ({model.get('ready', 0)} of {replicas} replicas ready)" if replicas > 1 else ""
    times = " (stopped)" if model.get("stopped") else times
    return f"{model['name']}{f' in {kept}' if kept != 'none' else ''}{times}"


def _pipeline(pipeline: dict[str, Any], of: str) -> str:
    ready = "ready" if pipeline.get("ready") else "not ready"
    reason = f": {pipeline['reason']}" if pipeline.get("reason") else ""
    epoch = epoch_text(pipeline["epoch"])
    return f"Pipeline {pipeline['id']}{of} (epoch {epoch}) is {ready}{reason}"
