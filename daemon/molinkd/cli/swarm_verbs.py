"""Verbs about a swarm that runs: ``status``, ``chat``, ``invite``, ``revoke`` …"""

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from molink.errors import Unavailable, UsageError
from molink.plaintext import printable

HomeOption = Annotated[
    Path | None,
    typer.Option(help="State folder.  [default: MOLINK_HOME, else the platform's own]"),
]


def status(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    wait: Annotated[
        float,
        typer.Option(min=0, help="Seconds to wait for it to be ready, or for molink to start."),
    ] = 0.0,
    home: HomeOption = None,
) -> None:
    """Show the swarm: its peers, their stages, if it serves.

    Exit code 0 if all its models can be used, else 6.
    """
    from molink.swarm.controller.status_schema import decode_status
    from molinkd.cli import daemon_client as local_daemon
    from molinkd.cli.status_table import show_status
    from molinkd.peer.home import Home

    found, text = local_daemon.wait_until_ready(home, wait)
    state = decode_status(text)
    if as_json:
        print(json.dumps(json.loads(text), indent=2))
    else:
        show_status(state, demo=found.is_demo, format_command=Home.find_home(home).format_command)
    if not state.is_ready:
        raise typer.Exit(Unavailable.exit_code)


def chat(
    text: Annotated[str | None, typer.Argument(help="One question; none for a conversation.")] = (
        None
    ),
    url: Annotated[
        str | None, typer.Option(help="Endpoint.  [default: that of the molink on this PC]")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Its name.  [default: the first there is]")
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(envvar="MOLINK_API_KEY", help="Key of the endpoint.  [default: none]"),
    ] = None,
    system: Annotated[
        str | None, typer.Option(help="System prompt.  [default: the model's]")
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Longest answer.  [default: what fits]")
    ] = None,
    temperature: Annotated[
        float | None, typer.Option(min=0.0, help="0 = always the same.  [default: the model's]")
    ] = None,
    home: HomeOption = None,
) -> None:
    """Chat with the model: a conversation, or one question."""
    from molinkd.cli import daemon_client as local_daemon
    from molinkd.cli.chat import run_chat
    from molinkd.peer.home import Home

    if url is not None and not url.lower().startswith(("http://", "https://")):
        raise UsageError(f"--url is a URL such as http://127.0.0.1:5465, not {url!r}")
    root = (url or local_daemon.require_daemon(home).endpoints[0]).rstrip("/").removesuffix("/v1")
    code = run_chat(
        f"{root}/v1",
        text,
        model,
        api_key,
        system=system,
        max_tokens=max_tokens,
        temperature=temperature,
        format_command=Home.find_home(home).format_command,
    )
    raise typer.Exit(code)


def invite(
    ttl: Annotated[float, typer.Option(help="Hours for which it is valid; 0 = for ever.")] = 24.0,
    uses: Annotated[int, typer.Option(help="How many PCs may join by it.")] = 1,
    list_all: Annotated[
        bool, typer.Option("--list", help="Show the invitations that there are, and who used them.")
    ] = False,
    end: Annotated[
        str | None,
        typer.Option(metavar="ID", help="End that one; its members stay.  [default: none]"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    home: HomeOption = None,
) -> None:
    """Print a new join token for another PC.

    In a terminal with the command that takes it. Or list the invitations that there are, or
    end one.
    """
    from molink.swarm.membership.invitations import INVITATION_PREFIX, MAX_USES
    from molinkd.cli import daemon_client as local_daemon
    from molinkd.cli.daemon_console import invitation_text
    from molinkd.cli.invitation_table import remaining_peers, remaining_text, show_invitations
    from molinkd.peer.home import Home

    if ttl < 0:
        raise UsageError("--ttl is a number of hours, 0 for ever")
    if not 1 <= uses <= MAX_USES:
        raise UsageError(f"--uses is a number of PCs, 1 to {MAX_USES}")
    if list_all and end is not None:
        raise UsageError("--list and --end don't go together")
    place = Home.find_home(home)
    if end is not None:
        ended = local_daemon.revoke_invitation(place, end)
        if as_json:
            print(json.dumps({"id": end, "stayed": remaining_peers(ended)}))
        else:
            print(printable(f"Invitation {end} has ended.{remaining_text(ended)}"))
    elif list_all:
        invitations = local_daemon.fetch_invitations(place)
        if as_json:
            print(json.dumps(invitations, indent=2))
        else:
            show_invitations(invitations, place.format_command)
    else:
        made = local_daemon.create_invitation(place, ttl * 3600, uses)
        shown = {"id": made.id.removeprefix(INVITATION_PREFIX), "token": made.token, "uses": uses}
        if as_json:
            print(json.dumps(shown))
        elif sys.stdout.isatty():
            print(printable(invitation_text(made.token, uses, place.format_command), keep="\n"))
        else:
            print(printable(made.token))


def revoke(
    peer: Annotated[str, typer.Argument(help="Name or id of a peer.")],
    home: HomeOption = None,
) -> None:
    """Shut a peer out of the swarm, on the swarm's first PC."""
    from molinkd.cli import daemon_client as local_daemon
    from molinkd.cli.invitation_table import remaining_text
    from molinkd.peer.home import Home

    place = Home.find_home(home)
    id, ended = local_daemon.revoke_peer(place, peer)
    print(
        printable(
            f"{id} is no member any more. Its invitations and the one by which it came have ended."
            f"{remaining_text(ended)} {place.format_command(f'un-revoke {id}')} takes it back."
        )
    )


def un_revoke(
    peer: Annotated[str, typer.Argument(help="Name or id of a peer that was revoked.")],
    home: HomeOption = None,
) -> None:
    """Let a peer in again that was revoked, on the first PC."""
    from molinkd.cli import daemon_client as local_daemon
    from molinkd.peer.home import Home

    id = local_daemon.unrevoke_peer(Home.find_home(home), peer)
    print(f"{id} is a member again. Start it with `molink join`; it needs no token.")
