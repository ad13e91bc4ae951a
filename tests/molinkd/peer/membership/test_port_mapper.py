"""Port mappings by PCP, NAT-PMP and UPnP, from honest, old and hostile routers."""

import asyncio
import random
import shutil
import socket
import struct
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from molink.errors import WireError
from molink.wire.port_mapping import (
    MAX_DATAGRAM,
    NONCE_BYTES,
    PcpAnswer,
    PmpAnswer,
    UnsupportedVersion,
    decode_answer,
    encode_pcp_request,
    encode_pmp_request,
)
from molinkd.peer.membership import port_mapper as module
from molinkd.peer.membership.gateway import find_gateway, parse_routes
from molinkd.peer.membership.port_mapper import PortMapper
from molinkd.peer.membership.upnp_client import SILENT, UpnpReply
from molinkd.peer.resources import Resources
from molinkd.peer.settings import Settings
from tests.support.net import until
from tools.wan import Node
from tools.wan.homes import Homes, homes_unavailable
from tools.wan.namespaces import enter_command, run_system

PORTS = (5466, 5467, 5468)
PUBLIC = "8.8.4.4"
NONCE = b"n" * NONCE_BYTES


def pcp_answer(
    request: bytes, result: int = 0, address: str = PUBLIC, port: int | None = None
) -> bytes:
    """The answer to a PCP request as RFC 6887 has it in sections 7.2 and 11.1."""
    lifetime = request[4:8]
    header = b"\x02\x81\x00" + bytes([result]) + lifetime + bytes(4) + bytes(12)
    external = request[40:42] if port is None else port.to_bytes(2, "big")
    ip = bytes(10) + b"\xff\xff" + socket.inet_aton(address)
    return header + request[24:42] + external + ip


def pmp_answer(request: bytes, result: int = 0, address: str = PUBLIC) -> bytes:
    """The answer to a NAT-PMP request as RFC 6886 has it in sections 3.2 and 3.3."""
    if request[0] == 2:
        return struct.pack("!BBHI", 0, 129, 1, 7)
    begin = struct.pack("!BBHI", 0, 0x80 | request[1], result, 7)
    if request[1] == 0:
        return begin + socket.inet_aton(address)
    return begin + request[4:8] + request[8:12]


class Router(asyncio.DatagramProtocol):
    """Answers each request with ``answer(request)``."""

    def __init__(self, answer: Callable[[bytes], bytes]) -> None:
        self._answer = answer
        self.requests: list[bytes] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport: Any = transport
        self.port = transport.get_extra_info("sockname")[1]

    def datagram_received(self, data: bytes, address: tuple[str, int]) -> None:
        self.requests.append(data)
        if answer := self._answer(data):
            self.transport.sendto(answer, address)


class NoUpnp:
    """No device answers by UPnP."""

    async def map_ports(self, *_: Any) -> UpnpReply:
        return UpnpReply(failure=SILENT)


NO_UPNP: Any = NoUpnp()


@pytest.fixture
async def routers() -> AsyncIterator[list[Router]]:
    made: list[Router] = []
    yield made
    for one in made:
        one.transport.close()


async def ask(routers: list[Router], answer: Callable[[bytes], bytes]) -> tuple[PortMapper, Router]:
    loop = asyncio.get_running_loop()
    _, router = await loop.create_datagram_endpoint(
        lambda: Router(answer), local_addr=("127.0.0.1", 0)
    )
    routers.append(router)
    mapper = PortMapper(PORTS, NO_UPNP, lambda: "127.0.0.1", router.port)
    await mapper.start()
    return mapper, router


@pytest.mark.parametrize("answer", [pcp_answer, pmp_answer], ids=["PCP", "NAT-PMP"])
async def test_ports_are_mapped_and_given_back(
    routers: list[Router], answer: Callable[[bytes], bytes]
) -> None:
    mapper, router = await ask(routers, answer)
    name = "PCP" if answer is pcp_answer else "NAT-PMP"
    assert (mapper.address, mapper.mapped_by, mapper.failure) == (PUBLIC, name, "")
    asked = len(router.requests)
    await mapper.close()
    await until(lambda: len(router.requests) == asked + len(PORTS))
    lifetimes = [one[4:8] if one[0] == 2 else one[8:12] for one in router.requests[asked:]]
    assert lifetimes == [bytes(4)] * len(PORTS)


async def test_a_lost_request_is_sent_again(
    routers: list[Router], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_WAITS_S", (0.02, 5.0))
    seen: set[bytes] = set()

    def answer(request: bytes) -> bytes:
        if request in seen:
            return pcp_answer(request)
        seen.add(request)
        return b""

    mapper, _ = await ask(routers, answer)
    assert mapper.address == PUBLIC
    await mapper.close()


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (lambda one: pcp_answer(one, result=2), "doesn't let PCs"),
        (lambda one: pcp_answer(one, result=11), "another PC of this home"),
        (lambda one: pcp_answer(one, result=99), "error 99"),
        (lambda one: pcp_answer(one, address="100.64.0.9"), "translates once more"),
        (lambda one: pcp_answer(one, address="192.168.7.7"), "translates once more"),
        (lambda one: pcp_answer(one, address="127.0.0.1"), "translates once more"),
        (lambda one: pcp_answer(one, address="224.0.0.1"), "translates once more"),
        (lambda one: pcp_answer(one, port=40001), "gives 40001"),
        (lambda one: pmp_answer(one, result=2), "doesn't let PCs"),
        (lambda _: b"\x02\x81\x00\x00" + bytes(20), "neither PCP, NAT-PMP nor UPnP"),
        (lambda _: bytes(MAX_DATAGRAM), "neither PCP, NAT-PMP nor UPnP"),
        (lambda one: pcp_answer(one[:24] + b"x" * 12 + one[36:]), "neither PCP, NAT-PMP nor UPnP"),
        (lambda one: one, "neither PCP, NAT-PMP nor UPnP"),
        (lambda _: b"\x09\x81\x00\x01", "neither PCP, NAT-PMP nor UPnP"),
    ],
)
async def test_other_answers_map_nothing(
    routers: list[Router],
    monkeypatch: pytest.MonkeyPatch,
    answer: Callable[[bytes], bytes],
    says: str,
) -> None:
    monkeypatch.setattr(module, "_WAITS_S", (0.05,))
    mapper, _ = await ask(routers, answer)
    assert mapper.address == ""
    assert says in mapper.failure
    await mapper.close()


async def test_a_router_that_floods_is_not_read_for_long(
    routers: list[Router], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_WAITS_S", (0.05, 0.05))
    monkeypatch.setattr(module, "_MAX_ANSWERS", 4)
    chance = random.Random(1)
    mapper, router = await ask(routers, lambda _: chance.randbytes(200))
    assert mapper.address == ""
    assert len(router.requests) <= 2 * len(PORTS)
    await mapper.close()


async def test_only_a_router_of_a_home_is_asked() -> None:
    for gateway in ("", "8.8.8.8"):
        mapper = PortMapper(PORTS, NO_UPNP, lambda gateway=gateway: gateway)
        await mapper.start()
        assert "no router" in mapper.failure
        await mapper.close()


async def test_a_router_that_does_not_listen_says_so() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mapper = PortMapper(PORTS, NO_UPNP, lambda: "127.0.0.1", port)
    await mapper.start()
    assert mapper.address == ""
    assert "neither PCP, NAT-PMP nor UPnP" in mapper.failure
    await mapper.close()


def test_the_public_address_is_told_to_others() -> None:
    mapper = PortMapper(PORTS, NO_UPNP)
    place: Any = SimpleNamespace(settings=Settings(host="192.168.1.7"), port_mapper=mapper)
    assert Resources.addresses.fget(place) == ("192.168.1.7",)  # type: ignore[attr-defined]
    mapper.address = PUBLIC
    assert Resources.addresses.fget(place) == ("192.168.1.7", PUBLIC)  # type: ignore[attr-defined]


def test_the_pairing_port_is_not_forwarded() -> None:
    assert Settings().member_ports == tuple(range(5468, 5479))
    assert Settings(discovery=False).member_ports == tuple(range(5468, 5480))
    assert Settings(worker_ports=(0, 0)).member_ports == ()


MINIUPNPD = """
ext_ifname=wan0
ext_ip=8.8.4.4
listening_ip=lan0
uuid=00000000-0000-0000-0000-000000000000
allow 1024-65535 192.168.1.0/24 1024-65535
"""
#: The chains that miniupnpd adds rules to.
CHAINS = """
table inet filter {
    chain miniupnpd {
    }
    chain prerouting_miniupnpd {
    }
    chain postrouting_miniupnpd {
    }
}
"""
MAP = """
import asyncio, pathlib, sys
from molinkd.peer.membership.port_mapper import PortMapper
from molinkd.peer.membership.upnp_client import UpnpClient
async def main():
    mapper = PortMapper([5466, 5467, 5468], UpnpClient(pathlib.Path(sys.argv[1])))
    await mapper.start()
    print(mapper.mapped_by, mapper.address or mapper.failure, flush=True)
    sys.stdin.readline()
    await mapper.close()
asyncio.run(main())
"""


@pytest.mark.slow
@pytest.mark.skipif(
    homes_unavailable() is not None or shutil.which("miniupnpd") is None,
    reason=f"no router here: {homes_unavailable() or 'install miniupnpd-nftables'}",
)
@pytest.mark.parametrize(
    ("protocol", "options"),
    [
        ("PCP", "enable_natpmp=yes\nenable_upnp=no\n"),
        ("UPnP", "enable_natpmp=no\nenable_upnp=yes\n"),
    ],
    ids=["PCP", "UPnP"],
)
def test_miniupnpd_forwards_ports_until_they_are_given_back(
    tmp_path: Path, protocol: str, options: str
) -> None:
    """miniupnpd is the UPnP server of most home routers with Linux."""
    (tmp_path / "conf").write_text(MINIUPNPD + options, encoding="ascii")
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with Homes([Node("internet"), Node("home")], ["open", "port-cone"]) as homes:
        inside = enter_command(homes.router(1))
        subprocess.run([*inside, "nft", "-f", "-"], input=CHAINS, text=True, check=True)
        served = ["miniupnpd", "-d", "-f", str(tmp_path / "conf"), "-P", str(tmp_path / "pid")]
        router = subprocess.Popen([*inside, *served], stderr=subprocess.DEVNULL)
        try:

            def forwards() -> bool:
                return "5467" in run_system(*inside, "nft", "list", "ruleset")

            mapping = homes.run(1, [sys.executable, "-c", MAP, tmp_path / "log"], **pipes)
            assert mapping.stdout is not None
            assert mapping.stdout.readline() == f"{protocol} {PUBLIC}\n"
            assert forwards()
            mapping.communicate("\n", timeout=30)
            asyncio.run(until(lambda: not forwards()))
        finally:
            router.kill()
            router.wait()


def test_answers_are_decoded() -> None:
    request = encode_pcp_request("192.168.1.2", 5467, NONCE)
    assert len(request) == 64
    assert decode_answer(pcp_answer(request), NONCE) == PcpAnswer(5467, 5467, PUBLIC, 7200)
    mapped = decode_answer(pmp_answer(encode_pmp_request(5467)), NONCE)
    assert mapped == PmpAnswer(5467, 5467, "", 7200)
    assert decode_answer(pmp_answer(request), NONCE) == UnsupportedVersion(speaks_pmp=True)
    chance = random.Random(2)
    for _ in range(2000):
        data = chance.randbytes(chance.randrange(70))
        try:
            decode_answer(data, NONCE)
        except WireError:
            continue


def test_the_best_default_route_is_found() -> None:
    header = "Iface Destination Gateway Flags RefCnt Use Metric Mask MTU Window IRTT\n"
    little = struct.pack("=I", 1) == b"\x01\0\0\0"
    gateway = "0101A8C0" if little else "C0A80101"
    lines = [
        "wlan0 00000000 0102A8C0 0003 0 0 600 00000000 0 0 0",
        f"eth0 00000000 {gateway} 0003 0 0 100 00000000 0 0 0",
        "eth0 0001A8C0 00000000 0001 0 0 100 00FFFFFF 0 0 0",
    ]
    assert parse_routes(header + "\n".join(lines)) == "192.168.1.1"
    assert parse_routes(header) == ""
    assert isinstance(find_gateway(), str)
