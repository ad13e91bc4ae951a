"""``molink status`` for people."""

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text


def show_status(state: dict[str, Any], *, demo: bool) -> None:
    """Print the state of a swarm."""
    console = Console(highlight=False)
    title = f"Swarm {state['swarm']}" + (" (demo)" if demo else "")
    console.print(Text(f"{title}, model {state.get('model') or 'none'}", style="bold"))
    coordinator = state.get("coordinator")
    if not isinstance(coordinator, dict) or coordinator.get("state") != "running":
        console.print(Text(f"Only what this PC knows: {state.get('trouble')}", style="yellow"))
    console.print(_peers(state.get("peers", ())))
    for pipeline in state.get("pipelines", ()):
        console.print(Text(_pipeline(pipeline)))


def _peers(peers: Sequence[dict[str, Any]]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    for column in ("peer", "state", "stage", "device", "endpoint", "pid"):
        table.add_column(column)
    for peer in peers:
        stages = ", ".join(_stage(worker) for worker in peer.get("workers", ()))
        cells = (
            peer.get("name"),
            peer.get("state"),
            stages or "none",
            peer.get("device"),
            peer.get("endpoint"),
            peer.get("daemon_pid"),
        )
        table.add_row(*(Text(str(cell or "")) for cell in cells))
    return table


def _stage(worker: dict[str, Any]) -> str:
    first, last = worker["layers"]
    state = worker.get("state", "")
    return f"layers {first}:{last}" + (f" ({state})" if state not in ("", "ready") else "")


def _pipeline(pipeline: dict[str, Any]) -> str:
    ready = "ready" if pipeline.get("ready") else "not ready"
    reason = f": {pipeline['reason']}" if pipeline.get("reason") else ""
    return f"Pipeline {pipeline['id']} (epoch {pipeline['epoch']}) is {ready}{reason}"
