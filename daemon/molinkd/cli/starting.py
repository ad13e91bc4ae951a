"""Starts this PC's daemon, here or in the background, with the options of its last start."""

import os
import re
import subprocess
from collections.abc import Mapping
from typing import IO, Any, Literal

import msgspec

from molink.errors import MolinkError, UsageError
from molinkd.cli import local_daemon
from molinkd.cli.console import DaemonConsole
from molinkd.cli.join_verbs import is_terminal, token_for
from molinkd.peer.agent.child import how_it_ended
from molinkd.peer.frontend.endpoint import api_settings
from molinkd.peer.home import Home
from molinkd.peer.launch import (
    DAEMON_COMMAND,
    Announce,
    AnyEvent,
    Ended,
    Invitation,
    Launch,
    Listening,
    Trouble,
)
from molinkd.peer.main import DETACHED, log_to_file, run_daemon
from molinkd.peer.membership.addresses import is_reachable_name
from molinkd.peer.platform import child_options
from molinkd.peer.remembered import as_typed, read_options, write_options
from molinkd.peer.settings import load_settings


def start(
    role: Literal["up", "join"],
    home: Home,
    given: Mapping[str, Any],
    *,
    model: str | None = None,
    token: str | None = None,
    swarm: str | None = None,
    invite: bool = True,
    background: bool = False,
) -> None:
    """Run the daemon until it ends, or until it is up if in the ``background``.

    ``given`` are options of the command line, by setting. They are kept for the next start.
    ``token`` may be an address to knock at instead; ``swarm`` says which of several to join.

    Raises:
        MolinkError: it can't start, or has ended with an error.
        KeyboardInterrupt: it was ended by Ctrl-C, in good order.
    """
    remembered = read_options(home.options)
    settings = load_settings(home, given, os.environ, remembered)
    for address in settings.advertise:
        if not is_reachable_name(address):
            raise UsageError(
                f"`advertise` is without a port here, not {address!r}: other PCs dial several ports"
            )

    def approve(code: str) -> str:
        return local_daemon.judge(home, code, refuse=False)

    console = DaemonConsole(
        approve if is_terminal() and not background else None,
        foreground=not background,
        typed=home.typed,
    )
    as_before = {name: value for name, value in remembered.items() if name not in given}
    if as_before:
        console.say(f"As at the last start: {as_typed(as_before)}")

    def show(event: AnyEvent) -> None:
        if isinstance(event, Listening):
            write_options(home.options, remembered | dict(given))
        console.show(event)

    launch = Launch(
        home=str(home.root), settings=settings, role=role, model=model, token=token, invite=invite
    )
    try:
        api_settings(settings)  # before anybody is asked, or a swarm made
        if role == "join":
            asked = token_for(home, settings, token, swarm)
            launch = msgspec.structs.replace(launch, token=asked)
        pid = _run(launch, home, show, background=background)
    except MolinkError as error:
        error.args = (f"{error}{_how_to_forget(str(error), as_before, home)}",)
        raise
    if background:
        console.say(
            f"It runs in the background (process {pid}): {home.typed('status')} shows the swarm, "
            f"{home.typed('logs')} what it does, {home.typed('down')} ends it."
        )


def _run(launch: Launch, home: Home, show: Announce, *, background: bool) -> int:
    """Returns the process id of a daemon in the background, else 0 once it has ended."""
    if background:
        return _start_detached(launch, home.create(), show)
    with log_to_file(home, launch.settings.log_level):
        run_daemon(launch, show)
    return 0


def _how_to_forget(error: str, remembered: Mapping[str, Any], home: Home) -> str:
    """Said of an error that names an option which was given at another start."""
    for name in remembered:
        option = f"--{name.replace('_', '-')}"
        if re.search(rf"{option}\b", error):
            forget = home.typed(f"config unset {name}")
            return f" ({option} is as at the last start; {forget} forgets that)"
    return ""


def _start_detached(launch: Launch, home: Home, show: Announce) -> int:
    """Start a daemon that outlives this process, and listen to it until it is up."""
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
            _listen(launch, events, show)
        except KeyboardInterrupt:
            child.terminate()
            child.wait()
            raise
        except EOFError:
            how = how_it_ended(child.wait())
            raise MolinkError(f"the daemon {how} while it started; see {home.logs}") from None
    return child.pid


def _listen(launch: Launch, events: IO[bytes], show: Announce) -> None:
    """Show what the daemon says until there is nothing more to wait for.

    Raises:
        MolinkError: it can't start.
        EOFError: it has ended without a word.
    """
    up = False
    for line in events:
        event = msgspec.json.decode(line, type=AnyEvent)
        if isinstance(event, Ended):
            error = MolinkError(event.text)
            error.exit_code = event.code
            raise error
        show(event)
        up = up or isinstance(event, Listening)
        last = isinstance(event, (Invitation, Trouble)) or launch.role == "join"
        if up and (last or not launch.invite):
            return
    raise EOFError
