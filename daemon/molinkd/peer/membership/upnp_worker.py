"""A process that has a router forward ports by UPnP-IGD.

Any device of the home may answer with nonsense. So the process asks the gateway alone, and ignores
other devices' answers, descriptions elsewhere and redirects. Answers are bounded in time, size and
number, and defusedxml refuses entities.
"""

import asyncio
import contextlib
import ipaddress
import sys
import traceback
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import aiohttp
import msgspec
import yarl
from async_upnp_client.client import UpnpRequester, UpnpService
from async_upnp_client.client_factory import UpnpFactory
from async_upnp_client.const import HttpRequest, HttpResponse
from async_upnp_client.exceptions import UpnpActionError, UpnpError, UpnpResponseError
from async_upnp_client.search import SsdpSearchListener
from async_upnp_client.ssdp import SSDP_IP_V4

from molink.wire.port_mapping import FORBIDDEN, MAX_LIFETIME_S, TAKEN, is_public_address
from molinkd.peer.membership.upnp_client import (
    REQUEST_TIMEOUT_S,
    SILENT,
    TOO_SLOW,
    UNUSABLE,
    UpnpReply,
    UpnpRequest,
)

_GATEWAY_TYPE = "urn:schemas-upnp-org:device:InternetGatewayDevice:1"
_CONNECTION_TYPES = frozenset(
    {
        "urn:schemas-upnp-org:service:WANIPConnection:1",
        "urn:schemas-upnp-org:service:WANIPConnection:2",
        "urn:schemas-upnp-org:service:WANPPPConnection:1",
    }
)
#: Maximum bytes of a document, documents, descriptions of a router, and its connections.
_MAX_BODY_BYTES, _MAX_DOCUMENTS, _MAX_DESCRIPTIONS, _MAX_CONNECTIONS = 256 << 10, 32, 4, 4
#: Seconds for one HTTP answer.
_HTTP_TIMEOUT_S = 5.0
#: Seconds by which routers may delay answers to a search, and waits until it is repeated.
_MAX_DELAY_S, _SEARCH_WAITS_S = 1, (1.5, 1.5)
_MAX_REQUEST_BYTES = 1 << 20
#: Error codes of UPnP (WANIPConnection:2, table 2-4): the action is not authorized, another client
#: has the port, and mappings have no end.
_NOT_AUTHORIZED, _CONFLICT, _PERMANENT_ONLY = 606, 718, 725


class RefusedError(Exception):
    """The router maps no ports; the text says why and holds nothing that the router wrote."""


@dataclass(frozen=True, slots=True)
class PortMapping:
    """To which client and port the router forwards a port, for how many more seconds."""

    client: str
    port: int
    lifetime: int


class GatewayRequester(UpnpRequester):
    """Sends HTTP requests to one address, and reads bounded answers."""

    def __init__(self, session: aiohttp.ClientSession, gateway: str) -> None:
        self._session, self._gateway = session, gateway
        self._documents = 0

    async def async_http_request(self, http_request: HttpRequest) -> HttpResponse:
        """Send a request.

        Raises:
            UpnpError: It goes elsewhere, or the answer is unusable.
        """
        if not is_of_gateway(http_request.url, self._gateway):
            raise UpnpError("an address of another device")
        self._documents += http_request.method == "GET"
        if self._documents > _MAX_DOCUMENTS:
            raise UpnpError("too many documents")
        async with self._session.request(
            http_request.method,
            http_request.url,
            headers=http_request.headers,
            data=http_request.body,
            allow_redirects=False,
        ) as response:
            body = bytearray()
            async for part in response.content.iter_any():
                body += part
                if len(body) > _MAX_BODY_BYTES:
                    raise UpnpError("a document of endless length")
            text = body.decode("utf-8", "replace")
            return HttpResponse(response.status, response.headers, text)


def is_of_gateway(text: str, gateway: str) -> bool:
    """Whether a URL is one of the gateway itself, by address."""
    try:
        url = yarl.URL(text)
        return url.scheme == "http" and url.host == gateway and url.user is None
    except ValueError:
        return False


async def find_descriptions(request: UpnpRequest) -> list[str]:
    """URLs at which the gateway describes itself, by its answers to a search."""
    found: list[str] = []
    answered = asyncio.Event()

    def on_answer(headers: Any) -> None:
        url = str(headers.get("location", ""))
        is_new = url not in found and len(found) < _MAX_DESCRIPTIONS
        if is_new and headers["_host"] == request.gateway and is_of_gateway(url, request.gateway):
            found.append(url)
            answered.set()

    listener = SsdpSearchListener(
        callback=on_answer,
        source=(request.own, 0),
        target=(SSDP_IP_V4, request.search_port),
        timeout=_MAX_DELAY_S,
        search_target=_GATEWAY_TYPE,
    )
    await listener.async_start()
    try:
        for wait in _SEARCH_WAITS_S:
            # Some routers hear the group only; some firewalls let in no answers to it.
            listener.async_search()
            listener.async_search((request.gateway, request.search_port))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait):
                    await answered.wait()
                    break
    finally:
        listener.async_stop()
    return found


class GatewayConnection:
    """A router's connection to the internet."""

    def __init__(self, service: UpnpService, address: str) -> None:
        self._service = service
        #: The router's address there.
        self.address = address

    async def map_port(self, own: str, port: int, lifetime: int) -> int:
        """Map a port to the same port of ``own``; returns for how many seconds it is.

        Raises:
            RefusedError: The router doesn't.
        """
        before = await self._read_mapping(port)
        if before is not None and before.client != own:
            raise RefusedError(TAKEN)
        await self._add_mapping(own, port, lifetime)
        after = await self._read_mapping(port)
        if after is None:
            return lifetime
        if (after.client, after.port) != (own, port) or after.lifetime < 0:
            raise RefusedError(UNUSABLE)
        return min(after.lifetime or lifetime, MAX_LIFETIME_S)

    async def unmap_port(self, own: str, port: int) -> None:
        """Remove the mapping of a port, unless it is another PC's."""
        before = await self._read_mapping(port)
        if before is None or before.client == own:
            await self._call("DeletePortMapping", port)

    async def _add_mapping(self, own: str, port: int, lifetime: int) -> None:
        """Map a port for ``lifetime``, or without an end for a router that knows only that."""
        try:
            await self._call(
                "AddPortMapping",
                port,
                NewInternalPort=port,
                NewInternalClient=own,
                NewEnabled=True,
                NewPortMappingDescription="molink",
                NewLeaseDuration=lifetime,
            )
        except UpnpActionError as error:
            if error.error_code != _PERMANENT_ONLY or not lifetime:
                raise RefusedError(explain_code(error.error_code)) from None
            await self._add_mapping(own, port, 0)

    async def _read_mapping(self, port: int) -> PortMapping | None:
        """The mapping of a port; ``None`` if there is none, or the router doesn't tell."""
        try:
            found = await self._call("GetSpecificPortMappingEntry", port)
        except (UpnpActionError, UpnpResponseError, KeyError):
            return None
        return PortMapping(
            str(found["NewInternalClient"]),
            int(found["NewInternalPort"]),
            int(found.get("NewLeaseDuration") or 0),
        )

    async def _call(self, action: str, port: int, **more: Any) -> Any:
        return await self._service.action(action).async_call(
            NewRemoteHost="", NewExternalPort=port, NewProtocol="TCP", **more
        )


async def find_connection(request: UpnpRequest, requester: UpnpRequester) -> GatewayConnection:
    """Find the gateway's connection, preferably one with a public address.

    Raises:
        RefusedError: There is none.
    """
    failure, found = SILENT, None
    for url in await find_descriptions(request):
        failure, services = UNUSABLE, []
        with _survive_nonsense():
            device = await UpnpFactory(requester, non_strict=True).async_create_device(url)
            services = [one for one in device.all_services if one.service_type in _CONNECTION_TYPES]
        for service in services[:_MAX_CONNECTIONS]:
            with _survive_nonsense():
                answer = await service.action("GetExternalIPAddress").async_call()
                address = str(ipaddress.IPv4Address(answer["NewExternalIPAddress"]))
                found = GatewayConnection(service, address)
                if is_public_address(address):
                    return found
    if found is None:
        raise RefusedError(failure)
    return found


@contextlib.contextmanager
def _survive_nonsense() -> Iterator[None]:
    """Report what the library makes of an unusable answer: an exception of any kind."""
    try:
        yield
    except Exception:
        traceback.print_exc(limit=1)


def explain_code(code: int | None) -> str:
    """What a router's error means."""
    known = {_NOT_AUTHORIZED: FORBIDDEN, _CONFLICT: TAKEN}
    return known.get(code or 0, f"it answers with UPnP's error {code}")


async def map_ports(connection: GatewayConnection, request: UpnpRequest) -> UpnpReply:
    """Map all ports or none; none without a public address.

    Raises:
        RefusedError: The router doesn't.
    """
    lifetime = 0
    if is_public_address(connection.address):
        mapped: list[int] = []
        try:
            for port in request.ports:
                granted = await connection.map_port(request.own, port, request.lifetime)
                lifetime = min(lifetime or granted, granted)
                mapped.append(port)
        except Exception:
            await unmap_ports(connection, request.own, mapped)
            raise
    return UpnpReply(address=connection.address, lifetime=lifetime)


async def unmap_ports(connection: GatewayConnection, own: str, ports: Iterable[int]) -> None:
    """Remove the mappings of ports to ``own``, those which the router lets go."""
    for port in ports:
        with contextlib.suppress(UpnpError, LookupError, ValueError):
            await connection.unmap_port(own, port)


async def handle_request(request: UpnpRequest) -> UpnpReply:
    """Do what a request asks for, within its time."""
    try:
        async with (
            asyncio.timeout(REQUEST_TIMEOUT_S),
            aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(force_close=True),
                timeout=aiohttp.ClientTimeout(total=_HTTP_TIMEOUT_S),
                cookie_jar=aiohttp.DummyCookieJar(),
                headers={"Accept-Encoding": "identity"},
                auto_decompress=False,
            ) as session,
        ):
            connection = await find_connection(request, GatewayRequester(session, request.gateway))
            if request.lifetime:
                return await map_ports(connection, request)
            await unmap_ports(connection, request.own, request.ports)
            return UpnpReply(address=connection.address)
    except RefusedError as refusal:
        return UpnpReply(failure=str(refusal))
    except TimeoutError:
        return UpnpReply(failure=TOO_SLOW)
    except Exception:  # as in `_survive_nonsense`
        traceback.print_exc(limit=1)
        return UpnpReply(failure=UNUSABLE)


def main() -> None:
    """Answer the request on standard input on standard output."""
    line = sys.stdin.buffer.readline(_MAX_REQUEST_BYTES)
    request = msgspec.json.decode(line, type=UpnpRequest)
    with asyncio.Runner(loop_factory=asyncio.SelectorEventLoop) as runner:
        reply = runner.run(handle_request(request))
    sys.stdout.buffer.write(msgspec.json.encode(reply) + b"\n")


if __name__ == "__main__":
    main()
