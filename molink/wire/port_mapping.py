"""Messages that ask a home's router to forward TCP ports: PCP (RFC 6887) and NAT-PMP (RFC 6886).

Each message is one datagram of 2 to 64 bytes. A router that speaks only NAT-PMP answers a PCP
request with its own version.
"""

import ipaddress
import struct
from dataclasses import dataclass

from molink.errors import WireError

#: The port on which routers listen, and the maximum bytes of a datagram (RFC 6887).
ROUTER_PORT, MAX_DATAGRAM = 5351, 1100
#: Seconds for which a mapping is requested, and the maximum that an answer may grant.
LIFETIME_S, MAX_LIFETIME_S = 7200, 86400
NONCE_BYTES = 12
_PCP, _NAT_PMP = 2, 0
_MAP, _TCP, _ANSWER = 1, 6, 0x80
#: Header of a request: version, opcode, lifetime, own address. ``_PCP_MAP`` follows: nonce,
#: protocol, ports, external address.
_PCP_REQUEST = struct.Struct("!BBHI16s")
_PCP_ANSWER = struct.Struct("!BBBBII12x")
_PCP_MAP = struct.Struct("!12sB3xHH16s")
#: The option that makes the router fail instead of mapping another external port.
_PREFER_FAILURE = struct.pack("!BBH", 2, 0, 0)
#: NAT-PMP's operations: query the public address, and map a TCP port.
_ADDRESS, _MAP_TCP = 0, 2
_PMP_MAP = struct.Struct("!BBHHHI")
_PMP_ADDRESS_ANSWER = struct.Struct("!BBHI4s")
_PMP_MAP_ANSWER = struct.Struct("!BBHIHHI")
FORBIDDEN = "it doesn't let PCs open ports: allow that in its settings"
TAKEN = "another PC of this home has the port: choose others"
#: Explanations of the results of both protocols that a user can act on.
_EXPLANATIONS = {
    (_PCP, 2): FORBIDDEN,
    (_PCP, 11): TAKEN,
    (_NAT_PMP, 2): FORBIDDEN,
    (_NAT_PMP, 3): "it has no connection to the internet",
}


@dataclass(frozen=True, slots=True)
class PcpAnswer:
    """A router's PCP answer; ``failure`` is empty if the port is mapped."""

    port: int
    external_port: int
    address: str
    lifetime: int
    failure: str = ""


@dataclass(frozen=True, slots=True)
class PmpAnswer:
    """A router's NAT-PMP answer: its public address (with port 0), or a mapped port."""

    port: int = 0
    external_port: int = 0
    address: str = ""
    lifetime: int = 0
    failure: str = ""


@dataclass(frozen=True, slots=True)
class UnsupportedVersion:
    """The router doesn't speak PCP; ``speaks_pmp`` tells whether it speaks NAT-PMP."""

    speaks_pmp: bool


def is_public_address(text: str) -> bool:
    """Whether ``text`` is an IPv4 address of one host on the internet."""
    try:
        address = ipaddress.IPv4Address(text)
    except ValueError:
        return False
    return address.is_global and not address.is_multicast


def encode_pcp_request(own: str, port: int, nonce: bytes, lifetime: int = LIFETIME_S) -> bytes:
    """Encode a PCP request to map the external ``port`` to the same port of ``own``.

    ``lifetime`` is in seconds; 0 removes the mapping.
    """
    header = _PCP_REQUEST.pack(_PCP, _MAP, 0, lifetime, _pack_address(own))
    mapping = _PCP_MAP.pack(nonce, _TCP, port, port if lifetime else 0, _pack_address("0.0.0.0"))
    return header + mapping + (_PREFER_FAILURE if lifetime else b"")


def encode_pmp_address_request() -> bytes:
    """Encode a NAT-PMP request for the router's public address."""
    return struct.pack("!BB", _NAT_PMP, _ADDRESS)


def encode_pmp_request(port: int, lifetime: int = LIFETIME_S) -> bytes:
    """Encode a NAT-PMP request to map the external ``port`` to the same port of this PC.

    ``lifetime`` is in seconds; 0 removes the mapping.
    """
    external = port if lifetime else 0
    return _PMP_MAP.pack(_NAT_PMP, _MAP_TCP, 0, port, external, lifetime)


def decode_answer(data: bytes, nonce: bytes) -> PcpAnswer | PmpAnswer | UnsupportedVersion:
    """Decode a router's datagram.

    Raises:
        WireError: the datagram is malformed or does not answer a request with this nonce.
    """
    if len(data) < 4 or not data[1] & _ANSWER:
        raise WireError("not an answer of a router")
    if data[0] == _NAT_PMP:
        return _decode_pmp(data)
    if data[0] != _PCP:
        return UnsupportedVersion(speaks_pmp=False)
    size = _PCP_ANSWER.size + _PCP_MAP.size
    if len(data) < size or data[1] != _MAP | _ANSWER:
        raise WireError("not an answer to a request for a port")
    _, _, _, result, lifetime, _ = _PCP_ANSWER.unpack_from(data)
    found, protocol, port, external, address = _PCP_MAP.unpack_from(data, _PCP_ANSWER.size)
    if found != nonce or protocol != _TCP:
        raise WireError("an answer to another request")
    ip = ipaddress.IPv6Address(address)
    failure = _explain(_PCP, result)
    lifetime = min(lifetime, MAX_LIFETIME_S)
    return PcpAnswer(port, external, str(ip.ipv4_mapped or ip), lifetime, failure)


def _decode_pmp(data: bytes) -> PmpAnswer | UnsupportedVersion:
    operation = data[1] & ~_ANSWER
    (result,) = struct.unpack_from("!H", data, 2)
    failure = _explain(_NAT_PMP, result)
    if result == 1:
        return UnsupportedVersion(speaks_pmp=True)
    if operation == _ADDRESS and len(data) == _PMP_ADDRESS_ANSWER.size:
        address = _PMP_ADDRESS_ANSWER.unpack(data)[-1]
        return PmpAnswer(address=str(ipaddress.IPv4Address(address)), failure=failure)
    if operation == _MAP_TCP and len(data) == _PMP_MAP_ANSWER.size:
        *_, port, external, lifetime = _PMP_MAP_ANSWER.unpack(data)
        return PmpAnswer(port, external, "", min(lifetime, MAX_LIFETIME_S), failure)
    raise WireError("not an answer by NAT-PMP")


def _explain(protocol: int, result: int) -> str:
    return (
        _EXPLANATIONS.get((protocol, result), f"it answers with error {result}") if result else ""
    )


def _pack_address(address: str) -> bytes:
    return ipaddress.IPv6Address(f"::ffff:{address}").packed
