"""Port mappings by UPnP-IGD, from routers that answer properly and with all kinds of nonsense."""

import asyncio
import gzip
import ipaddress
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from molink.wire.port_mapping import FORBIDDEN, MAX_LIFETIME_S, TAKEN, is_public_address
from molinkd.peer.membership import upnp_client, upnp_worker
from molinkd.peer.membership.port_mapper import PortMapper
from molinkd.peer.membership.upnp_client import (
    SILENT,
    TOO_SLOW,
    UNUSABLE,
    UpnpClient,
    UpnpReply,
    UpnpRequest,
)
from tests.support.fake_gateway import (
    PUBLIC,
    FakeGateway,
    Handler,
    describe_device,
    soap_answer,
    soap_fault,
)

PORTS = (5466, 5467, 5468)
LIFETIME = 7200
OWN = "127.0.0.1"
StartGateway = Callable[..., Awaitable[FakeGateway]]


@pytest.fixture
async def start_gateway() -> AsyncIterator[StartGateway]:
    started: list[FakeGateway] = []

    async def start(handler: Handler | None = None, location: str = "") -> FakeGateway:
        gateway = FakeGateway(handler, location)
        await gateway.start()
        started.append(gateway)
        return gateway

    yield start
    for one in started:
        await one.close()


async def ask(gateway: FakeGateway, lifetime: int = LIFETIME) -> UpnpReply:
    """What the process would answer, computed in this one."""
    request = UpnpRequest(
        gateway=OWN, own=OWN, ports=PORTS, lifetime=lifetime, search_port=gateway.search_port
    )
    return await upnp_worker.handle_request(request)


def replace(path: str, answer: Callable[[], web.StreamResponse]) -> Handler:
    """Replaces the answer to one path or action."""

    async def handle(_: web.Request, asked: str) -> web.StreamResponse | None:
        return answer() if asked == path else None

    return handle


def document(text: str | bytes, **options: Any) -> Handler:
    """Replaces the device's description."""
    body = text.encode() if isinstance(text, str) else text
    return replace("/device.xml", lambda: web.Response(body=body, **options))


async def test_ports_are_mapped_renewed_and_given_back(
    start_gateway: StartGateway, tmp_path: Path
) -> None:
    gateway = await start_gateway()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as free:
        free.bind((OWN, 0))
        closed_port = free.getsockname()[1]
    upnp = UpnpClient(tmp_path / "upnp.log", gateway.search_port)
    mapper = PortMapper(PORTS, upnp, lambda: OWN, closed_port)
    await mapper.start()
    assert (mapper.address, mapper.mapped_by, mapper.failure) == (PUBLIC, "UPnP", "")
    assert gateway.mappings == {port: (OWN, port, LIFETIME) for port in PORTS}
    gateway.mappings.clear()
    assert await mapper._renew() == LIFETIME / 2
    assert set(gateway.mappings) == set(PORTS)
    await mapper.close()
    assert gateway.mappings == {}


async def test_a_router_may_know_mappings_without_an_end_only(start_gateway: StartGateway) -> None:
    gateway = await start_gateway()
    gateway.only_permanent = True
    assert await ask(gateway) == UpnpReply(address=PUBLIC, lifetime=LIFETIME)
    assert gateway.mappings == {port: (OWN, port, 0) for port in PORTS}
    assert await ask(gateway, lifetime=0) == UpnpReply(address=PUBLIC)
    assert gateway.mappings == {}


@pytest.mark.parametrize(("told", "counts"), [(120, 120), (1 << 32, MAX_LIFETIME_S), (0, LIFETIME)])
async def test_a_lease_is_bounded(start_gateway: StartGateway, told: int, counts: int) -> None:
    gateway = await start_gateway()
    gateway.lease = told
    assert (await ask(gateway)).lifetime == counts


@pytest.mark.parametrize("told", [-1, "9" * 5000, "soon"])
async def test_a_lease_of_nonsense_maps_nothing(start_gateway: StartGateway, told: Any) -> None:
    gateway = await start_gateway()
    gateway.lease = told
    assert await ask(gateway) == UpnpReply(failure=UNUSABLE)
    assert gateway.mappings.keys().isdisjoint(PORTS[1:])


@pytest.mark.parametrize(
    ("code", "says"),
    [
        (718, TAKEN),
        (606, FORBIDDEN),
        (501, "it answers with UPnP's error 501"),
        (-1, "it answers with UPnP's error -1"),
        ("", "it answers with UPnP's error None"),
        ("all is well", UNUSABLE),
        ("9" * 5000, UNUSABLE),
    ],
)
async def test_a_refusal_maps_no_port(start_gateway: StartGateway, code: Any, says: str) -> None:
    async def refuse_last(request: web.Request, asked: str) -> web.StreamResponse | None:
        is_last = f">{PORTS[-1]}<" in await request.text()
        return soap_fault(code) if asked == "AddPortMapping" and is_last else None

    gateway = await start_gateway(refuse_last)
    assert await ask(gateway) == UpnpReply(failure=says)
    assert gateway.requests.count("AddPortMapping") == len(PORTS)
    assert gateway.mappings == {}


async def test_another_pcs_mapping_stays(start_gateway: StartGateway) -> None:
    gateway = await start_gateway()
    theirs = gateway.mappings[PORTS[1]] = ("192.168.1.9", PORTS[1], 100)
    assert await ask(gateway) == UpnpReply(failure=TAKEN)
    await ask(gateway, lifetime=0)
    assert gateway.mappings == {PORTS[1]: theirs}


@pytest.mark.parametrize("lease", [0, 100])
async def test_a_router_that_maps_to_another_pc_is_refused(
    start_gateway: StartGateway, lease: int
) -> None:
    async def to_another(_: web.Request, asked: str) -> web.StreamResponse | None:
        if asked == "AddPortMapping":
            gateway.mappings[PORTS[0]] = ("192.168.1.9", PORTS[0], lease)
            return soap_answer(asked)
        return None

    gateway = await start_gateway(to_another)
    assert await ask(gateway) == UpnpReply(failure=UNUSABLE)


@pytest.mark.parametrize(
    "address",
    ["192.168.7.7", "100.64.0.9", "127.0.0.1", "224.0.0.1", "255.255.255.255", "0.0.0.0"],
)
async def test_no_port_is_opened_without_a_public_address(
    start_gateway: StartGateway, address: str
) -> None:
    gateway = await start_gateway()
    gateway.address = address
    assert await ask(gateway) == UpnpReply(address=address)
    assert "AddPortMapping" not in gateway.requests
    assert not is_public_address(address)


async def test_a_connection_without_an_address_is_passed_over(start_gateway: StartGateway) -> None:
    """Routers list one by PPP and one by IP, of which one is in use."""
    unused = ("", "192.168.7.7")

    async def answer(_: web.Request, asked: str) -> web.StreamResponse | None:
        count = gateway.requests.count(asked)
        if asked != "GetExternalIPAddress" or count > len(unused):
            return None
        return soap_answer(asked, NewExternalIPAddress=unused[count - 1])

    gateway = await start_gateway(answer)
    gateway.connections = ("WANPPPConnection:1", "WANIPConnection:2", "WANIPConnection:1")
    assert await ask(gateway) == UpnpReply(address=PUBLIC, lifetime=LIFETIME)


@pytest.mark.parametrize("address", ["", "molink.example", "2001:db8::1", "1.2.3", "9" * 5000])
async def test_an_address_that_is_none_is_unusable(
    start_gateway: StartGateway, address: str
) -> None:
    gateway = await start_gateway()
    gateway.address = address
    assert await ask(gateway) == UpnpReply(failure=UNUSABLE)


@pytest.mark.parametrize(
    "location",
    [
        "http://127.0.0.2:80/device.xml",
        "http://router.example/device.xml",
        "https://127.0.0.1/device.xml",
        "http://user:word@127.0.0.1/device.xml",
        "http://127.0.0.1:99999999/device.xml",
        "http://[127.0.0.1/device.xml",
        "file:///etc/passwd",
        "\x00\xff",
        " ",
    ],
)
async def test_descriptions_elsewhere_are_not_fetched(
    start_gateway: StartGateway, monkeypatch: pytest.MonkeyPatch, location: str
) -> None:
    monkeypatch.setattr(upnp_worker, "_SEARCH_WAITS_S", (0.05,))
    gateway = await start_gateway(location=location)
    assert await ask(gateway) == UpnpReply(failure=SILENT)
    assert gateway.requests == []


async def test_answers_of_other_devices_are_ignored(
    start_gateway: StartGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device without the router's address points at a page of the router, such as "reboot"."""
    monkeypatch.setattr(upnp_worker, "_SEARCH_WAITS_S", (0.05,))
    gateway = await start_gateway()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as device:
        device.bind(("127.0.0.2", 0))
        monkeypatch.setattr(gateway._search, "sendto", device.sendto)
        assert await ask(gateway) == UpnpReply(failure=SILENT)
    assert gateway.requests == []


async def test_a_silent_router_says_so(
    start_gateway: StartGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upnp_worker, "_SEARCH_WAITS_S", (0.02, 0.02))
    gateway = await start_gateway()
    heard: list[bytes] = []
    monkeypatch.setattr(gateway, "datagram_received", lambda data, _: heard.append(data))
    assert await ask(gateway) == UpnpReply(failure=SILENT)
    assert heard


LAUGHS = "".join(f'<!ENTITY a{n} "{f"&a{n - 1};" * 10}">' for n in range(1, 12))
NONSENSE = {
    "billion-laughs": document(
        f'<?xml version="1.0"?><!DOCTYPE x [<!ENTITY a0 "ha">{LAUGHS}]><root>&a11;</root>'
    ),
    "external-entity": document(
        '<!DOCTYPE x [<!ENTITY e SYSTEM "file:///etc/passwd">]><root>&e;</root>'
    ),
    "deep": document("<a>" * 30_000 + "</a>" * 30_000),
    "deep-devices": document(
        '<root xmlns="urn:schemas-upnp-org:device-1-0">'
        + "<device><deviceList>" * 6_000
        + "</deviceList></device>" * 6_000
        + "</root>"
    ),
    "gzip": document(gzip.compress(bytes(1 << 20)), headers={"Content-Encoding": "gzip"}),
    "empty": document(""),
    "no-xml": document(bytes(range(256))),
    "utf-16": document(describe_device().encode("utf-16")),
    "other-control": document(describe_device(control="http://127.0.0.2:80/control")),
    "other-service": document(describe_device(service="http://127.0.0.2:80/service.xml")),
    "other-scheme": document(describe_device(control="ftp://127.0.0.1/control")),
    "bad-url": document(describe_device(control="http://[/")),
    "redirect": replace(
        "/device.xml", lambda: web.Response(status=302, headers={"Location": "/elsewhere"})
    ),
    "redirected-action": replace(
        "GetExternalIPAddress",
        lambda: web.Response(status=307, headers={"Location": "/elsewhere"}),
    ),
    "no-actions": replace("/service.xml", lambda: web.Response(text="<scpd/>")),
    "not-found": document("", status=404),
    "action-without-xml": replace("GetExternalIPAddress", lambda: web.Response(text="8.8.8.8")),
    "other-action": replace("GetExternalIPAddress", lambda: soap_answer("Reboot", NewTime=1)),
    "huge-header": document("", headers={"X-Name": "x" * 100_000}),
}


@pytest.mark.parametrize("name", NONSENSE)
async def test_nonsense_maps_nothing(start_gateway: StartGateway, name: str) -> None:
    gateway = await start_gateway(NONSENSE[name])
    assert await ask(gateway) == UpnpReply(failure=UNUSABLE)
    assert "/elsewhere" not in gateway.requests
    assert gateway.mappings == {}


async def test_the_number_of_documents_is_bounded(start_gateway: StartGateway) -> None:
    device = describe_device()
    begin, end = device.index("<service>"), device.index("</service>") + len("</service>")
    many = device[:begin] + device[begin:end] * 500 + device[end:]
    gateway = await start_gateway(document(many))
    assert await ask(gateway) == UpnpReply(failure=UNUSABLE)
    assert len(gateway.requests) == upnp_worker._MAX_DOCUMENTS


@pytest.mark.parametrize("asked", ["/device.xml", "/service.xml", "GetExternalIPAddress"])
async def test_an_endless_document_is_cut(start_gateway: StartGateway, asked: str) -> None:
    async def send_endlessly(request: web.Request, path: str) -> web.StreamResponse | None:
        if path != asked:
            return None
        response = web.StreamResponse()
        await response.prepare(request)
        while True:
            await response.write(b"<a/>" * 4096)

    gateway = await start_gateway(send_endlessly)
    assert await ask(gateway) == UpnpReply(failure=UNUSABLE)


@pytest.mark.parametrize("asked", ["/device.xml", "GetExternalIPAddress"])
async def test_a_trickle_is_cut(
    start_gateway: StartGateway, monkeypatch: pytest.MonkeyPatch, asked: str
) -> None:
    monkeypatch.setattr(upnp_worker, "_HTTP_TIMEOUT_S", 0.1)

    async def trickle(request: web.Request, path: str) -> web.StreamResponse | None:
        if path != asked:
            return None
        response = web.StreamResponse()
        await response.prepare(request)
        while True:
            await response.write(b" ")
            await asyncio.sleep(0.001)

    gateway = await start_gateway(trickle)
    assert await ask(gateway) == UpnpReply(failure=UNUSABLE)


async def test_all_requests_together_have_a_deadline(
    start_gateway: StartGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upnp_worker, "REQUEST_TIMEOUT_S", 0.1)

    async def wait(_: web.Request, asked: str) -> web.StreamResponse | None:
        if asked == "AddPortMapping":
            await asyncio.Event().wait()
        return None

    gateway = await start_gateway(wait)
    assert await ask(gateway) == UpnpReply(failure=TOO_SLOW)


def command(code: str) -> tuple[str, ...]:
    return (sys.executable, "-c", f"import sys; sys.stdin.readline(); {code}")


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("sys.stdin.read()", TOO_SLOW),
        ("import os; os._exit(1)", UNUSABLE),
        ("print('no JSON')", UNUSABLE),
        ("print('x' * 10_000_000)", UNUSABLE),
        ("print('{\"lifetime\": -1}')", UNUSABLE),
    ],
)
async def test_a_process_that_fails_is_killed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, code: str, says: str
) -> None:
    if says == TOO_SLOW:
        monkeypatch.setattr(upnp_client, "_KILL_TIMEOUT_S", 0.5)
    client = UpnpClient(tmp_path / "upnp.log", command=command(code))
    assert await client.map_ports(OWN, OWN, PORTS, LIFETIME) == UpnpReply(failure=says)


async def test_a_process_that_takes_much_memory_is_killed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(upnp_client, "_MAX_MEMORY_BYTES", 64 << 20)
    hoard = command("hoard = b'x' * (128 << 20); sys.stdin.read()")
    client = UpnpClient(tmp_path / "upnp.log", command=hoard)
    assert await client.map_ports(OWN, OWN, PORTS, LIFETIME) == UpnpReply(failure=UNUSABLE)


async def test_what_the_process_says_is_checked(tmp_path: Path) -> None:
    """Even a process taken over by a device of the home adds neither addresses nor lines."""
    replies = {
        '{"address": "10.0.0.1", "lifetime": 7200}': "no public address itself (10.0.0.1)",
        '{"address": "evil\\u001b[2J", "lifetime": 7200}': "public address itself (evil\\x1b[2J)",
        '{"failure": "a\\nWARNING b"}': "a\\nWARNING b",
    }
    for reply, says in replies.items():
        client = UpnpClient(tmp_path / "upnp.log", command=command(f"print({reply!r})"))
        mapper = PortMapper(PORTS, client, lambda: OWN, 9)
        await mapper.start()
        await mapper.close()
        assert says in mapper.failure
        assert mapper.address == ""


def test_public_addresses_are_of_one_host() -> None:
    for octet in range(256):
        address = ipaddress.IPv4Address(bytes([octet, 1, 1, 1]))
        expected = not (octet in (0, 10, 127) or octet >= 224)
        assert is_public_address(str(address)) is expected
    assert not is_public_address("2606:4700::1111")
    assert not is_public_address("8.8.8.8, 8.8.4.4")
