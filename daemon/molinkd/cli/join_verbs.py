"""Pairing without a token: ``approve`` on a PC of the swarm, and ``join`` on the new PC."""

import asyncio
import contextlib
import ipaddress
import json
import re
import time
from typing import TYPE_CHECKING, Annotated

import typer

from molink.errors import MolinkError, PairingRefused, Unavailable, UsageError
from molink.plaintext import printable
from molink.swarm.membership.pairing import CODE_DIGITS, normalize_code
from molink.swarm.membership.sanitize import quote_name
from molinkd.cli.confirmation import is_terminal
from molinkd.cli.swarm_verbs import HomeOption
from molinkd.cli.translation import tr

if TYPE_CHECKING:
    from molink.swarm.membership.discovery import DiscoveredSwarm
    from molinkd.peer.home import Home
    from molinkd.peer.membership.membership_record import MembershipRecord
    from molinkd.peer.membership.pairing_client import PairingCode
    from molinkd.peer.settings import Settings

#: A host and a pairing port; an IPv6 address with a port needs brackets.
_HOST = re.compile(
    r"(?P<host>[\w.-]{1,253}|\[[0-9A-Fa-f:.]{2,45}(?:%[\w.-]+)?\])(?::(?P<port>\d+))?\Z"
)
#: Longest host name without a dot; a longer word is probably an incomplete token.
_MAX_LABEL = 63


def approve(
    code: Annotated[
        str | None, typer.Argument(help="Code that the new PC shows; omit it to list waiting PCs.")
    ] = None,
    refuse: Annotated[bool, typer.Option("--refuse", help="Reject that PC.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    home: HomeOption = None,
) -> None:
    """Approve a PC that shows this code, or list waiting PCs.

    Run `molink join` on the new PC first.
    """
    from molinkd.cli import daemon_client
    from molinkd.peer.home import Home

    place = Home.find_home(home)
    if code is None:
        if refuse:
            raise UsageError(tr("--refuse needs the code of the PC to reject"))
        pairings = daemon_client.fetch_pairings(place)
        if as_json:
            print(json.dumps(pairings, indent=2))
            return
        for one in pairings:
            ago = max(0, round(time.time() - one["since"]))
            text = tr(
                "{code}  {pc} ({address}), for {seconds} s",
                code=one["code"],
                pc=quote_name(one["name"]),
                address=one["address"],
                seconds=ago,
            )
            print(printable(text))
        if pairings:
            command = place.format_command("approve CODE")
            text = tr("{command} approves a PC if it shows the same code.", command=command)
            print(printable(text))
        else:
            print(tr("No PC is waiting. Run `molink join` on the new PC."))
        return
    if normalize_code(code) is None:
        text = tr(
            "a code has {digits} digits, such as 4827-1931, not {code!r}",
            digits=CODE_DIGITS,
            code=code,
        )
        raise UsageError(text)
    name = daemon_client.decide_pairing(place, code, refuse=refuse)
    if as_json:
        print(json.dumps({"name": name, "admitted": not refuse}))
    else:
        pc = quote_name(name)
        print(tr("{pc} was rejected.", pc=pc) if refuse else tr("{pc} joined.", pc=pc))


def parse_address(text: str) -> "tuple[str, int] | None":
    """The host and the pairing port that the argument of ``join`` names; ``None`` for a token.

    Raises:
        UsageError: it names an impossible port.
    """
    from molink.swarm.membership.discovery import PAIRING_PORT
    from molink.swarm.membership.join_token import TOKEN_PREFIX

    with contextlib.suppress(ValueError):
        return str(ipaddress.ip_address(text)), PAIRING_PORT
    match = _HOST.match(text)
    if match is None:
        return None
    host, port = match["host"], match["port"]
    is_word = port is None and "." not in host
    if is_word and (host.startswith(TOKEN_PREFIX) or len(host) > _MAX_LABEL):
        return None
    if port is not None and not 0 < int(port) < 65536:
        raise UsageError(tr("{port} is not a valid port", port=port))
    return host.strip("[]"), int(port or PAIRING_PORT)


def resolve_token(
    place: "Home", settings: "Settings", given: str | None, swarm: str | None
) -> str | None:
    """Return the token to join with; ``None`` if this PC is already a member, or has no token.

    ``given`` is a token or an address to pair with.

    Raises:
        MolinkError: it can't join.
    """
    from molinkd.peer.membership.membership_record import explain_membership, read_membership

    address = None if given is None else parse_address(given)
    if given is not None and address is None:
        return given
    member = read_membership(place.membership)
    if member is not None:
        if given is not None or swarm is not None or member.is_founder:
            raise UsageError(explain_membership(place, member))
        return None
    if (address is not None or settings.discovery) and pair_with_swarm(
        place, settings, address, swarm
    ):
        return None
    nothing = tr(
        "no swarm found on this network. Is `molink up` running, and do the firewalls of both PCs "
        "allow UDP port 5353 and TCP ports 5466 to 5479? Otherwise run {command} with the address "
        "of the PC that leads it, or paste a token from `molink invite`",
        command=place.format_command("join HOST"),
    )
    if is_terminal():
        if settings.discovery:
            print(f"{nothing[0].upper()}{nothing[1:]}.")
        token: str = typer.prompt(tr("Join token"), hide_input=True)
        return token
    if settings.discovery:
        raise Unavailable(nothing)
    return None


def pair_with_swarm(
    place: "Home", settings: "Settings", address: tuple[str, int] | None, swarm: str | None
) -> bool:
    """Pair this PC with a swarm by a code that a person approves, and save the membership.

    Returns ``False`` if no swarm was found; ``address`` (host and pairing port) and ``swarm`` (a
    name or an id) select one.

    Raises:
        MolinkError: pairing failed.
    """
    from molink.wire.sockets.event_loop import EventLoop
    from molinkd.peer.home import HomeLock
    from molinkd.peer.membership.pairing_client import request_pairing

    lock = HomeLock(place.create_folders())
    lock.acquire()
    try:
        keys = place.load_keys()
        nearby = (
            _find_host(settings, *address)
            if address is not None
            else _choose_swarm(settings, swarm)
        )
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


def _find_host(settings: "Settings", host: str, port: int) -> "DiscoveredSwarm":
    from molink.swarm.membership.discovery import DiscoveredSwarm
    from molink.swarm.membership.join_token import TOKEN_PREFIX
    from molinkd.peer.membership.host_lookup import lookup_host

    try:
        addresses = lookup_host(host, settings.host)
    except Unavailable as error:
        raise Unavailable(
            tr(
                "{error}. Give the address that `molink status` shows there, as in `molink join "
                "192.168.1.7`; `molink join` alone looks for swarms on this network. A token "
                "starts with `{prefix}`",
                error=error,
                prefix=TOKEN_PREFIX,
            )
        ) from None
    return DiscoveredSwarm("", "", "", addresses, port)


def _choose_swarm(settings: "Settings", name_or_id: str | None) -> "DiscoveredSwarm | None":
    from molinkd.peer.membership.discovery import scan_network

    print(tr("Looking for swarms on this network …"), flush=True)
    found = scan_network(settings.host)
    if name_or_id is not None:
        found = [one for one in found if name_or_id in (one.name, one.swarm)]
    if not found:
        return None
    if len(found) == 1:
        text = tr("Found {swarm}.", swarm=_describe_swarm(found[0]))
        print(printable(text), flush=True)
        return found[0]
    print(tr("Found:"))
    for number, one in enumerate(found, 1):
        print(printable(f"  {number}  {_describe_swarm(one)}"), flush=True)
    if not is_terminal():
        raise UsageError(
            tr("several swarms found on this network: choose one with --swarm NAME or its id")
        )
    number = 0
    while not 1 <= number <= len(found):
        number = typer.prompt(tr("Which one (1 to {last})", last=len(found)), type=int)
    return found[number - 1]


def _describe_swarm(one: "DiscoveredSwarm") -> str:
    return tr(
        "swarm {name} ({id}) at {addresses}",
        name=one.name,
        id=one.swarm,
        addresses=", ".join(one.addresses),
    )


def _print_code(code: "PairingCode", name: str) -> None:
    asks = tr("This PC ({name}) asks to join swarm {swarm} with code", name=name, swarm=code.name)
    approve = tr(
        "On a PC of the swarm, run `molink approve {code}` if it shows the same code. Waiting for "
        "approval. Ctrl-C cancels.",
        code=code.code,
    )
    print(printable(f"\n{asks}\n\n    {code.code}\n\n{approve}", keep="\n"), flush=True)


def _undo_join(place: "Home", member: "MembershipRecord") -> None:
    """Leave the swarm again after a failed confirmation, since this PC is already a member."""
    from molink.wire.messages.admin import LeaveRequest
    from molinkd.cli import daemon_client

    try:
        daemon_client.request_coordinator(place, member, LeaveRequest(ref=0))
    except MolinkError as error:
        text = tr(
            "The swarm could not be notified that this PC does not join ({error}). If it is your "
            "swarm, run `molink revoke` there.",
            error=error,
        )
        print(printable(text))


def _confirm_code(code: "PairingCode", place: "Home") -> None:
    """Ask the user whether the right swarm approved, if a terminal is attached.

    Only the user can tell: an impostor would claim approval too.
    """
    if not is_terminal():
        text = tr(
            "Approved by swarm {swarm}. This is safe only if {code} was shown there too.",
            swarm=code.name,
            code=code.code,
        )
        print(printable(text), flush=True)
        return
    question = tr(
        "Approved. Did {swarm} show the same code, {code}?", swarm=code.name, code=code.code
    )
    if not typer.confirm(printable(question)):
        raise PairingRefused(
            tr(
                "this PC did not join: another PC may impersonate the swarm. Run {command} again "
                "and compare the codes, or join with a token (`molink invite` prints one)",
                command=place.format_command("join"),
            )
        )
