"""``molink pull``, ``run`` and ``stop``."""

import json
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Annotated
from urllib.parse import quote

import typer
from rich.console import Console

from molink.checkpoint.model_names import DEMO_MODEL_NAME
from molink.checkpoint.model_source import (
    check_model_name,
    find_catalog_entry,
    find_local_model,
    find_served_name,
)
from molink.errors import Unavailable, UsageError
from molink.facts.layer_range import parse_layers
from molink.plaintext import printable
from molink.swarm.artifacts.transfer import TransferRate
from molink.wire.messages.admin import LoadModel, LoadModelReply, StopServing, SwitchModel
from molink.wire.messages.control_plane import DoneReply
from molink.wire.messages.peer_reports import TransferState
from molinkd.cli import daemon_client
from molinkd.cli.confirmation import YesOption, confirm_action
from molinkd.cli.small_model import resolve_model_name
from molinkd.cli.swarm_capacity import check_fit
from molinkd.cli.swarm_verbs import HomeOption
from molinkd.cli.transfer_line import TransferLine
from molinkd.cli.transfer_progress import POLL_INTERVAL_S, run_with_progress, show_progress
from molinkd.peer.artifacts.pulling import fetch_whole_model
from molinkd.peer.artifacts.transfers import Progress
from molinkd.peer.home import Home

ModelArgument = Annotated[
    str,
    typer.Argument(
        help="Short name (molink search), OWNER/NAME of the Hugging Face hub, folder, GGUF file."
    ),
]


def pull(
    model: ModelArgument,
    layers: Annotated[
        str | None, typer.Option(help="Only the files with layers A-B.  [default: all]")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Download a model from the Hugging Face hub."""
    part = parse_layers(layers) if layers is not None else None
    if layers is not None and part is None:
        raise UsageError(f"--layers must be A-B, such as 1-12, not {layers!r}")
    model = resolve_model_name(model)
    stop, progress = threading.Event(), Progress(source="the hub")

    def get() -> Path:
        return fetch_whole_model(model, Home.find_home(), progress, stop, part)

    path = run_with_progress(get, model, progress, stop)
    if as_json:
        print(json.dumps({"model": model, "path": str(path), "bytes": progress.total}))
    else:
        print(printable(f"{model} is available at {path}"))


def run_model(
    model: ModelArgument,
    text: Annotated[
        str | None, typer.Argument(help="One question; omit it for a conversation.")
    ] = (None),
    timeout: Annotated[
        float, typer.Option(help="Seconds to wait after its files are local.")
    ] = 600.0,
    api_key: Annotated[
        str | None,
        typer.Option(
            envvar="MOLINK_API_KEY", help="API key of the endpoint.  [default: this PC's]"
        ),
    ] = None,
    home: HomeOption = None,
) -> None:
    """Serve a model, wait until it is ready, and chat."""
    from molinkd.cli.chat import run_chat

    place = Home.find_home(home)
    found = daemon_client.find_daemon(place)
    if found is None:
        check_model_name(model)
        raise Unavailable(
            "molink is not running here: start it with "
            f"{place.format_command(f'up --model {model}')}, or join a swarm with "
            f"{place.format_command('join')}"
        )
    line = TransferLine(Console(stderr=True, highlight=False, soft_wrap=True))
    name, status = find_served_name(model), daemon_client.fetch_status(found)
    stopped, served = daemon_client.stopped_models(status), daemon_client.served_models(status)
    entry = find_catalog_entry(model)
    if name not in (*stopped, *served):
        # The swarm knows names that this PC does not: an applied file may be on another PC.
        model = resolve_model_name(model)
        name = find_served_name(model)
    if name in stopped:
        daemon_client.send_request(found, SwitchModel(ref=0, model=name, served=True))
    elif name not in served:
        if entry is not None:
            check_fit(entry, place, status)
        name = _request_model(found, model, line)
    endpoint = found.endpoints[0]
    _wait_until_ready(found, endpoint, name, timeout, line)
    format_command = found.home.format_command
    key = api_key or daemon_client.own_api_key(place, endpoint)
    raise typer.Exit(run_chat(f"{endpoint}/v1", text, name, key, format_command=format_command))


def stop(
    model: Annotated[
        str | None, typer.Argument(help="Unload only this model.  [default: all]")
    ] = None,
    yes: YesOption = False,
    home: HomeOption = None,
) -> None:
    """Unload one model, or all, and free its memory; PCs stay in the swarm."""
    found = daemon_client.require_daemon(home)
    status, format_command = daemon_client.fetch_status(found), Home.find_home(home).format_command
    if model is not None:
        name = find_served_name(model)
        confirm_action(f"Unload {name} on all PCs of the swarm?", yes=yes)
        daemon_client.send_request(found, SwitchModel(ref=0, model=name))
        print(printable(f"Unloaded {name}. Undo: {format_command(f'run {model}')}."))
        if any(one.get("applied") for one in status["models"] if one["name"] == name):
            print("The swarm's file still lists it; `molink apply` would load it again.")
        return
    served = daemon_client.served_models(status)
    if served:
        confirm_action(f"Unload {', '.join(served)} on all PCs of the swarm?", yes=yes)
    reply, _ = daemon_client.send_request(found, StopServing(ref=0))
    assert isinstance(reply, DoneReply)
    again = f"{format_command('run MODEL')} loads a model."
    print(printable(f"Unloaded {', '.join(served) or 'nothing'}. {again}"))


def _request_model(found: daemon_client.RunningDaemon, model: str, line: TransferLine) -> str:
    """Ask the daemon to load a model and the swarm to serve it; returns its served name."""
    local = None if model == DEMO_MODEL_NAME else find_local_model(model)
    wanted = model if local is None else str(local)
    speed, doing = TransferRate(time.monotonic()), ""
    while True:
        far, _ = daemon_client.send_request(found, LoadModel(ref=0, model=wanted))
        assert isinstance(far, LoadModelReply)
        if far.state == "asked":
            line.clear_line()
            return far.name
        if far.state != doing:
            speed, doing = TransferRate(time.monotonic(), far.done), far.state
        progress = Progress(far.done, far.total)
        fetching = "the hub" if local is None else "disk (unpacking once)"
        progress.source = fetching if doing == "fetching" else "disk (hashing once)"
        show_progress(line, far.name or model, progress, speed)
        time.sleep(POLL_INTERVAL_S)


def _wait_until_ready(
    found: daemon_client.RunningDaemon, endpoint: str, name: str, timeout: float, line: TransferLine
) -> None:
    """Wait until the local endpoint can serve the model ``name``.

    Raises:
        Unavailable: not ready within ``timeout`` seconds after the last transfer.
    """
    deadline = time.monotonic() + timeout
    while not _is_ready(endpoint, name):
        status = daemon_client.fetch_status(found)
        transfers = [
            TransferState(
                model=f"{one['model']} to {peer['name']}"[:256],
                done=one["bytes"],
                total=one["total"],
                rate=one["rate"],
                source=one["from"],
                is_replica=one["copy"],
            )
            for peer in status.get("peers", ())
            for one in peer.get("transfers", ())
        ]
        if any(not one.is_replica for one in transfers):
            deadline = time.monotonic() + timeout
        line.show_transfers(transfers)
        if time.monotonic() >= deadline:
            line.clear_line()
            why = status.get("trouble") or "its pipeline is still forming"
            more = found.home.format_command("status")
            raise Unavailable(f"{name} is not ready yet: {why}; {more} shows details")
        time.sleep(POLL_INTERVAL_S)
    line.clear_line()


def _is_ready(endpoint: str, name: str) -> bool:
    try:
        with urllib.request.urlopen(f"{endpoint}/readyz?model={quote(name)}", timeout=10) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, TimeoutError, ConnectionError):
        return False
