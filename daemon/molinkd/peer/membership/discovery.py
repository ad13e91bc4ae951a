"""Announces this PC's swarm on the local network, and scans for others (zeroconf).

zeroconf runs in its own threads, so that traffic from strangers can't block the daemon. Nothing
announced is secret and nothing received is trusted; :mod:`molink.swarm.membership.discovery`
validates it.
"""

import asyncio
import contextlib
import logging
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from molink.errors import Unavailable
from molink.swarm.membership.discovery import (
    MAX_SWARMS,
    SERVICE_TYPE,
    DiscoveredSwarm,
    instance_name,
    is_dialable,
    parse_announcement,
)
from molinkd.peer.election.coordinator_process import CoordinatorAnnouncement
from molinkd.peer.membership.addresses import advertised_addresses, multicast_addresses
from molinkd.peer.settings import Settings
from molinkd.tasks import cancel_tasks

if TYPE_CHECKING:
    from zeroconf import ServiceStateChange, Zeroconf

log = logging.getLogger(__name__)

#: Interval of checking whether the announcement has changed, in seconds.
POLL_S = 2.0
#: Duration of a scan, and its remaining duration after the first result, in seconds.
LOOK_S, MORE_S = 10.0, 1.5
#: Duration of a scan for missing peers, and the longest pause between two scans, in seconds.
MISSED_S, SELDOM_S = 3.0, 60.0
#: Maximum number of discovered addresses.
_MAX_ADDRESSES = 8
#: Timeout of resolving one announcement, in milliseconds.
_DETAILS_MS = 800
#: Pause before an announcement is asked for again, in seconds.
_RETRY_S = 0.5
#: Maximum number of announcements per scan: a hostile PC can send any number.
_MAX_ANNOUNCEMENTS = 64

#: An announcement and the local addresses to send it from.
_Announced = tuple[DiscoveredSwarm, tuple[str, ...]]


class SwarmAnnouncer:
    """Announces the swarm while this PC leads it."""

    def __init__(
        self, settings: Settings, coordinator: Callable[[], CoordinatorAnnouncement | None]
    ) -> None:
        """``coordinator()`` returns the announcement of this PC's coordinator."""
        self._settings, self._coordinator = settings, coordinator
        self._zeroconf: Zeroconf | None = None
        self._announced: _Announced | None = None
        self._task: asyncio.Task[None] | None = None
        #: Held while a thread changes the announcement.
        self._lock = threading.Lock()
        self._is_closed = False

    def start(self) -> None:
        """Start, unless discovery is off or the host is loopback only."""
        if self._settings.discovery and multicast_addresses(self._settings.host):
            self._task = asyncio.get_running_loop().create_task(self._run(), name="molink-announce")

    async def close(self) -> None:
        """Withdraw the announcement."""
        if self._task is not None:
            await cancel_tasks(self._task)
            self._is_closed = True
            await asyncio.to_thread(self._set_announced, None)

    async def _run(self) -> None:
        while True:
            wanted = self._wanted_announcement()
            if wanted != self._announced:
                await asyncio.to_thread(self._set_announced, wanted)
            await asyncio.sleep(POLL_S)

    def _wanted_announcement(self) -> _Announced | None:
        found, settings = self._coordinator(), self._settings
        interfaces = multicast_addresses(settings.host)
        if found is None or not found.pairing_port or not interfaces:
            return None
        advertised = advertised_addresses(settings.host, settings.advertise)
        addresses = tuple(one for one in advertised if is_dialable(one))
        nearby = DiscoveredSwarm(
            found.swarm, found.name, found.public_key, addresses, found.pairing_port
        )
        return (nearby, interfaces) if addresses else None

    def _set_announced(self, wanted: _Announced | None) -> None:
        """Replace the announcement. Blocks."""
        from zeroconf import Error

        with self._lock:
            if self._is_closed and wanted is not None:
                return
            before, self._zeroconf, self._announced = self._zeroconf, None, wanted
            try:
                if before is not None:
                    before.close()
                if wanted is not None:
                    self._zeroconf = _register_service(*wanted)
            except (OSError, Error) as error:
                log.warning("can't announce the swarm on the local network: %r", error)


class MissingSwarm(Protocol):
    """The swarm that a :class:`DiscoveryScanner` scans for."""

    @property
    def swarm(self) -> str: ...
    @property
    def has_missing_peers(self) -> bool:
        """Whether some peer is unreachable at its known addresses."""
        ...

    def add_addresses(self, addresses: tuple[str, ...]) -> None:
        """Add discovered addresses of the swarm."""
        ...


class DiscoveryScanner:
    """Scans the local network for a swarm whose peers have new addresses.

    A new router may change all addresses. Discovered ones are only tried: peers authenticate by
    key.
    """

    def __init__(self, settings: Settings, missed: MissingSwarm) -> None:
        self._settings, self._swarm = settings, missed
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start, unless discovery is off or the host is loopback only."""
        if self._settings.discovery and multicast_addresses(self._settings.host):
            self._task = asyncio.get_running_loop().create_task(
                self._run(), name="molink-discovery"
            )

    async def close(self) -> None:
        """Stop scanning."""
        await cancel_tasks(self._task)

    async def _run(self) -> None:
        pause = POLL_S
        while True:
            await asyncio.sleep(pause)
            if not self._swarm.has_missing_peers:
                pause = POLL_S
                continue
            self._swarm.add_addresses(await asyncio.to_thread(self._scan))
            pause = min(2 * pause, SELDOM_S)

    def _scan(self) -> tuple[str, ...]:
        try:
            found = scan_network(self._settings.host, MISSED_S)
        except Unavailable as error:
            log.info("%s", error)
            return ()
        here = {*multicast_addresses(self._settings.host)}
        addresses = (
            one for near in found if near.swarm == self._swarm.swarm for one in near.addresses
        )
        return tuple(one for one in dict.fromkeys(addresses) if one not in here)[:_MAX_ADDRESSES]


def _register_service(nearby: DiscoveredSwarm, interfaces: Sequence[str]) -> "Zeroconf":
    from zeroconf import ServiceInfo

    name = instance_name(nearby.swarm)
    families = {True: socket.AF_INET6, False: socket.AF_INET}
    info = ServiceInfo(
        SERVICE_TYPE,
        name,
        port=nearby.port,
        properties=nearby.properties,
        addresses=[socket.inet_pton(families[":" in one], one) for one in nearby.addresses],
        server=f"{name.partition('.')[0]}.local.",
    )
    zeroconf = open_zeroconf(interfaces)
    try:
        # A number is appended if another PC has this name.
        zeroconf.register_service(info, allow_name_change=True)
    except BaseException:
        zeroconf.close()
        raise
    log.info("announcing the swarm on the networks of %s", ", ".join(interfaces))
    return zeroconf


def scan_network(host: str, seconds: float = LOOK_S, more: float = MORE_S) -> list[DiscoveredSwarm]:
    """Swarms announced on the networks of ``host``.

    Blocks for about ``seconds``, or ``more`` seconds after the first swarm is found.

    Raises:
        Unavailable: Multicast is not possible on this PC.
    """
    from zeroconf import Error

    interfaces = multicast_addresses(host)
    try:
        return _Scan(interfaces).run_scan(seconds, more) if interfaces else []
    except (OSError, Error) as error:
        raise Unavailable(
            f"can't scan this network for swarms: {error!r}. Name the PC that leads it, as in "
            "`molink join 192.168.1.7`, or join with a token"
        ) from None


class _Scan:
    """One scan."""

    def __init__(self, interfaces: Sequence[str]) -> None:
        self._interfaces = interfaces
        self._seen: dict[str, None] = {}
        self._resolved: set[str] = set()
        self._found: dict[tuple[str, str], DiscoveredSwarm] = {}
        self._changed = threading.Event()

    def run_scan(self, seconds: float, more: float) -> list[DiscoveredSwarm]:
        """Scan for ``seconds``, or until ``more`` seconds after the first swarm is found."""
        from zeroconf import ServiceBrowser

        zeroconf = open_zeroconf(self._interfaces)
        until = time.monotonic() + seconds
        tried: Counter[str] = Counter()
        try:
            browser = ServiceBrowser(zeroconf, SERVICE_TYPE, handlers=[self._on_service])
            while (left := until - time.monotonic()) > 0:
                unresolved = [one for one in list(self._seen) if one not in self._resolved]
                name = min(unresolved, key=tried.__getitem__, default=None)
                if name is None or tried[name]:
                    self._changed.wait(min(left, _RETRY_S))
                    self._changed.clear()
                if name is None:
                    continue
                # Multicast packets get lost, on Wi-Fi above all: a name is tried until it answers.
                tried[name] += 1
                if self._resolve_service(zeroconf, name) and len(self._found) == 1:
                    until = min(until, time.monotonic() + more)
            browser.cancel()
        finally:
            zeroconf.close()
        return list(self._found.values())[:MAX_SWARMS]

    def _on_service(
        self, zeroconf: "Zeroconf", service_type: str, name: str, state_change: "ServiceStateChange"
    ) -> None:
        """Callback of zeroconf, which passes these names as keywords, in its own thread."""
        del zeroconf, service_type, state_change
        if len(self._seen) < _MAX_ANNOUNCEMENTS:
            self._seen[name] = None
            self._changed.set()

    def _resolve_service(self, zeroconf: "Zeroconf", name: str) -> bool:
        from zeroconf import IPVersion, ServiceInfo

        with contextlib.suppress(Exception):  # untrusted bytes in a third-party parser
            info = ServiceInfo(SERVICE_TYPE, name)
            if info.request(zeroconf, _DETAILS_MS):
                self._resolved.add(name)
                addresses = info.parsed_addresses(IPVersion.V4Only)
                nearby = parse_announcement(info.properties, addresses, info.port)
                if nearby is not None and len(self._found) < MAX_SWARMS:
                    self._found[nearby.swarm, nearby.public_key] = nearby
                    return True
        return False


def open_zeroconf(interfaces: Sequence[str]) -> "Zeroconf":
    """Open multicast DNS on the IPv4 addresses of ``interfaces``."""
    from zeroconf import IPVersion, Zeroconf

    usable = [one for one in interfaces if ":" not in one]
    return Zeroconf(interfaces=usable, ip_version=IPVersion.V4Only)
