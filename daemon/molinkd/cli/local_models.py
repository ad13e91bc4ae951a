"""``molink list``, ``show`` and ``rm``: the models on this PC."""

import json
from typing import Annotated, Any

import typer

from molink.errors import ModelNotFound, MolinkError, UsageError
from molink.plaintext import printable
from molinkd.cli.plain_table import format_rows
from molinkd.cli.swarm_verbs import HomeOption
from molinkd.cli.units import format_size
from molinkd.peer.artifacts.installed_models import (
    InstalledModel,
    choose_deletable,
    delete_model,
    find_installed_models,
    list_installed_models,
)
from molinkd.peer.home import Home, read_run_files

JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def list_models(as_json: JsonOption = False, home: HomeOption = None) -> None:
    """List the models on this PC. `molink show MODEL` tells the folder of one."""
    place = Home.find_home(home)
    served = _served_models(place)
    models = list_installed_models(place)
    if as_json:
        print(json.dumps([_model_json(one, served) for one in models], indent=2))
        return
    rows = [("model", "size", "where", "")]
    for one in models:
        state = "served" if any(map(one.has_name, served)) else "" if one.is_complete else "partial"
        rows.append((one.name, format_size(one.size), one.location, state))
    print(format_rows(rows))


def show(
    model: Annotated[str, typer.Argument(help="Name as shown by `molink list`, or a path.")],
    as_json: JsonOption = False,
    home: HomeOption = None,
) -> None:
    """Show facts of a model on this PC: architecture, size, quantization, where it lies."""
    from molinkd.peer.artifacts.model_summary import describe_model

    place = Home.find_home(home)
    copies = find_installed_models(place, model)
    if not copies:
        raise ModelNotFound(_explain_missing(model, place))
    about = describe_model([one.path for one in copies])
    if as_json:
        served = _served_models(place)
        facts = {**about.to_json(), "copies": [_model_json(one, served) for one in copies]}
        print(json.dumps({"name": copies[0].name, **facts}, indent=2))
        return
    rows = [("model", copies[0].name), *about.to_rows()]
    for one in copies:
        part = "" if one.is_complete else ", partial"
        rows += [("size", f"{format_size(one.size)}{part}"), (one.location, str(one.path))]
    print(format_rows(rows))


def rm(
    model: Annotated[str, typer.Argument(help="Name as shown by `molink list`.")],
    hf_cache: Annotated[
        bool, typer.Option("--hf-cache", help="Also delete it from the Hugging Face cache.")
    ] = False,
    home: HomeOption = None,
) -> None:
    """Delete a model from this PC. Served models and your own folders are never deleted."""
    place = Home.find_home(home)
    chosen = choose_deletable(place, list_installed_models(place), model, hf_cache=hf_cache)
    served = _served_models(place)
    if any(one.has_name(name) for one in chosen for name in served):
        first = place.format_command("stop" if len(served) < 2 else f"stop {model}")
        raise UsageError(f"{model} is being served: run {first} first, or serve another model")
    freed = sum(map(delete_model, chosen))
    print(printable(f"Deleted {model}: {format_size(freed)} freed."))


def _explain_missing(model: str, home: Home) -> str:
    from molink.checkpoint.model_source import find_catalog_entry

    entry = find_catalog_entry(model)
    if entry is None:
        return f"no model {model!r} on this PC; see {home.format_command('list')}"
    size = format_size(entry.describe_weights().nbytes)
    return (
        f"{entry.name} is not on this PC: {home.format_command(f'pull {entry.name}')} downloads "
        f"{entry.source} ({size}, {entry.license})"
    )


def _served_models(home: Home) -> list[str]:
    """Return the models that this PC's swarm and its demos serve."""
    if next(read_run_files(home), None) is None:
        return []
    from molinkd.cli import daemon_client

    served: list[str] = []
    for found in daemon_client.find_daemons(home):
        try:
            served += daemon_client.served_models(daemon_client.fetch_status(found))
        except MolinkError:
            continue
    return served


def _model_json(model: InstalledModel, served: list[str]) -> dict[str, Any]:
    return {
        "name": model.name,
        "where": model.location,
        "path": str(model.path),
        "size": model.size,
        "total": model.total,
        "whole": model.is_complete,
        "served": any(map(model.has_name, served)),
    }
