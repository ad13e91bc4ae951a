"""Announcements of swarms on the local network.

Anyone on the network can announce anything. So an announcement is neither secret nor trusted, and
only says where to request pairing (:mod:`molink.swarm.membership.pairing`).
"""

import ipaddress
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from molink.swarm.membership.sanitize import sanitize_name

#: DNS-SD service type.
SERVICE_TYPE = "_molink._tcp.local."
#: Format version of announcements.
ANNOUNCEMENT_VERSION = "1"
#: Maximum swarms listed.
MAX_SWARMS = 16
_MAX_ADDRESSES = 6
#: Maximum bytes of a property's value.
_MAX_VALUE = 255
#: Default port of the pairing listener, the last port that the firewall rule opens.
PAIRING_PORT = 5479
_ID = re.compile(r"[0-9a-f]{16}\Z")
_KEY = re.compile(r"[!-~]{40}\Z")


@dataclass(frozen=True, slots=True)
class DiscoveredSwarm:
    """A swarm and its pairing port. ``public_key`` is the coordinator's; empty if unknown."""

    swarm: str
    name: str
    public_key: str
    addresses: tuple[str, ...]
    port: int

    @property
    def properties(self) -> dict[str, str]:
        """The announcement's properties, besides addresses and port."""
        return {
            "v": ANNOUNCEMENT_VERSION,
            "swarm": self.swarm,
            "name": self.name,
            "key": self.public_key,
        }


def instance_name(swarm: str) -> str:
    """Return the DNS-SD instance name of a swarm."""
    return f"molink-{swarm}.{SERVICE_TYPE}"


def parse_announcement(
    properties: Mapping[bytes, bytes | None], addresses: Iterable[str], port: int | None
) -> DiscoveredSwarm | None:
    """Parse an announcement to a swarm with a sanitized name; ``None`` if it is invalid."""
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
    """Whether ``text`` has the form of a swarm's id."""
    return _ID.match(text) is not None


def is_dialable(address: str) -> bool:
    """Whether an announced address can be another PC on this network."""
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
