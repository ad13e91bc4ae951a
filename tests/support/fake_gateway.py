"""A router of a home that speaks UPnP-IGD, and whose answers a test replaces by others."""

import asyncio
import re
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from aiohttp import web

PUBLIC = "8.8.4.4"
_SERVICE = "urn:schemas-upnp-org:service:WANIPConnection:1"
_MAPPING = ["NewRemoteHost", "NewExternalPort", "NewProtocol"]
_TARGET = ["NewInternalPort", "NewInternalClient", "NewEnabled", "NewPortMappingDescription"]
_TARGET += ["NewLeaseDuration"]
#: What each action takes and returns.
_ARGUMENTS: dict[str, tuple[list[str], list[str]]] = {
    "GetExternalIPAddress": ([], ["NewExternalIPAddress"]),
    "AddPortMapping": ([*_MAPPING, *_TARGET], []),
    "DeletePortMapping": (_MAPPING, []),
    "GetSpecificPortMappingEntry": (_MAPPING, _TARGET),
}
_TYPES = {"NewExternalPort": "ui2", "NewInternalPort": "ui2", "NewLeaseDuration": "ui4"}
_TYPES |= {"NewEnabled": "boolean"}


def describe_device(
    control: str = "/control",
    service: str = "/service.xml",
    connections: Sequence[str] = ("WANIPConnection:1",),
) -> str:
    """The description of a device with WAN connections, three devices deep."""
    inner = "".join(
        f"<service><serviceType>urn:schemas-upnp-org:service:{kind}</serviceType>"
        f"<serviceId>{kind}</serviceId><SCPDURL>{service}</SCPDURL>"
        f"<controlURL>{control}</controlURL><eventSubURL>/events</eventSubURL></service>"
        for kind in connections
    )
    inner = f"<serviceList>{inner}</serviceList>"
    for name in ("WANConnectionDevice", "WANDevice", "InternetGatewayDevice"):
        device = f"<deviceType>urn:schemas-upnp-org:device:{name}:1</deviceType><UDN>{name}</UDN>"
        inner = f"<device>{device}{inner}</device>"
        if name != "InternetGatewayDevice":
            inner = f"<deviceList>{inner}</deviceList>"
    return f'<?xml version="1.0"?><root xmlns="urn:schemas-upnp-org:device-1-0">{inner}</root>'


def describe_service() -> str:
    """The description of its actions."""
    actions, names = "", set()
    for action, (ins, outs) in _ARGUMENTS.items():
        arguments = "".join(
            f"<argument><name>{name}</name><direction>{way}</direction>"
            f"<relatedStateVariable>{name}</relatedStateVariable></argument>"
            for way, listed in (("in", ins), ("out", outs))
            for name in listed
        )
        names |= {*ins, *outs}
        actions += f"<action><name>{action}</name><argumentList>{arguments}</argumentList></action>"
    variables = "".join(
        f'<stateVariable sendEvents="no"><name>{name}</name>'
        f"<dataType>{_TYPES.get(name, 'string')}</dataType></stateVariable>"
        for name in sorted(names)
    )
    return (
        '<?xml version="1.0"?><scpd xmlns="urn:schemas-upnp-org:service-1-0">'
        f"<actionList>{actions}</actionList>"
        f"<serviceStateTable>{variables}</serviceStateTable></scpd>"
    )


def soap_answer(action: str, **values: object) -> web.Response:
    """A successful answer."""
    listed = "".join(f"<{name}>{value}</{name}>" for name, value in values.items())
    return _envelope(f'<u:{action}Response xmlns:u="{_SERVICE}">{listed}</u:{action}Response>')


def soap_fault(code: object) -> web.Response:
    """A refusal with UPnP's error ``code``."""
    control = "urn:schemas-upnp-org:control-1-0"
    return _envelope(
        "<s:Fault><faultcode>s:Client</faultcode><faultstring>UPnPError</faultstring><detail>"
        f'<UPnPError xmlns="{control}"><errorCode>{code}</errorCode>'
        "<errorDescription>molink: all is well</errorDescription></UPnPError></detail></s:Fault>",
        500,
    )


def _envelope(body: str, status: int = 200) -> web.Response:
    space = "http://schemas.xmlsoap.org/soap/envelope/"
    text = (
        f'<?xml version="1.0"?><s:Envelope xmlns:s="{space}"><s:Body>{body}</s:Body></s:Envelope>'
    )
    return web.Response(text=text, status=status, content_type="text/xml")


#: Answers a request for a document or an action; ``None`` leaves it to the router.
Handler = Callable[[web.Request, str], Awaitable[web.StreamResponse | None]]


class FakeGateway(asyncio.DatagramProtocol):
    """Answers searches at ``search_port`` of loopback, and HTTP."""

    def __init__(self, handler: Handler | None = None, location: str = "") -> None:
        self._handler = handler
        self._location = location
        #: What is mapped: client, port and lifetime by external port.
        self.mappings: dict[int, tuple[str, int, int]] = {}
        #: Documents and actions that were asked for.
        self.requests: list[str] = []
        #: Values that it tells instead of the true ones.
        self.address: str = PUBLIC
        self.lease: object = None
        self.only_permanent = False
        self.connections: Sequence[str] = ("WANIPConnection:1",)

    async def start(self) -> None:
        """Listen."""
        self._runner = web.AppRunner(web.Application(), shutdown_timeout=0.1)
        self._runner.app.router.add_route("*", "/{name:.*}", self._answer)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.http_port = self._runner.addresses[0][1]
        loop = asyncio.get_running_loop()
        self._search, _ = await loop.create_datagram_endpoint(
            lambda: self, local_addr=("127.0.0.1", 0)
        )
        self.search_port = self._search.get_extra_info("sockname")[1]

    async def close(self) -> None:
        """Stop."""
        self._search.close()
        await self._runner.cleanup()

    @property
    def location(self) -> str:
        """The URL of its description."""
        return self._location or f"http://127.0.0.1:{self.http_port}/device.xml"

    def datagram_received(self, data: bytes, address: Any) -> None:
        """Answer a search."""
        if data.startswith(b"M-SEARCH"):
            lines = ["HTTP/1.1 200 OK", "ST: urn:schemas-upnp-org:device:InternetGatewayDevice:1"]
            lines += [f"LOCATION: {self.location}", "USN: uuid:gateway", "", ""]
            self._search.sendto("\r\n".join(lines).encode(), address)

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        asked = request.headers.get("SOAPAction", request.path).strip('"').rpartition("#")[2]
        self.requests.append(asked)
        if self._handler is not None:
            special = await self._handler(request, asked)
            if special is not None:
                return special
        if asked == "/device.xml":
            return web.Response(
                text=describe_device(connections=self.connections), content_type="text/xml"
            )
        if asked == "/service.xml":
            return web.Response(text=describe_service(), content_type="text/xml")
        return self._act(asked, await request.text())

    def _act(self, action: str, body: str) -> web.Response:
        values = dict(re.findall(r"<(New\w+)>([^<]*)</", body))
        if action == "GetExternalIPAddress":
            return soap_answer(action, NewExternalIPAddress=self.address)
        port = int(values["NewExternalPort"])
        if action == "AddPortMapping":
            lease = int(values["NewLeaseDuration"])
            if self.only_permanent and lease:
                return soap_fault(725)
            self.mappings[port] = values["NewInternalClient"], int(values["NewInternalPort"]), lease
            return soap_answer(action)
        if port not in self.mappings:
            return soap_fault(714)
        client, internal, lease = self.mappings[port]
        if action == "DeletePortMapping":
            del self.mappings[port]
            return soap_answer(action)
        return soap_answer(
            action,
            NewInternalPort=internal,
            NewInternalClient=client,
            NewEnabled=1,
            NewPortMappingDescription="molink",
            NewLeaseDuration=lease if self.lease is None else self.lease,
        )
