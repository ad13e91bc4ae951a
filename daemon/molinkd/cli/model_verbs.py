"""Verbs about models: ``pull``, ``list``, ``rm``, ``run``, ``stop``."""

import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any, TypeVar
from urllib.parse import quote

import typer
from rich.console import Console
from rich.table import Table

from molink.checkpoint import hub
from molink.checkpoint.folder import ModelFolder
from molink.checkpoint.source import (
    DEMO_MODEL,
    find_model,
    is_repository,
    local_model,
    local_name,
    short_name,
)
from molink.errors import BrokenModel, MolinkError, Unavailable, UsageError
from molink.plaintext import printable
from molink.swarm.placement.placement import parse_range
from molink.swarm.throughput import Throughput
from molink.wire.messages.control import Done
from molink.wire.messages.reports import TransferState
from molink.wire.messages.requests import Bringing, BringModel, StopServing, SwitchModel
from molinkd.cli import local_daemon
from molinkd.cli.console import TransferLine
from molinkd.cli.swarm_verbs import HomeOption
from molinkd.peer.artifacts.models_here import ModelHere, choose, delete, models_here
from molinkd.peer.artifacts.progress import Progress
from molinkd.peer.home import Home

#: Between two looks at what is waited for, in seconds.
LOOK_S = 0.5

ModelArgument = Annotated[
    str, typer.Argument(help="Hugging Face name (OWNER/NAME), folder, GGUF file or molink-demo.")
]
T = TypeVar("T")


def pull(
    model: ModelArgument,
    layers: Annotated[
        str | None, typer.Option(help="Only the files that have layers A:B.  [default: all]")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Have a model on this PC: fetch what is missing of it from the Hugging Face hub."""
    part = parse_range(layers) if layers is not None else None
    if layers is not None and (part is None or part[0] >= part[1]):
        raise UsageError(f"--layers is A:B with A < B, not {layers!r}")
    from_hub = is_repository(model) and local_model(model) is None
    stop, progress = threading.Event(), Progress(source="the hub")

    def have(*, compare: bool = False) -> Path:
        if from_hub and part is not None:
            path = hub.pull(model, progress, stop, part)
        else:
            into = Home.find().unpacked
            path = find_model(model, progress, stop, unpack_into=into, compare=compare).path
        ModelFolder.open(path, part)
        return path

    def get() -> Path:
        try:
            return have()
        except BrokenModel:
            if local_model(model) is not None or part is not None:
                raise
            return have(compare=True)

    path = watched(get, model, progress, stop)
    if as_json:
        print(json.dumps({"model": model, "path": str(path), "bytes": progress.total}))
    else:
        print(printable(f"{model} is here: {path}"))


def list_models(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    home: HomeOption = None,
) -> None:
    """Show the models on this PC: their size, where they lie, and which one is served."""
    place = Home.find(home)
    served = _served(place)
    models = models_here(place)
    if as_json:
        print(json.dumps([_as_json(one, served) for one in models], indent=2))
        return
    table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0))
    for column in ("model", "size", "where", "", "path"):
        table.add_column(column, overflow="fold")
    for one in models:
        state = "served" if any(map(one.is_called, served)) else "" if one.whole else "in part"
        cells = (one.name, f"{one.size / 1e9:.2f} GB", one.where, state, str(one.path))
        table.add_row(*map(printable, cells))
    Console(highlight=False, markup=False).print(table)


def rm(
    model: Annotated[str, typer.Argument(help="As `molink list` shows it.")],
    hf_cache: Annotated[
        bool, typer.Option("--hf-cache", help="Delete it from the Hugging Face cache too.")
    ] = False,
    home: HomeOption = None,
) -> None:
    """Delete a model from this PC's disk; never one that is served, nor a folder of yours."""
    place = Home.find(home)
    chosen = choose(place, models_here(place), model, hf_cache=hf_cache)
    served = _served(place)
    if any(one.is_called(name) for one in chosen for name in served):
        first = place.typed("stop" if len(served) < 2 else f"stop {model}")
        raise UsageError(f"{model} is being served: {first} first, or serve another one")
    freed = sum(map(delete, chosen))
    print(printable(f"{model} is deleted: {freed / 1e9:.2f} GB are free again."))


def run_model(
    model: ModelArgument,
    text: Annotated[str | None, typer.Argument(help="One question; none for a conversation.")] = (
        None
    ),
    timeout: Annotated[
        float, typer.Option(help="Seconds to wait for it once its files are here.")
    ] = 600.0,
    api_key: Annotated[
        str | None,
        typer.Option(envvar="MOLINK_API_KEY", help="Key of the endpoint.  [default: none]"),
    ] = None,
    home: HomeOption = None,
) -> None:
    """Have the swarm serve a model, unless it does, wait for it, and chat with it."""
    from molinkd.cli.chat import run_chat

    place = Home.find(home)
    found = local_daemon.find_daemon(place)
    if found is None:
        raise Unavailable(
            f"no molink runs here: start one with {place.typed(f'up --model {model}')}, or join "
            f"one with {place.typed('join')}"
        )
    line = TransferLine(Console(stderr=True, highlight=False, soft_wrap=True))
    name, status = _called(model), local_daemon.fetch_status(found)
    if name in local_daemon.stopped(status):
        local_daemon.ask(found, SwitchModel(ref=0, model=name, served=True))
    elif name not in local_daemon.served(status):
        name = _bring(found, model, line)
    endpoint = found.endpoints[0]
    _wait_served(found, endpoint, name, timeout, line)
    typed = found.home.typed
    raise typer.Exit(run_chat(f"{endpoint}/v1", text, name, api_key, typed=typed))


def stop(
    model: Annotated[
        str | None, typer.Argument(help="Only this one of several.  [default: all]")
    ] = None,
    home: HomeOption = None,
) -> None:
    """Have the swarm serve a model no more, or none at all: its memory is free; PCs stay."""
    found = local_daemon.need_daemon(home)
    status, typed = local_daemon.fetch_status(found), Home.find(home).typed
    if model is not None:
        name = _called(model)
        local_daemon.ask(found, SwitchModel(ref=0, model=name))
        print(printable(f"{name} is not served any more; {typed(f'run {model}')} undoes that."))
        if any(one.get("applied") for one in status["models"] if one["name"] == name):
            print("The file of the swarm names it still: `molink apply` has it served again, too.")
        return
    served = local_daemon.served(status)
    reply, _ = local_daemon.ask(found, StopServing(ref=0))
    assert isinstance(reply, Done)
    are = "are" if len(served) > 1 else "is"
    again = f"{typed('run MODEL')} has a model served."
    print(printable(f"{', '.join(served) or 'No model'} {are} not served any more; {again}"))


def _called(model: str) -> str:
    """The name under which a swarm would serve it."""
    found = None if model == DEMO_MODEL else local_model(model)
    return short_name(model) if found is None else local_name(found)


def _served(home: Home) -> list[str]:
    """The models that the swarm of this PC serves; none if nothing runs here."""
    found = local_daemon.find_daemon(home)
    try:
        return [] if found is None else local_daemon.served(local_daemon.fetch_status(found))
    except MolinkError:
        return []


def _as_json(model: ModelHere, served: list[str]) -> dict[str, Any]:
    return {
        "name": model.name,
        "where": model.where,
        "path": str(model.path),
        "size": model.size,
        "total": model.total,
        "whole": model.whole,
        "served": any(map(model.is_called, served)),
    }


# --- waiting ---------------------------------------------------------------------------------


def watched(get: Callable[[], T], model: str, progress: Progress, stop: threading.Event) -> T:
    """``get()`` in a thread, and how far ``progress`` is in one line meanwhile."""
    line = TransferLine(Console(stderr=True, highlight=False, soft_wrap=True))
    speed = Throughput(time.monotonic())
    done = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(get)
        future.add_done_callback(lambda _: done.set())
        try:
            while not done.wait(LOOK_S):
                show_progress(line, model, progress, speed)
        finally:
            stop.set()
            line.clear()
        return future.result()


def show_progress(line: TransferLine, model: str, progress: Progress, speed: Throughput) -> None:
    """How far a transfer of a model is, in one line."""
    speed.observe(progress.done - progress.kept, time.monotonic())
    if not progress.total:
        return
    state = TransferState(
        model=model[:256],
        done=max(0, progress.done),
        total=progress.total,
        rate=round(speed.rate),
        source=progress.source,
    )
    line.show([state])


def _bring(found: local_daemon.Found, model: str, line: TransferLine) -> str:
    """Have the daemon bring a model and the swarm serve it; returns its name there."""
    local = None if model == DEMO_MODEL else local_model(model)
    wanted = model if local is None else str(local)
    speed, doing = Throughput(time.monotonic()), ""
    while True:
        far, _ = local_daemon.ask(found, BringModel(ref=0, model=wanted))
        assert isinstance(far, Bringing)
        if far.state == "asked":
            line.clear()
            return far.name
        if far.state != doing:
            speed, doing = Throughput(time.monotonic(), far.done), far.state
        progress = Progress(far.done, far.total)
        fetching = "the hub" if local is None else "disk, to unpack it once"
        progress.source = fetching if doing == "fetching" else "disk, to hash it once"
        show_progress(line, far.name or model, progress, speed)
        time.sleep(LOOK_S)


def _wait_served(
    found: local_daemon.Found, endpoint: str, name: str, timeout: float, line: TransferLine
) -> None:
    """Until the endpoint here can answer with the model ``name``.

    Raises:
        Unavailable: it can't within ``timeout`` seconds without a transfer; says why.
    """
    deadline = time.monotonic() + timeout
    while not _is_ready(endpoint, name):
        status = local_daemon.fetch_status(found)
        transfers = [
            TransferState(
                model=f"{one['model']} to {peer['name']}"[:256],
                done=one["bytes"],
                total=one["total"],
                rate=one["rate"],
                source=one["from"],
                copy=one["copy"],
            )
            for peer in status.get("peers", ())
            for one in peer.get("transfers", ())
        ]
        if any(not one.copy for one in transfers):
            deadline = time.monotonic() + timeout
        line.show(transfers)
        if time.monotonic() >= deadline:
            line.clear()
            why = status.get("trouble") or "its pipeline is still being formed"
            more = found.home.typed("status")
            raise Unavailable(f"{name} can't be used yet: {why}; {more} shows more")
        time.sleep(LOOK_S)
    line.clear()


def _is_ready(endpoint: str, name: str) -> bool:
    try:
        with urllib.request.urlopen(f"{endpoint}/readyz?model={quote(name)}", timeout=10) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, TimeoutError, ConnectionError):
        return False
