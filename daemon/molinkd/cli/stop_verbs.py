"""``molink down`` and ``molink leave``."""

import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from molink.errors import MolinkError, Unavailable, UsageError
from molink.facts.identity import derive_peer_id
from molink.files import retry_while_busy
from molink.plaintext import printable
from molinkd.cli.confirmation import YesOption, confirm_action
from molinkd.cli.swarm_verbs import HomeOption

if TYPE_CHECKING:
    from molink.swarm.controller.records import MemberRecord
    from molinkd.peer.home import Home, RunFile
    from molinkd.peer.membership.membership_record import MembershipRecord


def down(home: HomeOption = None) -> None:
    """Stop molink on this PC; it stays in the swarm."""
    from molinkd.peer.home import Home, read_run_file

    place = Home.find_home(home)
    run_file = read_run_file(place.run_file)
    if run_file is None:
        raise Unavailable(f"molink is not running here (state folder {place.root})")
    stop_daemon(place, run_file)
    again = f"{place.format_command('up')} or {place.format_command('join')} starts it again."
    print(printable(f"molink stopped on this PC. {again}"))


def leave(
    dissolve: Annotated[
        bool,
        typer.Option("--dissolve", help="On the PC that created the swarm: remove all others."),
    ] = False,
    yes: YesOption = False,
    home: HomeOption = None,
) -> None:
    """Leave the swarm permanently and stop molink on this PC.

    Without a terminal, --dissolve needs --yes.
    """
    from molinkd.peer.home import Home, read_run_file
    from molinkd.peer.membership.membership_record import read_membership

    place = Home.find_home(home)
    member = read_membership(place.membership)
    if member is None:
        raise UsageError(f"this PC is not in a swarm (state folder {place.root})")
    if dissolve and not member.is_founder:
        raise UsageError(
            "only the PC that created the swarm can dissolve it; "
            f"{place.format_command('leave')} removes this PC"
        )
    run_file = read_run_file(place.run_file)
    others = _list_others(place, member, runs=run_file is not None) if member.is_founder else []
    if others and not dissolve:
        raise UsageError(
            f"this PC created the swarm and remains its owner. To end the swarm for "
            f"{', '.join(one.name for one in others)} too, run "
            f"{place.format_command('leave --dissolve')}; to stop only this PC, run "
            f"{place.format_command('down')}."
        )
    question = _leave_question(place, member, others, runs=run_file is not None)
    confirm_action(question, yes=yes, is_final=dissolve)
    lost = [one.name for one in others]
    if others and run_file is not None:
        lost = _remove_others(place)
    elif not member.is_founder and run_file is None:
        _notify_coordinator(place, member)
    if run_file is not None:
        stop_daemon(place, run_file, leave=True)
    for file in (place.membership, place.replica, place.options):
        retry_while_busy(partial(file.unlink, missing_ok=True))
    for folder in (place.devices, *([place.coordinator] if member.is_founder else ())):
        if not wait_until(partial(try_remove, folder)):
            raise UsageError(f"can't delete {folder}: delete it by hand")
    if lost:
        print(printable(f"Not told: {', '.join(lost)}. Run `molink leave` on each of them."))
    print(printable(f"This PC left swarm {member.swarm}."))


@dataclass(frozen=True, slots=True)
class _OtherPc:
    """Another PC of the swarm; ``is_reachable``: it can be told that the swarm ends."""

    name: str
    is_reachable: bool


def _list_others(home: "Home", member: "MembershipRecord", *, runs: bool) -> list[_OtherPc]:
    """Return the other PCs of the swarm, as the coordinator or else the local replica has them."""
    from molinkd.cli import daemon_client

    me = derive_peer_id(home.load_keys().public)
    if runs:
        found = daemon_client.fetch_members(home)
        return [
            _OtherPc(one["name"], one["state"] != "offline")
            for one in found
            if me not in (one["id"], one.get("pc"))
        ]
    return [
        _OtherPc(one.name, False)
        for one in _read_members(home, member)
        if me not in (one.peer, one.announced.primary_peer if one.announced is not None else "")
    ]


def _leave_question(
    home: "Home", member: "MembershipRecord", others: list[_OtherPc], *, runs: bool
) -> str:
    """Say what leaving means to whom."""
    if not others:
        more = "" if member.is_founder else " Joining again needs a token or an approval."
        return f"Leave swarm {member.swarm} for good?{more}"
    text = f"End swarm {member.swarm} for {', '.join(one.name for one in others)} too?"
    lost = ", ".join(one.name for one in others if not one.is_reachable)
    if lost and not runs:
        up = home.format_command("up --background")
        text += f" molink is not running here ({up} starts it)."
    if lost:
        text += (
            f" {lost} can't be told and will serve without an owner: run `molink leave` on each."
        )
    return text


def _remove_others(home: "Home") -> list[str]:
    """Remove all other peers from the swarm that this PC created; returns those not told.

    Raises:
        MolinkError: not all can be removed; they would continue as a swarm without an owner.
    """
    from molinkd.cli import daemon_client

    try:
        return daemon_client.revoke_all_peers(home)
    except MolinkError as error:
        raise Unavailable(
            "the swarm was not dissolved, since not all of its PCs could be notified: "
            f"{error}. Fix that and run {home.format_command('leave --dissolve')} again"
        ) from error


def _read_members(home: "Home", member: "MembershipRecord") -> "list[MemberRecord]":
    from molinkd.peer.election.leadership import ReplicaFile

    held = ReplicaFile(home.replica, member.swarm).replica
    members = [] if held is None else held.members
    return [one for one in members if one.standing == "member"]


def _notify_coordinator(home: "Home", member: "MembershipRecord") -> None:
    """Notify the coordinator that this PC leaves; the others continue either way."""
    from molink.wire.messages.admin import LeaveRequest
    from molinkd.cli import daemon_client

    me = derive_peer_id(home.load_keys().public)
    devices = tuple(
        one.peer
        for one in _read_members(home, member)
        if one.announced is not None and one.announced.primary_peer == me
    )
    try:
        daemon_client.request_coordinator(home, member, LeaveRequest(ref=0, devices=devices))
    except MolinkError as error:
        print(
            printable(
                f"The other PCs could not be notified ({error}); they continue without this PC."
            )
        )


def stop_daemon(home: "Home", run_file: "RunFile", *, leave: bool = False) -> None:
    """Stop the daemon and wait for its exit; with ``leave`` it leaves the swarm first.

    Raises:
        MolinkError: it does not stop.
    """
    from molinkd.cli import daemon_client

    try:
        daemon_client.request_shutdown(daemon_client.RunningDaemon(home, run_file), leave=leave)
    except MolinkError:
        if run_file.is_alive():
            raise
    if not wait_until(lambda: not run_file.is_alive()):
        raise MolinkError(f"the molink daemon (process {run_file.pid}) did not stop when asked")


def wait_until(condition: Callable[[], bool], timeout: float = 30.0) -> bool:
    """Poll ``condition`` for up to ``timeout`` seconds; returns whether it held."""
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def try_remove(folder: Path) -> bool:
    """Delete a folder; ``False`` while a process still has its files open (Windows)."""
    try:
        shutil.rmtree(folder)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True
