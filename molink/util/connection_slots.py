"""Bounds the number of connections that have not authenticated yet."""

import ipaddress
from collections.abc import Hashable
from typing import Generic, TypeVar

C = TypeVar("C", bound=Hashable)

#: Bits of an IPv6 network: one PC may use any address in it.
_IPV6_PREFIX = 64


class ConnectionSlots(Generic[C]):
    """Holds at most ``limit`` connections, and at most ``per_address`` of one address.

    A connection beyond a bound replaces an older one: of its own address if that has reached its
    bound, otherwise of the address with the most. So silent connections lock out neither other
    addresses nor other programs behind the same router: a new connection always gets a slot, and
    keeps it until many others have followed.
    """

    def __init__(self, limit: int, per_address: int) -> None:
        self._limit, self._per_address = limit, per_address
        #: Connections by network, oldest first; none is empty.
        self._networks: dict[str, dict[C, None]] = {}
        self._network_of: dict[C, str] = {}

    def __len__(self) -> int:
        return len(self._network_of)

    def admit(self, connection: C, address: str) -> C | None:
        """Add a connection; return the one that it replaces, which must be closed."""
        network = find_network(address)
        own = self._networks.get(network, {})
        replaced = None
        if len(own) >= self._per_address:
            replaced = next(iter(own))
        elif len(self) >= self._limit:
            largest = max(self._networks.values(), key=len)
            replaced = next(iter(largest))
        if replaced is not None:
            self.release(replaced)
        self._networks.setdefault(network, {})[connection] = None
        self._network_of[connection] = network
        return replaced

    def release(self, connection: C) -> None:
        """Remove a connection that has authenticated or ended; no-op if it was replaced."""
        network = self._network_of.pop(connection, None)
        if network is not None:
            del self._networks[network][connection]
            if not self._networks[network]:
                del self._networks[network]

    def validate(self) -> None:
        """Check the bounds; for tests."""
        assert len(self) == sum(map(len, self._networks.values())) <= self._limit
        assert all(0 < len(one) <= self._per_address for one in self._networks.values())


def find_network(address: str) -> str:
    """Return the network that counts as one client: an IPv4 address, or an IPv6 network.

    A dual-stack socket reports the IPv4 address 192.0.2.1 as ``::ffff:192.0.2.1``.
    """
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return address
    if found.version == 4:
        return address
    if found.ipv4_mapped is not None:
        return str(found.ipv4_mapped)
    return str(ipaddress.ip_network((found.packed, _IPV6_PREFIX), strict=False))
