"""Joining without a token: ``approve`` on a PC of the swarm, and what ``join`` does before it."""

import asyncio
import json
import re
import sys
import time
from typing import TYPE_CHECKING, Annotated

import typer

from molink.errors import MolinkError, PairingRefused, TokenError, Unavailable, UsageError
from molink.plaintext import printable
from molink.swarm.membership.pairing import CODE_DIGITS, normalize_code
from molinkd.cli.swarm_verbs import HomeOption

if TYPE_CHECKING:
    from molink.swarm.membership.discovery import DiscoveredSwarm
    from molinkd.peer.home import Home
    from molinkd.peer.membership.membership_record import MembershipRecord
    from molinkd.peer.membership.pairing_client import PairingCode
    from molinkd.peer.settings import Settings

#: A host with a dot or a port: a single word would be a token that was not copied whole.
_HOST = re.compile(
    r"(?P<host>[A-Za-z0-9.-]{1,253}|\[[0-9A-Fa-f:.]{2,45}\])(?::(?P<port>\d{1,5}))?\Z"
)
#: A name as PCs have: longer ones are rather a token that was not copied whole.
_NAME = re.compile(r"[A-Za-z0-9-]{1,32}\Z")


def approve(
    code: Annotated[
        str | None, typer.Argument(help="What that PC shows; none lists the PCs that ask.")
    ] = None,
    refuse: Annotated[bool, typer.Option("--refuse", help="Send that PC away.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    home: HomeOption = None,
) -> None:
    """Let a PC in that shows the same code, or list who asks.

    That PC runs `molink join`.
    """
    from molinkd.cli import daemon_client as local_daemon
    from molinkd.peer.home import Home

    place = Home.find_home(home)
    if code is None:
        if refuse:
            raise UsageError("--refuse takes the code of the PC to be sent away")
        pairings = local_daemon.fetch_pairings(place)
        if as_json:
            print(json.dumps(pairings, indent=2))
            return
        for one in pairings:
            ago = max(0, round(time.time() - one["since"]))
            text = f"{one['code']}  {one['name']} ({one['address']}), for {ago} s"
            print(printable(text))
        if pairings:
            command = place.format_command("approve CODE")
            print(printable(f"{command} lets one in, if it shows that code itself."))
        else:
            print("No PC asks to be let in. Run `molink join` there.")
        return
    if normalize_code(code) is None:
        raise UsageError(f"a code has {CODE_DIGITS} digits, such as 4827-1931, not {code!r}")
    name = local_daemon.decide_pairing(place, code, refuse=refuse)
    if as_json:
        print(json.dumps({"name": name, "admitted": not refuse}))
    else:
        print(printable(f"{name} was refused." if refuse else f"{name} is a member now."))


def is_address(text: str) -> bool:
    """Whether what was given to ``join`` is where to knock, and no token."""
    match = _HOST.match(text)
    return match is not None and ("." in text or match["port"] is not None or text[0] == "[")


def _check_token(given: str) -> None:
    """Refuse what is rather a PC's name than a token.

    Raises:
        TokenError: it is.
    """
    from molink.swarm.membership.discovery import PAIRING_PORT
    from molink.swarm.membership.join_token import TOKEN_PREFIX

    if _NAME.match(given) and not given.startswith(TOKEN_PREFIX):
        raise TokenError(
            f"{given} is no join token: it doesn't begin with `{TOKEN_PREFIX}`. If it is a PC's "
            "name, "
            f"write `molink join {given}:{PAIRING_PORT}`; `molink join` alone looks for swarms on "
            "this network"
        )


def resolve_token(
    place: "Home", settings: "Settings", given: str | None, swarm: str | None
) -> str | None:
    """The token to join by; ``None`` if this PC is a member by now, or has none.

    ``given`` is a token, or an address to knock at.

    Raises:
        MolinkError: it can't get into a swarm; says why.
    """
    if given is not None and not is_address(given):
        _check_token(given)
        return given
    if place.membership.exists():
        if given is not None or swarm is not None:
            raise UsageError(
                f"this PC is a member of a swarm already: {place.format_command('join')} alone "
                "returns to "
                f"it. To change swarms run {place.format_command('leave')} first, or give "
                "another state "
                "folder with --home."
            )
        return None
    if (given is not None or settings.discovery) and pair_with_swarm(place, settings, given, swarm):
        return None
    nothing = (
        "no swarm that PCs can join without a token is on this network. Does `molink up` run, and "
        "do the firewalls of both PCs let UDP port 5353 and TCP ports 5466 to 5479 in? Else run "
        f"{place.format_command('join HOST')} with the first PC's address, or paste the token "
        "that it has "
        "printed"
    )
    if is_terminal():
        if settings.discovery:
            print(f"There is none: {nothing}.")
        token: str = typer.prompt("Join token", hide_input=True)
        return token
    if settings.discovery:
        raise Unavailable(nothing)
    return None


def pair_with_swarm(
    place: "Home", settings: "Settings", address: str | None, swarm: str | None
) -> bool:
    """Have this PC let into a swarm by a person there, and remember the swarm.

    Returns ``False`` if none was found; ``address`` and ``swarm`` (a name or an id) say which one.

    Raises:
        MolinkError: it was not let in; says why.
    """
    from molink.wire.sockets.event_loop import EventLoop
    from molinkd.peer.home import HomeLock
    from molinkd.peer.membership.pairing_client import request_pairing

    lock = HomeLock(place.create_folders())
    lock.acquire()
    try:
        keys = place.load_keys()
        nearby = _parse_address(address) if address is not None else _choose_swarm(settings, swarm)
        if nearby is None:
            return False
        shown: list[PairingCode] = []

        def show(code: "PairingCode") -> None:
            shown.append(code)
            _print_code(code, settings.name)

        with asyncio.Runner(loop_factory=EventLoop) as runner:
            pairing = request_pairing(
                nearby, keys, settings.name, show, join=place.format_command("join")
            )
            member = runner.run(pairing)
        try:
            _confirm_code(shown[0], place)
        except BaseException:
            _undo_join(place, member)
            raise
        member.save(place.membership)
    finally:
        lock.release()
    return True


def _parse_address(address: str) -> "DiscoveredSwarm":
    from molink.swarm.membership.discovery import PAIRING_PORT, DiscoveredSwarm

    match = _HOST.match(address)
    assert match is not None
    port = int(match["port"] or PAIRING_PORT)
    if not 0 < port < 65536:
        raise UsageError(f"{port} is no port")
    return DiscoveredSwarm("", "", "", (match["host"].strip("[]"),), port)


def _choose_swarm(settings: "Settings", wanted: str | None) -> "DiscoveredSwarm | None":
    from molinkd.peer.membership.discovery import scan_network

    print("Looking for swarms on this network …", flush=True)
    found = scan_network(settings.host)
    if wanted is not None:
        found = [one for one in found if wanted in (one.name, one.swarm)]
    if not found:
        return None
    if len(found) == 1:
        print(printable(f"Found {_describe_swarm(found[0])}."), flush=True)
        return found[0]
    print("Found:")
    for number, one in enumerate(found, 1):
        print(printable(f"  {number}  {_describe_swarm(one)}"), flush=True)
    if not is_terminal():
        raise UsageError(
            "several swarms are on this network: name one with --swarm NAME, or its id"
        )
    number = 0
    while not 1 <= number <= len(found):
        number = typer.prompt(f"Which one (1 to {len(found)})", type=int)
    return found[number - 1]


def _describe_swarm(one: "DiscoveredSwarm") -> str:
    return f"swarm {one.name} ({one.swarm}) at {', '.join(one.addresses)}"


def _print_code(code: "PairingCode", name: str) -> None:
    print(
        printable(
            f"\nThis PC ({name}) asks swarm {code.name} to let it in, and shows the code\n\n"
            f"    {code.code}\n\n"
            f"On a PC of the swarm run `molink approve {code.code}`, if it shows the same code "
            "there. Waiting; Ctrl-C ends it.",
            keep="\n",
        ),
        flush=True,
    )


def _undo_join(place: "Home", member: "MembershipRecord") -> None:
    """Leave the swarm that has let this PC in, where that can be told: it is a member there."""
    from molink.wire.messages.admin import LeaveRequest
    from molinkd.cli import daemon_client as local_daemon

    try:
        local_daemon.request_coordinator(place, member, LeaveRequest(ref=0))
    except MolinkError as error:
        text = f"The swarm could not be told that this PC doesn't come ({error})."
        print(printable(f"{text} If it is yours, `molink revoke` there takes this PC out."))


def _confirm_code(code: "PairingCode", place: "Home") -> None:
    """Ask whether the swarm that has answered is the one that was meant, where a person is there.

    Only the person knows: whoever pretends to be the swarm says that this PC is let in.
    """
    text = f"Swarm {code.name} has let this PC in."
    if not is_terminal():
        print(printable(f"{text} It holds only if the code there was {code.code}."), flush=True)
        return
    if not typer.confirm(printable(f"{text} Did you see {code.code} there?")):
        raise PairingRefused(
            "this PC has joined nothing: another PC may pretend to be the swarm. Run "
            f"{place.format_command('join')} again and compare the codes, or join by a token "
            "(`molink "
            "invite` prints one there)"
        )


def is_terminal() -> bool:
    """Whether a person can be asked."""
    return sys.stdin is not None and sys.stdin.isatty()
