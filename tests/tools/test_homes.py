"""Emulated homes: how a PC behind each kind of router looks over IPv4, and who can connect."""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from tools.wan import Node
from tools.wan.homes import KINDS, Homes, Kind, homes_unavailable

pytestmark = pytest.mark.skipif(
    homes_unavailable() is not None, reason=f"no homes here: {homes_unavailable()}"
)
#: A server on two ports that answers with the caller's address.
SERVE = """
import select, socket, sys
ports = [socket.create_server(("0.0.0.0", port)) for port in (443, 5000)]
print(flush=True)
while True:
    for port in select.select(ports, [], [])[0]:
        caller, address = port.accept()
        caller.sendall(f"{address[0]} {address[1]}".encode())
        caller.close()
"""
#: Calls two hosts from one local port, then listens there, and prints what arrives until EOF.
ASK = """
import json, select, socket, sys
seen = {}
for host, port in json.loads(sys.argv[1]):
    asking = socket.socket()
    asking.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    asking.bind(("", 4000))
    asking.settimeout(4.0)  # a first packet may be lost, and is sent again after a second
    try:
        asking.connect((host, port))
        seen[f"{host}:{port}"] = asking.recv(99).decode()
    except OSError:
        seen[f"{host}:{port}"] = ""
    asking.close()
listener = socket.create_server(("0.0.0.0", 4000))
print(json.dumps(seen), flush=True)
callers = set()
while sys.stdin not in (ready := select.select([listener, sys.stdin], [], [])[0]):
    callers.add(listener.accept()[1][0])
print(json.dumps(sorted(callers)))
"""
#: Tries to connect to the address that the other home shows.
CALL = """
import socket, sys
calling = socket.socket()
calling.settimeout(3.0)
sys.exit(calling.connect_ex((sys.argv[1], int(sys.argv[2]))) != 0)
"""
HUB, OTHER = "10.77.0.1", "10.77.0.2"
#: The home without a router.
STRANGER = 2


Observations = dict[Kind, tuple[dict[str, str], list[str]]]


@pytest.fixture(scope="module")
def observed() -> Iterator[Observations]:
    """The addresses that servers see of a PC behind each router, and which homes can reach it."""
    routers = [kind for kind in KINDS if kind != "only-ipv6"]
    kinds: tuple[Kind, ...] = ("open", "open", *routers)
    targets = json.dumps([(HUB, 5000), (HUB, 443), (OTHER, 443)])
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    nodes = [Node(f"home{index}") for index in range(len(kinds))]
    with Homes(nodes, kinds) as homes, ExitStack() as stack:
        for index in (0, 1):
            served = homes.run(index, [sys.executable, "-c", SERVE], stdout=subprocess.PIPE)
            with served.stdout as said:
                said.readline()
        asking = {
            kind: stack.enter_context(
                homes.run(2 + index, [sys.executable, "-c", ASK, targets], **pipes)
            )
            for index, kind in enumerate(routers)
        }
        seen = {kind: json.loads(one.stdout.readline()) for kind, one in asking.items()}
        calling = []
        for kind in routers[1:]:
            where = next(filter(None, seen[kind].values())).split()
            # A connection from another port of a known address, and one from an unknown address.
            for caller in (0, STRANGER):
                call = [sys.executable, "-c", CALL, *where]
                calling.append(homes.run(caller, call))
        for one in calling:
            one.wait(30)
        yield {
            kind: (seen[kind], json.loads(one.communicate(timeout=30)[0]))
            for kind, one in asking.items()
        }


CONES = ("full-cone", "address-cone", "port-cone", "carrier", "no-udp")


@pytest.mark.parametrize("kind", CONES)
def test_cones_show_one_port(observed: Observations, kind: Kind) -> None:
    seen, callers = observed[kind]
    assert len(set(seen.values())) == 1
    assert next(iter(seen.values())).startswith("10.77.0.")
    expected = {"full-cone": [HUB, "10.77.0.3"], "address-cone": [HUB]}.get(kind, [])
    assert callers == expected


def test_a_symmetric_router_shows_another_port_to_each(observed: Observations) -> None:
    seen, callers = observed["symmetric"]
    assert len(set(seen.values())) == 3
    assert callers == []


def test_a_router_lets_only_443_out(observed: Observations) -> None:
    seen, callers = observed["only-443"]
    assert [port for port, address in seen.items() if address] == [f"{HUB}:443", f"{OTHER}:443"]
    assert callers == []
