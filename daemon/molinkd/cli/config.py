"""The verb ``config``: what is set on this PC, where from, and how it is forgotten."""

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
from molinkd.peer.saved_options import read_options, write_options
from molinkd.peer.settings import (
    SECRET_SETTINGS,
    SETTING_NAMES,
    default_settings,
    load_settings,
    settings_layers,
)

config_app = typer.Typer()

#: Where what nobody has set comes from.
DEFAULT_SOURCE = "default"
#: Settings of which 0 is a word.
_ZERO_WORDS = {"memory": "by the device", "max_num_batched_tokens": "auto", "micro_batches": "auto"}


@config_app.callback(invoke_without_command=True)
def show_config(
    context: typer.Context,
    everything: Annotated[
        bool, typer.Option("--all", help="Show the settings that have their defaults too.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, of all settings.")] = False,
    home: HomeOption = None,
) -> None:
    """Show what the next start takes, and where each setting is from.

    An option of the command line comes before the environment, that before the options of the last
    start, those before config.toml, and that before the defaults.
    """
    if context.invoked_subcommand is not None:
        return
    place = Home.find_home(home)
    remembered = read_options(place.options)
    found = setting_sources(place, os.environ, remembered)
    if as_json:
        told = {name: {"value": value, "from": where} for name, (value, where) in found.items()}
        print(json.dumps(told, indent=2))
    else:
        _print_settings(found, place, everything=everything)
    load_settings(place, {}, os.environ, remembered)  # says what can't be used


@config_app.command()
def unset(
    names: Annotated[
        list[str] | None, typer.Argument(help="Settings, such as stage or endpoint-port.")
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="All of them.")] = False,
    home: HomeOption = None,
) -> None:
    """Forget options of the last start; what runs goes on as it is."""
    place = Home.find_home(home)
    remembered = read_options(place.options)
    wanted = [name.removeprefix("--").replace("-", "_") for name in names or ()]
    if bool(wanted) == everything:
        raise UsageError("name the settings to forget, or all of them with --all")
    for name in wanted:
        if name not in remembered:
            raise UsageError(_explain_unset(place, name, remembered))
    gone = [name for name in remembered if everything or name in wanted]
    if gone:
        write_options(
            place.options, {name: one for name, one in remembered.items() if name not in gone}
        )
    print(printable(f"Forgotten: {', '.join(gone) or 'nothing was remembered'}."))


def setting_sources(
    home: Home, environment: Mapping[str, str], remembered: Mapping[str, Any]
) -> dict[str, tuple[str, str]]:
    """The value of each setting, as text, and where it is from; not whether it can be used."""
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
        return f"there is no setting `{name}`; {home.format_command('config --all')} shows them"
    if where == DEFAULT_SOURCE:
        return f"`{name}` is not set: it has its default, {value}"
    return f"`{name}` is not remembered: it comes from {where}. Take it away there"


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
        print("Nothing is set on this PC: all settings have their defaults.")
    if not everything:
        print(printable(f"{home.format_command('config --all')} shows the defaults too."))
    if any(where == "the options of the last start" for _, where in shown.values()):
        forget = home.format_command("config unset NAME")
        print(printable(f"{forget} forgets what was given at the last start."))
