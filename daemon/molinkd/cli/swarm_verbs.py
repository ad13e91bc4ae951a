"""Verbs about a swarm that runs: ``status``, ``chat``, ``invite``, ``revoke``, ``leave`` …"""

import json
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

if TYPE_CHECKING:
    from molinkd.peer.home import Home
    from molinkd.peer.membership import Membership

HomeOption = Annotated[
    Path | None,
    typer.Option(help="State folder.  [default: MOLINK_HOME, else the platform's own]"),
]


def status(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    home: HomeOption = None,
) -> None:
    """Show the swarm: its peers, their stages, and whether it can serve."""
    from molinkd.cli import local_daemon
    from molinkd.cli.status_table import show_status

    found = local_daemon.need_daemon(home)
    state = local_daemon.fetch_status(found)
    if as_json:
        print(json.dumps(state, indent=2))
    else:
        show_status(state, demo=found.demo)


def chat(
    text: Annotated[str | None, typer.Argument(help="One question; none for a conversation.")] = (
        None
    ),
    url: Annotated[
        str | None, typer.Option(help="Endpoint.  [default: that of the molink on this PC]")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Default: the first there is.")] = None,
    api_key: Annotated[
        str | None, typer.Option(envvar="MOLINK_API_KEY", help="If the endpoint wants one.")
    ] = None,
    system: Annotated[str | None, typer.Option(help="System prompt.")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Longest answer.")] = None,
    temperature: Annotated[float | None, typer.Option(min=0.0, help="0 = always the same.")] = None,
    home: HomeOption = None,
) -> None:
    """Chat with the model: a conversation, or one question."""
    from molinkd.cli import local_daemon
    from molinkd.cli.chat import run_chat

    if url is not None and not url.lower().startswith(("http://", "https://")):
        raise UsageError(f"--url is a URL such as http://127.0.0.1:5465, not {url!r}")
    root = (url or local_daemon.need_daemon(home).endpoints[0]).rstrip("/").removesuffix("/v1")
    code = run_chat(
        f"{root}/v1",
        text,
        model,
        api_key,
        system=system,
        max_tokens=max_tokens,
        temperature=temperature,
    )
    raise typer.Exit(code)


def invite(
    ttl: Annotated[float, typer.Option(help="Hours for which it is valid; 0 = for ever.")] = 24.0,
    uses: Annotated[int, typer.Option(help="How many PCs may join by it.")] = 1,
    list_all: Annotated[
        bool, typer.Option("--list", help="Show the invitations that there are, and who used them.")
    ] = False,
    end: Annotated[
        str | None, typer.Option(metavar="ID", help="End that one; its members stay.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    home: HomeOption = None,
) -> None:
    """Print a new join token for another PC; or list the invitations, or end one."""
    from molink.swarm.invitations import MAX_USES, PREFIX
    from molinkd.cli import local_daemon
    from molinkd.cli.invitation_table import named, show_invitations, who_stays
    from molinkd.peer.home import Home

    if ttl < 0:
        raise UsageError("--ttl is a number of hours, 0 for ever")
    if not 1 <= uses <= MAX_USES:
        raise UsageError(f"--uses is a number of PCs, 1 to {MAX_USES}")
    if list_all and end is not None:
        raise UsageError("--list and --end don't go together")
    place = Home.find(home)
    if end is not None:
        ended = local_daemon.end_invitation(place, end)
        if as_json:
            print(json.dumps({"id": end, "stayed": named(ended)}))
        else:
            print(printable(f"Invitation {end} has ended.{who_stays(ended)}"))
    elif list_all:
        invitations = local_daemon.fetch_invitations(place)
        if as_json:
            print(json.dumps(invitations, indent=2))
        else:
            show_invitations(invitations)
    else:
        made = local_daemon.fetch_invite(place, ttl * 3600, uses)
        shown = {"id": made.id.removeprefix(PREFIX), "token": made.token, "uses": uses}
        print(json.dumps(shown) if as_json else printable(made.token))


def revoke(
    peer: Annotated[str, typer.Argument(help="Name or id of a peer.")],
    home: HomeOption = None,
) -> None:
    """Shut a peer out of the swarm for good; only on the PC that runs the swarm."""
    from molinkd.cli import local_daemon
    from molinkd.cli.invitation_table import who_stays
    from molinkd.peer.home import Home

    id, ended = local_daemon.revoke(Home.find(home), peer)
    print(
        printable(
            f"{id} is no member any more. Its invitations and the one by which it came have ended."
            f"{who_stays(ended)} `molink un-revoke {id}` takes it back."
        )
    )


def un_revoke(
    peer: Annotated[str, typer.Argument(help="Name or id of a peer that was revoked.")],
    home: HomeOption = None,
) -> None:
    """Let a peer that was revoked into the swarm again; only on the PC that runs the swarm."""
    from molinkd.cli import local_daemon
    from molinkd.peer.home import Home

    id = local_daemon.unrevoke(Home.find(home), peer)
    print(f"{id} is a member again. Start it with `molink join`; it needs no token.")


def leave(
    dissolve: Annotated[
        bool, typer.Option(help="On the PC of `molink up`: end the swarm for everyone.")
    ] = False,
    home: HomeOption = None,
) -> None:
    """Leave the swarm for good; the daemon here ends."""
    from molinkd.cli import local_daemon
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
            "everyone, run `molink leave --dissolve`; to pause this PC, press Ctrl-C in its "
            "terminal: the others go on."
        )
    note = read_run_file(place.run_file)
    try:
        _tell_others(place, member, runs=note is not None)
    except MolinkError as error:
        reason = printable(str(error))
        print(f"The others could not be told ({reason}): if there are any, they go on without it.")
    if note is not None:
        try:
            local_daemon.shut_down(local_daemon.Found(place, note), leave=True)
        except MolinkError:
            if note.alive():
                raise
        wait_until(lambda: not note.alive())
    for file in (place.membership, place.replica):
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
