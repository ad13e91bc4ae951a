"""Verbs that end something: ``down``, ``leave``."""

import shutil
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from molink.errors import MolinkError, Unavailable, UsageError
from molink.files import retry_while_busy
from molink.plaintext import printable
from molinkd.cli.swarm_verbs import HomeOption

if TYPE_CHECKING:
    from molinkd.peer.home import Home
    from molinkd.peer.membership.membership_record import MembershipRecord
    from molinkd.peer.run_file import RunFile


def down(home: HomeOption = None) -> None:
    """End the daemon on this PC, which stays a member."""
    from molinkd.peer.home import Home
    from molinkd.peer.run_file import read_run_file

    place = Home.find_home(home)
    run_file = read_run_file(place.run_file)
    if run_file is None:
        raise Unavailable(f"no molink runs here (state folder {place.root})")
    stop_daemon(place, run_file)
    again = f"{place.format_command('up')} or {place.format_command('join')} starts it again."
    print(printable(f"molink has ended on this PC. {again}"))


def leave(
    dissolve: Annotated[
        bool,
        typer.Option("--dissolve", help="On the PC of `molink up`: end the swarm for everyone."),
    ] = False,
    home: HomeOption = None,
) -> None:
    """Leave the swarm for good; the daemon here ends."""
    from molinkd.peer.home import Home
    from molinkd.peer.membership.membership_record import read_membership
    from molinkd.peer.run_file import read_run_file

    place = Home.find_home(home)
    member = read_membership(place.membership)
    if member is None:
        raise UsageError(f"this PC is in no swarm (state folder {place.root})")
    if dissolve and not member.is_founder:
        raise UsageError(
            f"only the PC that has made the swarm can end it for everyone; "
            f"{place.format_command('leave')} "
            "takes this one out of it"
        )
    if member.is_founder and not dissolve:
        raise UsageError(
            "this PC has made the swarm, and only it can shut other PCs out. To end the swarm for "
            f"everyone, run {place.format_command('leave --dissolve')}; to pause this PC, "
            f"{place.format_command('down')}: the others go on."
        )
    run_file = read_run_file(place.run_file)
    if member.is_founder:
        _dissolve_swarm(place, member, runs=run_file is not None)
    elif run_file is None:
        _notify_coordinator(place, member)
    if run_file is not None:
        stop_daemon(place, run_file, leave=True)
    for file in (place.membership, place.replica, place.options):
        retry_while_busy(partial(file.unlink, missing_ok=True))
    for folder in (place.devices, *([place.coordinator] if member.is_founder else ())):
        if not wait_until(partial(_try_remove, folder)):
            raise UsageError(f"can't delete {folder}: delete it by hand")
    print(printable(f"This PC has left swarm {member.swarm}."))


def _dissolve_swarm(home: "Home", member: "MembershipRecord", *, runs: bool) -> None:
    """Shut all others out of the swarm that was made here.

    Raises:
        MolinkError: it isn't possible now. They would go on as a swarm that nobody owns.
    """
    from molinkd.cli import daemon_client as local_daemon

    again = home.format_command("leave --dissolve")
    if runs:
        try:
            away = local_daemon.revoke_all_peers(home)
        except MolinkError as error:
            raise Unavailable(
                f"the swarm goes on, since not all of its PCs could be told that it ends: {error}. "
                f"Run {again} again once that is mended"
            ) from error
        if away:
            names = ", ".join(away)
            text = f"Off, and not told: {names}. `molink leave` there takes each out of the swarm."
            print(printable(text))
        return
    others = _other_members(home, member)
    if others:
        raise Unavailable(
            f"molink does not run here, so that {', '.join(others)} can't be told, and would go on "
            f"as a swarm that nobody owns. Run {home.format_command('up --background')}, then "
            f"{again}"
        )


def _other_members(home: "Home", member: "MembershipRecord") -> list[str]:
    """Names of the swarm's other members, by the copy of its state that is here."""
    from molink.facts.identity import derive_peer_id
    from molinkd.peer.election.replica_file import ReplicaFile

    held, me = (
        ReplicaFile(home.replica, member.swarm).replica,
        derive_peer_id(home.load_keys().public),
    )
    members = () if held is None else held.members
    return [
        one.name
        for one in members
        if one.standing == "member"
        and me not in (one.peer, one.announced.primary_peer if one.announced is not None else "")
    ]


def _notify_coordinator(home: "Home", member: "MembershipRecord") -> None:
    """That this PC leaves: no daemon runs here that would. The others go on in any case."""
    from molink.wire.messages.admin import LeaveRequest
    from molinkd.cli import daemon_client as local_daemon

    try:
        local_daemon.request_coordinator(home, member, LeaveRequest(ref=0))
    except MolinkError as error:
        print(printable(f"The others could not be told ({error}): they go on without it."))


def stop_daemon(home: "Home", run_file: "RunFile", *, leave: bool = False) -> None:
    """Have the daemon end, and wait until it has; it leaves the swarm for good if ``leave``.

    Raises:
        MolinkError: it doesn't.
    """
    from molinkd.cli import daemon_client as local_daemon

    try:
        local_daemon.request_shutdown(local_daemon.RunningDaemon(home, run_file), leave=leave)
    except MolinkError:
        if run_file.is_alive():
            raise
    if not wait_until(lambda: not run_file.is_alive()):
        raise MolinkError(
            f"the molink daemon (process {run_file.pid}) was told to end, and has not"
        )


def wait_until(condition: Callable[[], bool], timeout: float = 30.0) -> bool:
    """Look again and again until ``condition``; whether it was within ``timeout`` seconds."""
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def _try_remove(folder: Path) -> bool:
    """Delete a folder; ``False`` while a process still has files of it open (Windows)."""
    try:
        shutil.rmtree(folder)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True
