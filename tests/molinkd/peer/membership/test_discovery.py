"""A swarm is announced by its coordinator's PC, and only on interfaces that others can hear.

``tests/e2e/test_pairing.py`` receives announcements between two network namespaces; not every
machine that runs tests has multicast.
"""

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar
from unittest import mock

import msgspec
import pytest

from molink.swarm.membership.discovery import DiscoveredSwarm
from molinkd.peer.election.coordinator_process import CoordinatorAnnouncement
from molinkd.peer.membership import discovery
from molinkd.peer.membership.discovery import DiscoveryScanner, SwarmAnnouncer, scan_network
from molinkd.peer.settings import Settings
from tests.support.net import until

SAID = CoordinatorAnnouncement(
    port=5466, public_key="k" * 40, swarm="ab" * 8, name="attic", pairing_port=5479
)


class Air:
    """The current announcements."""

    def __init__(self) -> None:
        self.announced: list[DiscoveredSwarm] = []
        self.interfaces: tuple[str, ...] = ("10.0.0.1", "10.0.1.1")

    def announce(self, nearby: DiscoveredSwarm, _interfaces: Sequence[str]) -> "Air.Sign":
        self.announced.append(nearby)
        return Air.Sign(self)

    class Sign:
        def __init__(self, air: "Air") -> None:
            self.air = air

        def close(self) -> None:
            self.air.announced.pop()


@pytest.fixture
def air(monkeypatch: pytest.MonkeyPatch) -> Iterator[Air]:
    air = Air()
    monkeypatch.setattr(discovery, "POLL_S", 0.01)
    monkeypatch.setattr(discovery, "_register_service", air.announce)
    monkeypatch.setattr(discovery, "multicast_addresses", lambda _: air.interfaces)
    monkeypatch.setattr(
        discovery, "advertised_addresses", lambda *_: (*air.interfaces, "127.0.0.1", "attic")
    )
    yield air
    assert air.announced == []


async def test_announcements_follow_coordinator_and_addresses(air: Air) -> None:
    said: list[CoordinatorAnnouncement | None] = [None]
    announcer = SwarmAnnouncer(Settings(name="pc"), lambda: said[0])
    announcer.start()
    said[0] = SAID
    await until(lambda: air.announced)
    nearby = DiscoveredSwarm("ab" * 8, "attic", "k" * 40, ("10.0.0.1", "10.0.1.1"), 5479)
    assert air.announced == [nearby]
    air.interfaces = ("10.0.0.2",)
    await until(lambda: air.announced and air.announced[0].addresses == ("10.0.0.2",))
    said[0] = msgspec.structs.replace(SAID, pairing_port=0)
    await until(lambda: not air.announced)
    said[0] = SAID
    await until(lambda: air.announced)
    said[0] = None
    await until(lambda: not air.announced)
    said[0] = SAID
    await until(lambda: air.announced)
    await announcer.close()


async def test_closing_during_the_start_withdraws_the_announcement(
    air: Air, monkeypatch: pytest.MonkeyPatch
) -> None:
    registering, proceed = threading.Event(), threading.Event()
    registered: list[DiscoveredSwarm] = []

    def register_slowly(nearby: DiscoveredSwarm, interfaces: Sequence[str]) -> Air.Sign:
        registering.set()
        assert proceed.wait(60)
        registered.append(nearby)
        return air.announce(nearby, interfaces)

    def is_running() -> bool:
        return any(task.get_name() == "molink-announce" for task in asyncio.all_tasks())

    monkeypatch.setattr(discovery, "_register_service", register_slowly)
    announcer = SwarmAnnouncer(Settings(name="pc"), lambda: SAID)
    announcer.start()
    await until(registering.is_set)
    closing = asyncio.create_task(announcer.close())
    await until(lambda: not is_running())
    proceed.set()
    await closing
    assert len(registered) == 1
    assert air.announced == []


async def test_closing_at_once_announces_nothing(air: Air, monkeypatch: pytest.MonkeyPatch) -> None:
    registered: list[DiscoveredSwarm] = []
    monkeypatch.setattr(discovery, "_register_service", lambda one, _: registered.append(one))
    announcer = SwarmAnnouncer(Settings(name="pc"), lambda: SAID)
    announcer.start()
    await announcer.close()
    assert registered == []


async def test_a_failed_announcement_is_ignored(
    air: Air, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise OSError("no multicast")

    monkeypatch.setattr(discovery, "_register_service", fail)
    announcer = SwarmAnnouncer(Settings(name="pc"), lambda: SAID)
    announcer.start()
    await until(lambda: "no multicast" in caplog.text)
    await announcer.close()


async def test_nothing_is_announced_when_disabled(air: Air) -> None:
    silent = SwarmAnnouncer(Settings(name="pc", discovery=False), lambda: SAID)
    air.interfaces = ()
    alone = SwarmAnnouncer(Settings(name="pc", host="127.0.0.1"), lambda: SAID)
    for announcer in (silent, alone):
        announcer.start()
        assert announcer._task is None
        await announcer.close()


class Swarm:
    """A swarm, of which a member may be missing."""

    swarm = "ab" * 8

    def __init__(self) -> None:
        self.has_missing_peers = False
        self.heard: list[tuple[str, ...]] = []

    def add_addresses(self, addresses: tuple[str, ...]) -> None:
        self.heard.append(addresses)


async def test_missing_peers_start_a_scan(air: Air, monkeypatch: pytest.MonkeyPatch) -> None:
    near = DiscoveredSwarm("ab" * 8, "attic", "k" * 40, ("10.0.0.1", "10.0.0.7"), 5479)
    other = DiscoveredSwarm("cd" * 8, "den", "k" * 40, ("10.0.0.9",), 5479)
    looks: list[str] = []

    def look(host: str, *_: float) -> list[DiscoveredSwarm]:
        looks.append(host)
        return [near, other]

    monkeypatch.setattr(discovery, "scan_network", look)
    swarm = Swarm()
    scanner = DiscoveryScanner(Settings(name="pc"), swarm)
    scanner.start()
    await asyncio.sleep(0.05)
    assert looks == [], "everybody is there"
    swarm.has_missing_peers = True
    await until(lambda: swarm.heard)
    assert swarm.heard[0] == ("10.0.0.7",), "neither this PC nor another swarm"
    await scanner.close()
    silent = DiscoveryScanner(Settings(name="pc", discovery=False), swarm)
    silent.start()
    assert silent._task is None
    await silent.close()


def test_an_announcement_whose_packets_get_lost_is_asked_for_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of three announced names, one answers the third query and the others never answer."""
    swarm = DiscoveredSwarm("5d1f", "first", "key", ("10.0.0.1",), 5479)
    asked: list[str] = []

    class Browser:
        def __init__(
            self, zeroconf: object, kind: str, handlers: list[Callable[..., None]]
        ) -> None:
            for name in ("never", "late", "neither"):
                handlers[0](zeroconf=zeroconf, service_type=kind, name=name, state_change=None)

        def cancel(self) -> None:
            pass

    class Info:
        properties: ClassVar[dict[bytes, bytes]] = {}
        port = 5479

        def __init__(self, kind: str, name: str) -> None:
            self._name = name

        def request(self, zeroconf: object, timeout: float) -> bool:
            asked.append(self._name)
            return self._name == "late" and asked.count("late") == 3

        def parsed_addresses(self, version: object) -> list[str]:
            return []

    monkeypatch.setattr("zeroconf.ServiceBrowser", Browser)
    monkeypatch.setattr("zeroconf.ServiceInfo", Info)
    monkeypatch.setattr(discovery, "_RETRY_S", 0)
    monkeypatch.setattr(discovery, "open_zeroconf", lambda _: mock.Mock())
    monkeypatch.setattr(discovery, "multicast_addresses", lambda _: ("10.0.0.2",))
    monkeypatch.setattr(discovery, "parse_announcement", lambda *_: swarm)
    assert scan_network("0.0.0.0", seconds=60, more=0) == [swarm]
    assert asked.count("late") == 3
    assert 2 <= asked.count("never") <= 3


def test_loopback_is_not_scanned() -> None:
    assert scan_network("127.0.0.1") == []
