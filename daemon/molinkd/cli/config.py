"""``molink config``: show this PC's settings and their sources, and forget saved options."""

import json
import os
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from molink.errors import UsageError
from molink.plaintext import printable
from molinkd.cli.swarm_verbs import HomeOption
from molinkd.peer.home import Home
from molinkd.peer.settings import (
    SECRET_SETTINGS,
    SETTING_NAMES,
    default_settings,
    load_settings,
    read_options,
    settings_layers,
    write_options,
)

config_app = typer.Typer()

#: Source of a setting that is not set.
DEFAULT_SOURCE = "default"
#: Settings for which 0 has a meaning.
_ZERO_WORDS = {"memory": "by the device", "max_num_batched_tokens": "auto", "micro_batches": "auto"}


@config_app.callback(invoke_without_command=True)
def show_config(
    context: typer.Context,
    everything: Annotated[
        bool, typer.Option("--all", help="Also show settings with default values.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON with all settings.")] = False,
    home: HomeOption = None,
) -> None:
    """Show the settings for the next start and their sources.

    Precedence: command line, environment, options of the last start, config.toml, defaults.
    """
    if context.invoked_subcommand is not None:
        return
    place = Home.find_home(home)
    remembered = read_options(place.options)
    found = setting_sources(place, os.environ, remembered)
    if as_json:
        result = {name: {"value": value, "from": where} for name, (value, where) in found.items()}
        print(json.dumps(result, indent=2))
    else:
        _print_settings(found, place, everything=everything)
    load_settings(place, {}, os.environ, remembered)  # reports invalid settings


@config_app.command()
def unset(
    names: Annotated[
        list[str] | None, typer.Argument(help="Setting names, such as stage or api-port.")
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="All saved options.")] = False,
    home: HomeOption = None,
) -> None:
    """Forget saved options of the last start. A running daemon is not affected."""
    place = Home.find_home(home)
    remembered = read_options(place.options)
    selected = [name.removeprefix("--").replace("-", "_") for name in names or ()]
    if bool(selected) == everything:
        raise UsageError("name the settings to forget, or use --all")
    for name in selected:
        if name not in remembered:
            raise UsageError(_explain_unset(place, name, remembered))
    removed = [name for name in remembered if everything or name in selected]
    if removed:
        write_options(
            place.options, {name: one for name, one in remembered.items() if name not in removed}
        )
    print(printable(f"Forgot: {', '.join(removed) or 'nothing was saved'}."))


def setting_sources(
    home: Home, environment: Mapping[str, str], remembered: Mapping[str, Any]
) -> dict[str, tuple[str, str]]:
    """Return the value (as text, not validated) and source of each setting."""
    defaults = msgspec.to_builtins(default_settings())
    defaults |= defaults.pop("pipeline")
    found = {
        name: (_value_text(name, defaults[name]), DEFAULT_SOURCE) for name in sorted(SETTING_NAMES)
    }
    for where, layer in settings_layers(home, environment, remembered):
        for name, value in layer.items():
            text = "…" if name in SECRET_SETTINGS and value else _value_text(name, value)
            found[name] = (text, where)
    return found


def _value_text(name: str, value: Any) -> str:
    if value in (None, "", [], (), {}):
        return "none"
    if isinstance(value, (list, tuple)):
        return ("-" if name == "worker_ports" else ", ").join(map(str, value))
    if isinstance(value, bool):
        return str(value).lower()
    return _ZERO_WORDS.get(name, "0") if value == 0 else str(value)


def _explain_unset(home: Home, name: str, remembered: Mapping[str, Any]) -> str:
    value, where = setting_sources(home, os.environ, remembered).get(name, ("", ""))
    if not where:
        return f"unknown setting `{name}`; {home.format_command('config --all')} lists all"
    if where == DEFAULT_SOURCE:
        return f"`{name}` is not set; its default is {value}"
    return f"`{name}` is not a saved option; it is set by {where}. Remove it there"


def _print_settings(found: Mapping[str, tuple[str, str]], home: Home, *, everything: bool) -> None:
    shown = {name: one for name, one in found.items() if everything or one[1] != DEFAULT_SOURCE}
    if shown:
        table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
        for column in ("setting", "value", "from"):
            table.add_column(column, overflow="fold", no_wrap=column == "setting")
        for name, (value, where) in shown.items():
            table.add_row(name, *(Text(printable(text)) for text in (value, where)))
        Console(highlight=False).print(table)
    else:
        print("All settings have their default values.")
    if not everything:
        print(printable(f"{home.format_command('config --all')} also shows the defaults."))
    if any(where == "the options of the last start" for _, where in shown.values()):
        forget = home.format_command("config unset NAME")
        print(printable(f"{forget} removes a saved option."))
