"""The address of this PC's router."""

import socket
import struct
import sys
from pathlib import Path

_ROUTES = Path("/proc/net/route")
#: Flags of a route that is up and leads to a gateway.
_UP_GATEWAY = 0x3


def parse_routes(text: str) -> str:
    """The gateway of the best default route in Linux's ``/proc/net/route``; empty without one."""
    found: list[tuple[int, str]] = []
    for line in text.splitlines()[1:]:
        fields = line.split()
        if len(fields) < 8 or int(fields[1], 16) or int(fields[7], 16):
            continue
        if int(fields[3], 16) & _UP_GATEWAY == _UP_GATEWAY:
            address = socket.inet_ntoa(struct.pack("=I", int(fields[2], 16)))
            found.append((int(fields[6]), address))
    return min(found)[1] if found else ""


if sys.platform == "win32":
    import ctypes

    def find_gateway() -> str:
        """The IPv4 address of the default route's gateway; empty without one.

        Raises:
            OSError: The system doesn't tell.
        """
        # The next hop is the fourth of the 14 numbers of MIB_IPFORWARDROW.
        row = (ctypes.c_uint32 * 14)()
        (target,) = struct.unpack("=I", socket.inet_aton("192.0.2.1"))
        error = ctypes.windll.iphlpapi.GetBestRoute(target, 0, ctypes.byref(row))
        if error:
            raise OSError(error, "no route to the internet")
        gateway = socket.inet_ntoa(struct.pack("=I", row[3]))
        return "" if gateway == "0.0.0.0" else gateway

else:

    def find_gateway() -> str:
        """The IPv4 address of the default route's gateway; empty without one.

        Raises:
            OSError: The system doesn't tell.
        """
        return parse_routes(_ROUTES.read_text(encoding="ascii"))
