"""Verbs that end something: ``down``, ``leave``."""

import shutil
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from molink.errors import MolinkError, Unavailable, UsageError
from molink.files import patiently
from molink.plaintext import printable
from molinkd.cli.swarm_verbs import HomeOption

if TYPE_CHECKING:
    from molinkd.peer.home import Home
    from molinkd.peer.membership import Membership
    from molinkd.peer.runfile import RunFile


def down(home: HomeOption = None) -> None:
    """End the daemon on this PC; it stays a member, and the others go on."""
    from molinkd.peer.home import Home
    from molinkd.peer.runfile import read_run_file

    place = Home.find(home)
    note = read_run_file(place.run_file)
    if note is None:
        raise Unavailable(f"no molink runs here (state folder {place.root})")
    end_daemon(place, note)
    print("molink has ended on this PC. `molink up` or `molink join` starts it again.")


def leave(
    dissolve: Annotated[
        bool, typer.Option(help="On the PC of `molink up`: end the swarm for everyone.")
    ] = False,
    home: HomeOption = None,
) -> None:
    """Leave the swarm for good; the daemon here ends."""
    from molinkd.peer.home import Home
    from molinkd.peer.membership import read_membership
    from molinkd.peer.runfile import read_run_file

    place = Home.find(home)
    member = read_membership(place.membership)
    if member is None:
        raise UsageError(f"this PC is in no swarm (state folder {place.root})")
    if dissolve and not member.own:
        raise UsageError(
            "only the PC that has made the swarm can end it for everyone; `molink leave` takes "
            "this one out of it"
        )
    if member.own and not dissolve:
        raise UsageError(
            "this PC has made the swarm, and only it can shut other PCs out. To end the swarm for "
            "everyone, run `molink leave --dissolve`; to pause this PC, `molink down`: "
            "the others go on."
        )
    note = read_run_file(place.run_file)
    try:
        _tell_others(place, member, runs=note is not None)
    except MolinkError as error:
        reason = printable(str(error))
        print(f"The others could not be told ({reason}): if there are any, they go on without it.")
    if note is not None:
        end_daemon(place, note, leave=True)
    for file in (place.membership, place.replica, place.options):
        patiently(partial(file.unlink, missing_ok=True))
    if member.own and not wait_until(lambda: _removed(place.coordinator)):
        raise UsageError(f"can't delete {place.coordinator}: delete it by hand")
    print(printable(f"This PC has left swarm {member.swarm}."))


def _tell_others(home: "Home", member: "Membership", *, runs: bool) -> None:
    """That this PC leaves, or that the swarm which it made ends; a daemon that runs does the first.

    Raises:
        MolinkError: it isn't possible now.
    """
    from molink.wire.messages.requests import LeaveRequest
    from molinkd.cli import local_daemon

    if member.own and not runs:
        raise Unavailable("molink does not run here")
    if member.own:
        local_daemon.revoke_all(home)
    elif not runs:
        local_daemon.ask_coordinator(home, member, LeaveRequest(ref=0))


def end_daemon(home: "Home", note: "RunFile", *, leave: bool = False) -> None:
    """Have the daemon end, and wait until it has; it leaves the swarm for good if ``leave``.

    Raises:
        MolinkError: it doesn't.
    """
    from molinkd.cli import local_daemon

    try:
        local_daemon.shut_down(local_daemon.Found(home, note), leave=leave)
    except MolinkError:
        if note.alive():
            raise
    if not wait_until(lambda: not note.alive()):
        raise MolinkError(f"the molink daemon (process {note.pid}) was told to end, and has not")


def wait_until(met: Callable[[], bool], timeout: float = 30.0) -> bool:
    """Look again and again until ``met``; whether it was within ``timeout`` seconds."""
    deadline = time.monotonic() + timeout
    while not met():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def _removed(folder: Path) -> bool:
    """Delete a folder; ``False`` while a process still has files of it open (Windows)."""
    try:
        shutil.rmtree(folder)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True
