"""``molink search``: models of the catalog, their sizes, and which fit here."""

import json
from typing import Annotated

import typer

from molink.checkpoint.hub_catalog import load_catalog
from molink.errors import ModelNotFound
from molink.sim.swarm_capacity import FoundModel, describe_entry
from molinkd.cli.local_models import JsonOption
from molinkd.cli.plain_table import format_rows
from molinkd.cli.swarm_capacity import find_capacity
from molinkd.cli.swarm_verbs import HomeOption
from molinkd.cli.units import format_size
from molinkd.peer.home import Home


def search(
    words: Annotated[
        list[str] | None,
        typer.Argument(help="Words of a name, a use or a license.  [default: all models]"),
    ] = None,
    every_format: Annotated[
        bool, typer.Option("--all", help="Also list further formats, such as bf16.")
    ] = False,
    as_json: JsonOption = False,
    home: HomeOption = None,
) -> None:
    """Find models by short name, and which fit this swarm, or this PC if none runs.

    Works offline: sizes follow from the models' shapes, speeds from the PCs' measured memory.
    """
    text = " ".join(words or ())
    entries = load_catalog().search_entries(text)
    # Words may name a further format.
    chosen = [one for one in entries if every_format or one.is_default] or entries
    if not chosen:
        near = " or ".join(load_catalog().propose_names(text))
        raise ModelNotFound(
            f"no model in molink's catalog matches {text!r}."
            f"{f' Did you mean {near}?' if near else ''} Any model of the Hugging Face hub can be "
            "named OWNER/NAME"
        )
    place = Home.find_home(home)
    capacity = find_capacity(place)
    found = [describe_entry(one, capacity) for one in chosen]
    if as_json:
        print(json.dumps([one.as_json() for one in found], indent=2))
        return
    print(_format_table(found))
    print(f"\nFit and speed: on {capacity.place}, {format_size(capacity.memory)} of memory.")
    if not capacity.is_measured:
        print(f"Not measured yet: {place.format_command('up')} measures it.")
    print("Sizes are computed, about as published.")
    print(f"{place.format_command('run NAME')} serves a model.")


def _format_table(found: list[FoundModel]) -> str:
    rows = [("model", "params", "download", "memory", "fits", "tokens/s", "PCs")]
    for one in found:
        fit, speed = one.fit, one.fit.tokens_per_s
        rows.append(
            (
                one.entry.name,
                _format_count(one.parameters),
                format_size(one.download),
                format_size(one.memory),
                {"none": "yes", None: "no"}.get(fit.quantize, f"with {fit.quantize}"),
                f"{speed:.1f}" if 0 < speed < 10 else f"{speed:.0f}" if speed else "",
                str(fit.num_stages or ""),
            )
        )
    return format_rows(rows)


def _format_count(number: int) -> str:
    """Format a number of parameters: ``135 M``, ``8.2 B``."""
    if number < 999.5e6:
        return f"{number / 1e6:.0f} M"
    billions = number / 1e9
    return f"{billions:.1f} B" if billions < 99.95 else f"{billions:.0f} B"
