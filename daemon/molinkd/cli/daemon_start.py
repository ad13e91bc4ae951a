"""Starts this PC's daemon, in the foreground or background, with its saved options."""

import os
import re
import subprocess
from collections.abc import Mapping
from typing import IO, Any, Literal

import msgspec

from molink.errors import MolinkError, UsageError
from molinkd.child_process import exit_text
from molinkd.cli import daemon_client
from molinkd.cli.confirmation import is_terminal
from molinkd.cli.daemon_console import DaemonConsole
from molinkd.cli.join_verbs import resolve_token
from molinkd.cli.translation import tr
from molinkd.peer.frontend.api_endpoint import api_settings
from molinkd.peer.home import Home
from molinkd.peer.launch import (
    DAEMON_COMMAND,
    Announce,
    AnyDaemonEvent,
    DaemonEndedEvent,
    DaemonStartedEvent,
    Launch,
    ProblemReportedEvent,
    SwarmOpenedEvent,
)
from molinkd.peer.main import DETACHED, log_to_file, run_daemon
from molinkd.peer.membership.addresses import is_reachable_name
from molinkd.peer.settings import (
    Settings,
    format_options,
    load_settings,
    read_options,
    write_options,
)
from molinkd.platform import child_options


def start_daemon(
    role: Literal["up", "join"],
    home: Home,
    options: Mapping[str, Any],
    *,
    model: str | None = None,
    token: str | None = None,
    swarm: str | None = None,
    background: bool = False,
) -> None:
    """Run the daemon until it ends; in the ``background``, return once it has started.

    ``options`` are settings from the command line, saved for the next start. ``token`` may be an
    address to pair with; ``swarm`` selects one of several.

    Raises:
        MolinkError: it can't start, or failed.
        KeyboardInterrupt: Ctrl-C, after a clean shutdown.
    """
    remembered = read_options(home.options)
    if model is not None:
        remembered.pop("adapters", None)  # they are of the model that was named with them
    settings = load_settings(home, options, os.environ, remembered)
    _check_advertised_addresses(settings)

    def approve(code: str) -> str:
        return daemon_client.decide_pairing(home, code, refuse=False)

    console = DaemonConsole(
        approve if is_terminal() and not background else None,
        foreground=not background,
        format_command=home.format_command,
    )
    as_before = {name: value for name, value in remembered.items() if name not in options}
    if as_before:
        console.print_text(tr("Using saved options: {options}", options=format_options(as_before)))

    def show(event: AnyDaemonEvent) -> None:
        if isinstance(event, DaemonStartedEvent):
            write_options(home.options, remembered | _portable_options(options, settings))
        console.show_event(event)

    launch = Launch(home=str(home.root), settings=settings, role=role, model=model, token=token)
    try:
        api_settings(settings)  # before pairing or creating a swarm
        if role == "join":
            asked = resolve_token(home, settings, token, swarm)
            launch = msgspec.structs.replace(launch, token=asked)
        pid = _run_daemon(launch, home, show, background=background)
    except MolinkError as error:
        error.args = (f"{error}{_unset_hint(str(error), as_before, home)}",)
        raise
    if background:
        console.print_text(_background_text(home, pid))


def _background_text(home: Home, pid: int) -> str:
    return tr(
        "Running in the background (process {pid}). {status} shows the swarm, {logs} the "
        "logs; {down} stops it.",
        pid=pid,
        status=home.format_command("status"),
        logs=home.format_command("logs"),
        down=home.format_command("down"),
    )


def _portable_options(options: Mapping[str, Any], settings: Settings) -> dict[str, Any]:
    """The options as they are saved: with paths that mean the same in any working directory."""
    saved = dict(options)
    if "adapters" in saved:
        saved["adapters"] = [f"{name}={folder}" for name, folder in settings.adapters.items()]
    return saved


def _check_advertised_addresses(settings: Settings) -> None:
    for address in settings.advertise:
        if not is_reachable_name(address):
            raise UsageError(
                tr(
                    "`advertise` takes addresses without ports, not {address!r}: other PCs use "
                    "several ports",
                    address=address,
                )
            )


def _run_daemon(launch: Launch, home: Home, show: Announce, *, background: bool) -> int:
    """Return the process id of a background daemon, or 0 after a foreground daemon ended."""
    if background:
        return _start_detached(launch, home.create_folders(), show)
    with log_to_file(home, launch.settings.log_level):
        run_daemon(launch, show)
    return 0


def _unset_hint(error: str, remembered: Mapping[str, Any], home: Home) -> str:
    """Return a hint if an error names a saved option."""
    for name in remembered:
        option = f"--{name.replace('_', '-')}"
        words = r"\badapters?\b" if name == "adapters" else rf"{option}\b"
        if re.search(words, error):
            forget = home.format_command(f"config unset {name}")
            return tr(
                " ({option} is a saved option; {command} removes it)",
                option=option,
                command=forget,
            )
    return ""


def _start_detached(launch: Launch, home: Home, show: Announce) -> int:
    """Start a daemon that outlives this process and follow its events until it is up."""
    with (home.logs / "background.log").open("ab") as errors:
        child = subprocess.Popen(
            [*DAEMON_COMMAND, DETACHED],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            **child_options(),
        )
    assert child.stdin is not None
    assert child.stdout is not None
    with child.stdin as order, child.stdout as events:
        try:
            order.write(msgspec.json.encode(launch) + b"\n")
            order.close()
            _follow_events(launch, events, show)
        except KeyboardInterrupt:
            child.terminate()
            child.wait()
            raise
        except EOFError:
            how = exit_text(child.wait())
            text = tr("the daemon {how} during startup; see {folder}", how=how, folder=home.logs)
            raise MolinkError(text) from None
    return child.pid


def _follow_events(launch: Launch, events: IO[bytes], show: Announce) -> None:
    """Show the daemon's events until startup is complete.

    Raises:
        MolinkError: it can't start.
        EOFError: it exited without an error event.
    """
    up = False
    for line in events:
        event = msgspec.json.decode(line, type=AnyDaemonEvent)
        if isinstance(event, DaemonEndedEvent):
            error = MolinkError(event.text)
            error.exit_code = event.code
            raise error
        show(event)
        up = up or isinstance(event, DaemonStartedEvent)
        last = isinstance(event, (SwarmOpenedEvent, ProblemReportedEvent)) or launch.role == "join"
        if up and last:
            return
    raise EOFError
