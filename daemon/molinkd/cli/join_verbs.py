"""Joining without a token: ``approve`` on a PC of the swarm, and what ``join`` does before it."""

import asyncio
import json
import re
import sys
import time
from typing import TYPE_CHECKING, Annotated

import typer

from molink.errors import KnockRefused, MolinkError, TokenError, Unavailable, UsageError
from molink.plaintext import printable
from molink.swarm.membership.knocks import DIGITS, normal_code
from molinkd.cli.swarm_verbs import HomeOption

if TYPE_CHECKING:
    from molink.swarm.membership.nearby import Nearby
    from molinkd.peer.home import Home
    from molinkd.peer.membership.knock import Code
    from molinkd.peer.membership.membership import Membership
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
    from molinkd.cli import local_daemon
    from molinkd.peer.home import Home

    place = Home.find(home)
    if code is None:
        if refuse:
            raise UsageError("--refuse takes the code of the PC to be sent away")
        knocks = local_daemon.fetch_knocks(place)
        if as_json:
            print(json.dumps(knocks, indent=2))
            return
        for one in knocks:
            ago = max(0, round(time.time() - one["since"]))
            text = f"{one['code']}  {one['name']} ({one['address']}), for {ago} s"
            print(printable(text))
        if knocks:
            command = place.typed("approve CODE")
            print(printable(f"{command} lets one in, if it shows that code itself."))
        else:
            print("No PC asks to be let in. Run `molink join` there.")
        return
    if normal_code(code) is None:
        raise UsageError(f"a code has {DIGITS} digits, such as 4827-1931, not {code!r}")
    name = local_daemon.judge(place, code, refuse=refuse)
    if as_json:
        print(json.dumps({"name": name, "admitted": not refuse}))
    else:
        print(printable(f"{name} was refused." if refuse else f"{name} is a member now."))


def is_address(text: str) -> bool:
    """Whether what was given to ``join`` is where to knock, and no token."""
    match = _HOST.match(text)
    return match is not None and ("." in text or match["port"] is not None or text[0] == "[")


def _check_word(given: str) -> None:
    """Refuse what is rather a PC's name than a token.

    Raises:
        TokenError: it is.
    """
    from molink.swarm.membership.nearby import PORCH_PORT
    from molink.swarm.membership.token import PREFIX

    if _NAME.match(given) and not given.startswith(PREFIX):
        raise TokenError(
            f"{given} is no join token: it doesn't begin with `{PREFIX}`. If it is a PC's name, "
            f"write `molink join {given}:{PORCH_PORT}`; `molink join` alone looks for swarms on "
            "this network"
        )


def token_for(
    place: "Home", settings: "Settings", given: str | None, swarm: str | None
) -> str | None:
    """The token to join by; ``None`` if this PC is a member by now, or has none.

    ``given`` is a token, or an address to knock at.

    Raises:
        MolinkError: it can't get into a swarm; says why.
    """
    if given is not None and not is_address(given):
        _check_word(given)
        return given
    if place.membership.exists():
        if given is not None or swarm is not None:
            raise UsageError(
                f"this PC is a member of a swarm already: {place.typed('join')} alone returns to "
                f"it. To change swarms run {place.typed('leave')} first, or give another state "
                "folder with --home."
            )
        return None
    if (given is not None or settings.discovery) and come_in(place, settings, given, swarm):
        return None
    nothing = (
        "no swarm that PCs can join without a token is on this network. Does `molink up` run, and "
        "do the firewalls of both PCs let UDP port 5353 and TCP ports 5466 to 5479 in? Else run "
        f"{place.typed('join HOST')} with the first PC's address, or paste the token that it has "
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


def come_in(place: "Home", settings: "Settings", address: str | None, swarm: str | None) -> bool:
    """Have this PC let into a swarm by a person there, and remember the swarm.

    Returns ``False`` if none was found; ``address`` and ``swarm`` (a name or an id) say which one.

    Raises:
        MolinkError: it was not let in; says why.
    """
    from molink.wire.sockets.loop import EventLoop
    from molinkd.peer.home import HomeLock
    from molinkd.peer.membership.knock import knock

    lock = HomeLock(place.create())
    lock.acquire()
    try:
        keys = place.keys()
        nearby = _at(address) if address is not None else _find(settings, swarm)
        if nearby is None:
            return False
        shown: list[Code] = []

        def show(code: "Code") -> None:
            shown.append(code)
            _show(code, settings.name)

        with asyncio.Runner(loop_factory=EventLoop) as runner:
            knocking = knock(nearby, keys, settings.name, show, join=place.typed("join"))
            member = runner.run(knocking)
        try:
            _confirm(shown[0], place)
        except BaseException:
            _take_back(place, member)
            raise
        member.save(place.membership)
    finally:
        lock.release()
    return True


def _at(address: str) -> "Nearby":
    from molink.swarm.membership.nearby import PORCH_PORT, Nearby

    match = _HOST.match(address)
    assert match is not None
    port = int(match["port"] or PORCH_PORT)
    if not 0 < port < 65536:
        raise UsageError(f"{port} is no port")
    return Nearby("", "", "", (match["host"].strip("[]"),), port)


def _find(settings: "Settings", wanted: str | None) -> "Nearby | None":
    from molinkd.peer.membership.discovery import look_around

    print("Looking for swarms on this network …", flush=True)
    found = look_around(settings.host)
    if wanted is not None:
        found = [one for one in found if wanted in (one.name, one.swarm)]
    if not found:
        return None
    if len(found) == 1:
        print(printable(f"Found {_described(found[0])}."), flush=True)
        return found[0]
    print("Found:")
    for number, one in enumerate(found, 1):
        print(printable(f"  {number}  {_described(one)}"), flush=True)
    if not is_terminal():
        raise UsageError(
            "several swarms are on this network: name one with --swarm NAME, or its id"
        )
    number = 0
    while not 1 <= number <= len(found):
        number = typer.prompt(f"Which one (1 to {len(found)})", type=int)
    return found[number - 1]


def _described(one: "Nearby") -> str:
    return f"swarm {one.name} ({one.swarm}) at {', '.join(one.addresses)}"


def _show(code: "Code", me: str) -> None:
    print(
        printable(
            f"\nThis PC ({me}) asks swarm {code.name} to let it in, and shows the code\n\n"
            f"    {code.code}\n\n"
            f"On a PC of the swarm run `molink approve {code.code}`, if it shows the same code "
            "there. Waiting; Ctrl-C ends it.",
            keep="\n",
        ),
        flush=True,
    )


def _take_back(place: "Home", member: "Membership") -> None:
    """Leave the swarm that has let this PC in, where that can be told: it is a member there."""
    from molink.wire.messages.requests import LeaveRequest
    from molinkd.cli import local_daemon

    try:
        local_daemon.ask_coordinator(place, member, LeaveRequest(ref=0))
    except MolinkError as error:
        text = f"The swarm could not be told that this PC doesn't come ({error})."
        print(printable(f"{text} If it is yours, `molink revoke` there takes this PC out."))


def _confirm(code: "Code", place: "Home") -> None:
    """Ask whether the swarm that has answered is the one that was meant, where a person is there.

    Only the person knows: whoever pretends to be the swarm says that this PC is let in.
    """
    text = f"Swarm {code.name} has let this PC in."
    if not is_terminal():
        print(printable(f"{text} It holds only if the code there was {code.code}."), flush=True)
        return
    if not typer.confirm(printable(f"{text} Did you see {code.code} there?")):
        raise KnockRefused(
            "this PC has joined nothing: another PC may pretend to be the swarm. Run "
            f"{place.typed('join')} again and compare the codes, or join by a token (`molink "
            "invite` prints one there)"
        )


def is_terminal() -> bool:
    """Whether a person can be asked."""
    return sys.stdin is not None and sys.stdin.isatty()
