"""Commands that run until Ctrl-C: ``up``, ``join``, ``demo``, ``coordinator``."""

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from molink.errors import UsageError
from molink.facts.dtypes import DTypeChoice
from molink.facts.model import Quantize
from molinkd.cli.daemon_options import JoinOptions, UpOptions, expand_options
from molinkd.cli.hide_token import hide_token
from molinkd.cli.join_verbs import parse_address
from molinkd.cli.swarm_verbs import HomeOption
from molinkd.cli.translation import tr


@expand_options
def up(options: UpOptions, home: HomeOption = None) -> None:
    """Start a swarm on this PC, with a chat endpoint.

    Options are saved for the next start; `molink config` shows all settings and their sources.
    """
    _start_daemon(options, home)


@expand_options
def join(options: JoinOptions, home: HomeOption = None) -> None:
    """Add this PC to a swarm, by token or by approval.

    Options are saved for the next start; `molink config` shows all settings and their sources.
    """
    if options.token == "-":
        options = replace(options, token=sys.stdin.readline().strip())
    elif options.token is not None and parse_address(options.token) is None:
        hide_token(options.token)
    if options.token is not None and not options.token.strip():
        raise UsageError(tr("the token is empty: paste a token from `molink invite`"))
    _start_daemon(options, home)


def demo(
    ask: Annotated[
        str | None,
        typer.Option(help="Ask one question, print the answer and exit.  [default: run on]"),
    ] = None,
    peers: Annotated[int, typer.Option(min=1, max=8, help="Number of peers.")] = 3,
    dtype: Annotated[DTypeChoice, typer.Option(help="Data type for computation.")] = "auto",
    quantize: Annotated[Quantize, typer.Option(help="Weight quantization.")] = "none",
    model: Annotated[
        str | None,
        typer.Option(
            help="smollm2 (a small real model, downloaded once), or a model as for `up`.  "
            "[default: the bundled demo model]"
        ),
    ] = None,
    home: HomeOption = None,
) -> None:
    """Try a whole swarm on this PC with a small model."""
    from molinkd.cli.demo import run_demo
    from molinkd.cli.small_model import resolve_model_name
    from molinkd.peer.home import Home

    if model is not None:
        model = resolve_model_name(model)
    raise typer.Exit(run_demo(Home.find_home(home), peers, dtype, model, ask, quantize))


def coordinator(
    host: Annotated[
        str | None, typer.Option(help="Address to bind.  [default: all interfaces]")
    ] = None,
    port: Annotated[
        int | None, typer.Option(help="Port for PCs.  [default: 5466 or the next free port]")
    ] = None,
    advertise: Annotated[
        str | None,
        typer.Option(help="Addresses announced to PCs, comma separated.  [default: this PC's]"),
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="Name of this PC in the swarm.  [default: host name]")
    ] = None,
    home: HomeOption = None,
) -> None:
    """Run only a coordinator, without layers or an endpoint."""
    from molinkd.cli.standalone_coordinator import run_coordinator
    from molinkd.peer.home import Home
    from molinkd.peer.settings import load_settings

    options = {"host": host, "coordinator_port": port, "advertise": advertise, "name": name}
    place = Home.find_home(home)
    run_coordinator(place, load_settings(place, options, os.environ))


def _start_daemon(options: UpOptions | JoinOptions, home: Path | None) -> None:
    from molinkd.imports import permanent_imports

    with permanent_imports():
        from molinkd.cli.daemon_start import start_daemon
        from molinkd.cli.small_model import resolve_model_name
    from molinkd.peer.home import Home

    start_daemon(
        "join" if isinstance(options, JoinOptions) else "up",
        Home.find_home(home),
        options.given_settings(),
        model=None if options.model is None else resolve_model_name(options.model),
        token=options.token if isinstance(options, JoinOptions) else None,
        swarm=options.swarm if isinstance(options, JoinOptions) else None,
        background=options.background,
    )
