"""Finds the addresses of a PC by its name, also where only multicast DNS knows it."""

import contextlib
import ipaddress
import socket
import threading

from molink.errors import Unavailable
from molinkd.peer.membership.addresses import multicast_addresses
from molinkd.peer.membership.discovery import open_zeroconf

#: Timeout of the operating system's lookup, in seconds, and of multicast DNS, in milliseconds.
_LOOKUP_S, _MULTICAST_MS = 8.0, 2000
MAX_ADDRESSES = 6


def lookup_host(host: str, bound_to: str) -> tuple[str, ...]:
    """Addresses of ``host`` (a name or an address), IPv4 first since peers listen there by default.

    A name without a domain, or of ``.local``, is also asked for by multicast DNS, on the networks
    of sockets bound to ``bound_to``: many systems do not do that themselves. Blocks for about 10 s
    at most.

    Raises:
        Unavailable: nobody knows the name.
    """
    with contextlib.suppress(ValueError):
        ipaddress.ip_address(host)
        return (host,)
    found, failure = _ask_system(host)
    name = host.rstrip(".").lower().removesuffix(".local")
    if not found and "." not in name:
        found = _ask_multicast(f"{name}.local.", bound_to)
    if not found:
        raise Unavailable(f"there is no PC named {host} here: {failure}")
    ordered = sorted(dict.fromkeys(found), key=lambda one: ":" in one)
    return tuple(ordered[:MAX_ADDRESSES])


def _ask_system(host: str) -> tuple[list[str], str]:
    """Return the addresses, and why there are none; a lookup can't be interrupted."""
    found: list[str] = []
    failures: list[str] = []

    def resolve() -> None:
        try:
            for *_, address in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM):
                found.append(str(address[0]))
        except (OSError, UnicodeError) as error:
            failures.append(str(getattr(error, "strerror", None) or error))

    thread = threading.Thread(target=resolve, name="molink-lookup", daemon=True)
    thread.start()
    thread.join(_LOOKUP_S)
    return list(found), "".join(failures[:1]) or f"no answer within {_LOOKUP_S:g} s"


def _ask_multicast(name: str, bound_to: str) -> list[str]:
    from zeroconf import AddressResolver  # type: ignore[attr-defined]  # not in its __all__

    interfaces = multicast_addresses(bound_to)
    if not interfaces:
        return []
    with contextlib.suppress(Exception):  # no multicast here, or untrusted bytes in its parser
        zeroconf = open_zeroconf(interfaces)
        try:
            resolver = AddressResolver(name)
            resolver.request(zeroconf, _MULTICAST_MS)
            return resolver.parsed_scoped_addresses()
        finally:
            zeroconf.close()
    return []
