"""Asks this home's router to forward molink's ports, so that other homes reach this PC.

It speaks PCP, NAT-PMP if the router knows no PCP, or UPnP if it knows neither, to the default
gateway only, and believes nothing but answers from there with a public address and the very ports
asked for.
"""

import asyncio
import contextlib
import ipaddress
import logging
import secrets
import socket
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

from molink.errors import WireError
from molink.plaintext import printable
from molink.wire.port_mapping import (
    LIFETIME_S,
    MAX_DATAGRAM,
    MAX_LIFETIME_S,
    NONCE_BYTES,
    ROUTER_PORT,
    PcpAnswer,
    PmpAnswer,
    UnsupportedVersion,
    decode_answer,
    encode_pcp_request,
    encode_pmp_address_request,
    encode_pmp_request,
    is_public_address,
)
from molinkd.peer.membership.gateway import find_gateway
from molinkd.peer.membership.upnp_client import UpnpClient
from molinkd.tasks import cancel_tasks

log = logging.getLogger(__name__)

#: Waits for answers before unanswered requests are sent again, in seconds.
_WAITS_S = (0.25, 0.5, 1.0)
#: Interval after a failed attempt, and the shortest until ports are asked for again, in seconds.
_RETRY_S, _MIN_RENEW_S = 300.0, 60.0
#: Datagrams read per wait: a router that floods is not read for longer.
_MAX_ANSWERS = 256
Answer = PcpAnswer | PmpAnswer | UnsupportedVersion
Protocol = Literal["PCP", "NAT-PMP", "UPnP"]


class MappingError(Exception):
    """The router forwards nothing; the text says why."""


class PortMapper:
    """Keeps TCP ports of this PC mapped."""

    def __init__(
        self,
        ports: Sequence[int],
        upnp: UpnpClient,
        find_router: Callable[[], str] = find_gateway,
        router_port: int = ROUTER_PORT,
    ) -> None:
        self._ports = tuple(dict.fromkeys(ports))
        self._upnp = upnp
        self._find_router, self._router_port = find_router, router_port
        self._nonce = secrets.token_bytes(NONCE_BYTES)
        self._renewing: asyncio.Task[None] | None = None
        #: The protocol in use with the router.
        self._protocol: Protocol = "PCP"
        #: The public address whose ports lead here; empty without one.
        self.address = ""
        #: The protocol by which the ports were mapped last; empty if they never were.
        self.mapped_by: Protocol | Literal[""] = ""
        #: Why there is no address.
        self.failure = ""

    async def start(self) -> None:
        """Ask for the ports once, then keep them.

        Takes two seconds at most if the router speaks PCP or NAT-PMP, else up to 22.
        """
        pause = await self._renew()
        self._renewing = asyncio.get_running_loop().create_task(
            self._keep(pause), name="molink-ports"
        )

    async def close(self) -> None:
        """Give the ports back, if the router hears it."""
        await cancel_tasks(self._renewing)
        if not self.mapped_by:
            return
        self._protocol = self.mapped_by
        with contextlib.suppress(OSError, MappingError), self._connect() as router:
            if self._protocol == "UPnP":
                await self._ask_by_upnp(router, 0)
                return
            for port in self._ports:
                router.send(self._encode(router, port, 0))

    async def _keep(self, pause: float) -> None:
        while True:
            await asyncio.sleep(pause)
            pause = await self._renew()

    async def _renew(self) -> float:
        """Ask for all ports; returns when to ask again, in seconds."""
        before, failed_before = self.address, self.failure
        try:
            with self._connect() as router:
                self.address, lifetime = await self._map_ports(router)
            self.mapped_by, self.failure = self._protocol, ""
        except (OSError, MappingError) as error:
            self.address, self.failure = "", str(error)
        if self.failure and self.failure != failed_before:
            log.warning("the router forwards no ports: %s", self.failure)
        if not self.address:
            return _RETRY_S
        if self.address != before:
            log.info(
                "the router forwards %d ports of %s (%s)",
                len(self._ports),
                self.address,
                self.mapped_by,
            )
        return max(lifetime / 2, _MIN_RENEW_S)

    def _connect(self) -> socket.socket:
        """A socket that hears the router only.

        Raises:
            OSError, MappingError: There is no router.
        """
        gateway = self._find_router()
        if not gateway or ipaddress.ip_address(gateway).is_global:
            raise MappingError("this PC is behind no router of a home")
        made = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        try:
            made.setblocking(False)
            made.connect((gateway, self._router_port))
        except BaseException:
            made.close()
            raise
        return made

    def _encode(self, router: socket.socket, port: int, lifetime: int | None = None) -> bytes:
        more = () if lifetime is None else (lifetime,)
        if self._protocol == "NAT-PMP":
            return encode_pmp_request(port, *more)
        return encode_pcp_request(router.getsockname()[0], port, self._nonce, *more)

    async def _map_ports(self, router: socket.socket) -> tuple[str, float]:
        """The public address, and for how many seconds its ports are mapped.

        Raises:
            MappingError: Not all are.
            OSError: The network fails.
        """
        try:
            answers = await self._ask_by_datagrams(router)
        except ConnectionError:  # the port is closed
            answers = []
        self._check_answers(answers)
        addresses = {one.address for one in answers if one.address}
        if not addresses or {one.port for one in answers if one.port} != set(self._ports):
            self._protocol = "UPnP"
            return await self._ask_by_upnp(router, LIFETIME_S)
        return _check_address(addresses), min(one.lifetime for one in answers if one.port)

    async def _ask_by_datagrams(self, router: socket.socket) -> list[PcpAnswer | PmpAnswer]:
        """The router's answers by PCP, or by NAT-PMP if it knows no PCP."""
        self._protocol = "PCP"
        found = await self._ask(router, {port: self._encode(router, port) for port in self._ports})
        if any(isinstance(one, UnsupportedVersion) and one.speaks_pmp for one in found.values()):
            self._protocol = "NAT-PMP"
            requests = {0: encode_pmp_address_request()}
            requests |= {port: self._encode(router, port) for port in self._ports}
            found = await self._ask(router, requests)
        return [one for one in found.values() if isinstance(one, PcpAnswer | PmpAnswer)]

    async def _ask_by_upnp(self, router: socket.socket, lifetime: int) -> tuple[str, float]:
        own = router.getsockname()[0]
        gateway = router.getpeername()[0]
        reply = await self._upnp.map_ports(gateway, own, self._ports, lifetime)
        if reply.failure:
            raise MappingError(printable(reply.failure))
        return _check_address({reply.address}), min(reply.lifetime, MAX_LIFETIME_S)

    def _check_answers(self, answers: Iterable[PcpAnswer | PmpAnswer]) -> None:
        for one in answers:
            if one.failure:
                raise MappingError(one.failure)
            if one.port != one.external_port:
                raise MappingError(
                    f"it gives {one.external_port} for port {one.port}, which another PC of this "
                    "home may have: choose other ports"
                )

    async def _ask(self, router: socket.socket, requests: dict[int, bytes]) -> dict[int, Answer]:
        """Send requests by their ports until each is answered; returns the answers that came.

        Raises:
            OSError: The router doesn't listen.
        """
        answers: dict[int, Answer] = {}
        for wait in _WAITS_S:
            for port, request in requests.items():
                if port not in answers:
                    router.send(request)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait):
                    await self._read_answers(router, requests, answers)
            if len(answers) == len(requests) or any(
                isinstance(one, UnsupportedVersion) for one in answers.values()
            ):
                break
        return answers

    async def _read_answers(
        self, router: socket.socket, requests: dict[int, bytes], answers: dict[int, Answer]
    ) -> None:
        loop = asyncio.get_running_loop()
        for _ in range(_MAX_ANSWERS):
            try:
                answer = decode_answer(await loop.sock_recv(router, MAX_DATAGRAM), self._nonce)
            except WireError as error:
                log.debug("the router: %s", error)
                continue
            if isinstance(answer, UnsupportedVersion):
                if self._protocol == "NAT-PMP":
                    continue  # of a request by PCP before
                answers[-1] = answer
                return
            if answer.port in requests:
                answers[answer.port] = answer
            if len(answers) == len(requests):
                return


def _check_address(addresses: set[str]) -> str:
    """The only address.

    Raises:
        MappingError: It isn't public, or there are none or several.
    """
    found = ", ".join(sorted(addresses))
    if not is_public_address(found):
        raise MappingError(
            f"it has no public address itself ({printable(found)}): the provider translates once "
            "more, so use IPv6, a VPN or a rendezvous"
        )
    return found
