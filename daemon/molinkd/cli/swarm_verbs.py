"""Commands for a running swarm: ``status``, ``chat``, ``invite``, ``revoke`` …"""

import json
import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from molink.errors import Unavailable, UsageError
from molink.plaintext import printable
from molinkd.cli.confirmation import YesOption, confirm_action
from molinkd.cli.translation import tr

HomeOption = Annotated[
    Path | None,
    typer.Option(help="State folder.  [default: MOLINK_HOME, else the platform's own]"),
]


def status(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    wait: Annotated[
        float,
        typer.Option(min=0, help="Seconds to wait until molink runs and is ready."),
    ] = 0.0,
    home: HomeOption = None,
) -> None:
    """Show the swarm's PCs, their layers, and whether it is ready.

    Exits with 0 if all models are ready, else with 6.
    """
    from molink.swarm.controller.status_schema import decode_status
    from molinkd.cli import daemon_client
    from molinkd.cli.status_table import show_status
    from molinkd.peer.home import Home

    found, text = daemon_client.wait_until_ready(home, wait)
    state = decode_status(text)
    if as_json:
        print(json.dumps(json.loads(text), indent=2))
    else:
        show_status(state, demo=found.is_demo, format_command=Home.find_home(home).format_command)
    if not state.is_ready:
        raise typer.Exit(Unavailable.exit_code)


def chat(
    text: Annotated[
        str | None, typer.Argument(help="One question; omit it for a conversation.")
    ] = (None),
    url: Annotated[
        str | None, typer.Option(help="URL of the endpoint.  [default: this PC's]")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Model name.  [default: first served]")] = None,
    api_key: Annotated[
        str | None,
        typer.Option(
            envvar="MOLINK_API_KEY", help="API key of the endpoint.  [default: this PC's]"
        ),
    ] = None,
    system: Annotated[
        str | None, typer.Option(help="System prompt.  [default: the model's]")
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Maximum answer tokens.  [default: what fits]")
    ] = None,
    temperature: Annotated[
        float | None,
        typer.Option(
            min=0.0, help="Sampling temperature; 0 = deterministic.  [default: the model's, or 0.8]"
        ),
    ] = None,
    images: Annotated[
        list[Path] | None,
        typer.Option(
            "--image",
            help="Image to show with the question; may be given several times.  [default: none]",
        ),
    ] = None,
    home: HomeOption = None,
) -> None:
    """Chat with a model, or ask one question."""
    from molinkd.cli import daemon_client
    from molinkd.cli.chat import run_chat
    from molinkd.peer.home import Home

    if url is not None and not url.lower().startswith(("http://", "https://")):
        raise UsageError(f"--url must be a URL such as http://127.0.0.1:5465, not {url!r}")
    root = (url or daemon_client.require_daemon(home).endpoints[0]).rstrip("/").removesuffix("/v1")
    place = Home.find_home(home)
    code = run_chat(
        f"{root}/v1",
        text,
        model,
        api_key or daemon_client.own_api_key(place, root),
        system=system,
        max_tokens=max_tokens,
        temperature=temperature,
        images=images or (),
        format_command=place.format_command,
    )
    raise typer.Exit(code)


def invite(
    ttl: Annotated[float, typer.Option(help="Validity in hours; 0 = unlimited.")] = 24.0,
    uses: Annotated[int, typer.Option(help="Number of PCs that may join.")] = 1,
    list_all: Annotated[
        bool, typer.Option("--list", help="List all invitations and their uses.")
    ] = False,
    end: Annotated[
        str | None,
        typer.Option(
            metavar="ID", help="Revoke this invitation; joined PCs stay.  [default: none]"
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    home: HomeOption = None,
) -> None:
    """Create a join token for another PC, or manage invitations."""
    from molink.wire.messages.membership import INVITATION_PREFIX, MAX_USES
    from molinkd.cli import daemon_client
    from molinkd.cli.invitation_table import (
        invitation_text,
        remaining_text,
        show_invitations,
    )
    from molinkd.peer.home import Home

    if ttl < 0:
        raise UsageError(tr("--ttl must be a number of hours, or 0 for unlimited"))
    if not 1 <= uses <= MAX_USES:
        raise UsageError(tr("--uses must be 1 to {most}", most=MAX_USES))
    if list_all and end is not None:
        raise UsageError(tr("--list and --end can't be combined"))
    place = Home.find_home(home)
    if end is not None:
        ended = daemon_client.revoke_invitation(place, end)
        if as_json:
            print(json.dumps({"id": end, "stayed": ended.kept_peers}))
        else:
            text = tr("Revoked invitation {id}.", id=end)
            print(printable(text + remaining_text(ended)))
    elif list_all:
        invitations = daemon_client.fetch_invitations(place)
        if as_json:
            print(json.dumps(invitations, indent=2))
        else:
            show_invitations(invitations, place.format_command)
    else:
        made = daemon_client.create_invitation(place, ttl * 3600, uses)
        shown = {"id": made.id.removeprefix(INVITATION_PREFIX), "token": made.token, "uses": uses}
        if as_json:
            print(json.dumps(shown))
        elif sys.stdout.isatty():
            print(printable(invitation_text(made.token, uses, place.format_command), keep="\n"))
        else:
            print(printable(made.token))


def revoke(
    peer: Annotated[str, typer.Argument(help="Name or id of a peer.")],
    yes: YesOption = False,
    home: HomeOption = None,
) -> None:
    """Remove a PC from the swarm. Run it on an owner's PC.

    Without a terminal it needs --yes.
    """
    from molinkd.cli import daemon_client
    from molinkd.cli.invitation_table import remaining_text
    from molinkd.peer.home import Home

    place = Home.find_home(home)
    question = tr("Remove {pc} from the swarm, and the PCs that it let in?", pc=peer)
    confirm_action(question, yes=yes, is_final=True)
    ended = daemon_client.revoke_peer(place, peer)
    undo = place.format_command(f"un-revoke {shlex.quote(peer)}")
    text = tr("Removed {pc} and revoked its invitations.", pc=peer) + remaining_text(ended)
    print(printable(f"{text} {tr('Undo: {command}.', command=undo)}"))


def un_revoke(
    peer: Annotated[str, typer.Argument(help="Name or id of a revoked peer.")],
    home: HomeOption = None,
) -> None:
    """Readmit a removed PC. Run it on an owner's PC."""
    from molinkd.cli import daemon_client
    from molinkd.peer.home import Home

    daemon_client.unrevoke_peer(Home.find_home(home), peer)
    text = tr("{pc} may rejoin. Run `molink join` there; it needs no token.", pc=printable(peer))
    print(text)


def add_owner(
    peer: Annotated[str, typer.Argument(help="Name or id of a peer.")],
    home: HomeOption = None,
) -> None:
    """Make another PC an owner, which may remove PCs too. Run it on an owner's PC.

    The swarm's first PC is an owner. Without a second one nobody can remove a PC once it is gone.
    """
    from molinkd.cli import daemon_client
    from molinkd.peer.home import Home

    daemon_client.add_owner(Home.find_home(home), peer)
    text = tr("{pc} is an owner now. Only `molink revoke` takes that back.", pc=printable(peer))
    print(text)
