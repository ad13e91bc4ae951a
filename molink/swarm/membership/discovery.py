"""Swarms that announce themselves on the local network; anybody there can announce anything.

What is announced is not secret and not believed: it says where to knock, no more
(:mod:`molink.swarm.membership.pairing`).
"""

import ipaddress
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from molink.swarm.membership.sanitize import sanitize_name

#: The kind of service, as DNS-SD names it.
SERVICE_TYPE = "_molink._tcp.local."
#: Version of what is announced.
ANNOUNCEMENT_VERSION = "1"
#: Swarms that are shown.
MAX_SWARMS = 16
_MAX_ADDRESSES = 6
#: Bytes of one announced value.
_MAX_VALUE = 255
#: Where PCs knock unless another port is set: the last that one firewall rule opens.
PAIRING_PORT = 5479
_ID = re.compile(r"[0-9a-f]{16}\Z")
_KEY = re.compile(r"[!-~]{40}\Z")


@dataclass(frozen=True, slots=True)
class DiscoveredSwarm:
    """A swarm, and where to knock. ``public_key`` is the coordinator's; empty if not known."""

    swarm: str
    name: str
    public_key: str
    addresses: tuple[str, ...]
    port: int

    @property
    def properties(self) -> dict[str, str]:
        """What is announced beside addresses and port."""
        return {
            "v": ANNOUNCEMENT_VERSION,
            "swarm": self.swarm,
            "name": self.name,
            "key": self.public_key,
        }


def instance_name(swarm: str) -> str:
    """Under which name a swarm is announced."""
    return f"molink-{swarm}.{SERVICE_TYPE}"


def parse_announcement(
    properties: Mapping[bytes, bytes | None], addresses: Iterable[str], port: int | None
) -> DiscoveredSwarm | None:
    """What somebody announces, if it can be a swarm; its name is fit to be shown."""
    swarm, name, key = (
        _decode_text(properties.get(field)) for field in (b"swarm", b"name", b"key")
    )
    reachable = tuple(dict.fromkeys(a for a in addresses if is_dialable(a)))[:_MAX_ADDRESSES]
    if _decode_text(properties.get(b"v")) != ANNOUNCEMENT_VERSION or not reachable or not port:
        return None
    if not is_swarm_id(swarm) or _KEY.match(key) is None or not 0 < port < 65536:
        return None
    return DiscoveredSwarm(swarm, sanitize_name(name, swarm), key, reachable, port)


def is_swarm_id(text: str) -> bool:
    """Whether a swarm can have that id."""
    return _ID.match(text) is not None


def is_dialable(address: str) -> bool:
    """Whether an address that somebody else names can be another PC's on this network."""
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return False
    return not (
        found.is_loopback or found.is_multicast or found.is_unspecified or found.is_reserved
    )


def _decode_text(value: bytes | None) -> str:
    if value is None or len(value) > _MAX_VALUE:
        return ""
    return value.decode("utf-8", "replace")
