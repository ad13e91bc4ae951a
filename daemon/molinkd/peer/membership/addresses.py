"""This PC's addresses, as other PCs see them."""

import ipaddress
import re
import socket
from collections.abc import Collection, Iterable, Sequence

import psutil

from molink.swarm.membership.discovery import is_dialable

MAX_ADDRESSES = 8
LOOPBACK = "127.0.0.1"
_HOST_NAME = re.compile(r"(?=.{1,253}\Z)[A-Za-z0-9_](?:[A-Za-z0-9._-]*[A-Za-z0-9])?\.?")
#: Looks like an address even where it is not a valid one.
_NUMERIC = re.compile(r"[0-9.]+")


def is_loopback(host: str) -> bool:
    """Whether only this PC can reach ``host``."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def is_wildcard(host: str) -> bool:
    """Whether binding to ``host`` means every interface."""
    return host in ("0.0.0.0", "::", "*", "")


def is_reachable_name(text: str) -> bool:
    """Whether ``text`` is an address or host name that another PC could dial; without a port."""
    try:
        return not ipaddress.ip_address(text).is_unspecified
    except ValueError:
        return _HOST_NAME.fullmatch(text) is not None and not _NUMERIC.fullmatch(text)


def local_dial_host(host: str) -> str:
    """The address to dial from this PC for sockets bound to ``host``."""
    return LOOPBACK if is_wildcard(host) else host


def advertised_addresses(host: str, explicit: Sequence[str] = ()) -> tuple[str, ...]:
    """Addresses to advertise for sockets bound to ``host``, best first."""
    if explicit:
        return tuple(explicit)[:MAX_ADDRESSES]
    if not is_wildcard(host):
        return (host,)
    families = (socket.AF_INET, socket.AF_INET6) if host == "::" else (socket.AF_INET,)
    return rank_addresses(_interface_addresses(families), _outgoing_address())


def multicast_addresses(host: str) -> tuple[str, ...]:
    """This PC's addresses in the networks of sockets bound to ``host``; empty for loopback."""
    found = _interface_addresses((socket.AF_INET,)) if is_wildcard(host) else [host]
    return tuple(dict.fromkeys(one for one in found if is_dialable(one)))


def rank_addresses(found: Iterable[str], outgoing: str | None) -> tuple[str, ...]:
    """The default route's address first, then public ones; loopback only as a last resort."""
    others = (ipaddress.ip_address(text) for text in dict.fromkeys(found) if text != outgoing)
    usable = [one for one in others if not (one.is_loopback or one.is_link_local)]
    usable.sort(key=lambda one: not one.is_global)
    ranked = [*([outgoing] if outgoing else []), *map(str, usable)]
    return tuple(ranked[:MAX_ADDRESSES]) or (LOOPBACK,)


def _interface_addresses(families: Collection[int]) -> list[str]:
    states = psutil.net_if_stats()
    return [
        entry.address.partition("%")[0]
        for name, entries in psutil.net_if_addrs().items()
        if name not in states or states[name].isup
        for entry in entries
        if entry.family in families
    ]


def _outgoing_address() -> str | None:
    """The local address of the default route; sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            return None
        address = str(probe.getsockname()[0])
    return None if is_loopback(address) or address == "0.0.0.0" else address
