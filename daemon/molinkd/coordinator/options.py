"""The command line of the coordinator process."""

import argparse
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from molink.wire.messages.membership import peer_of_key

DEFAULT_PORT = 5466
#: End (exclusive) of the port range that the firewall rule opens.
LAST_PORT = 5480
_KEY_LENGTH = 40
_MAX_ADDRESSES = 6


@dataclass(frozen=True, slots=True)
class CoordinatorOptions:
    """How to run a coordinator."""

    state: Path
    host: str = "0.0.0.0"
    #: ``None``: the port of the last run, else the first free one from 5466 on; 0: that of the last
    #: run, else any.
    port: int | None = None
    name: str = ""
    addresses: tuple[str, ...] = ()
    #: Verify keys and names of the owners that found a new swarm.
    members: tuple[tuple[str, str], ...] = ()
    standalone: bool = False
    term: int = 0
    #: The peer whose daemon runs this coordinator.
    leader: str = ""
    #: File with a replica of the state, used if it is newer than the state.
    replica: Path | None = None
    #: A peer that is known to be unreachable.
    lost_peer: str = ""
    #: The swarm whose state has to exist.
    swarm: str = ""
    #: ``None``: that of the last run.
    max_peers: int | None = None
    #: Port of the pairing listener, or a free one below it (0: any); ``None``: no listener.
    pairing_port: int | None = None
    #: Fail if ``port`` is in use.
    only_port: bool = False


def parse_options(arguments: Sequence[str]) -> CoordinatorOptions:
    """Parse the command line; exits with code 2 if it is invalid."""
    parser = argparse.ArgumentParser(
        prog="molink-coordinator", description="The control plane of a molink swarm."
    )
    add = parser.add_argument
    add("--state", type=Path, required=True, help="folder of the swarm's state")
    add("--host", default="0.0.0.0", help="address to listen on")
    add("--port", type=_parse_port, help="port to listen on, or the next free one")
    add("--name", default=socket.gethostname(), help="name of a new swarm")
    add(
        "--address",
        dest="addresses",
        action="append",
        default=[],
        help="address at which peers reach this PC",
    )
    add(
        "--member",
        dest="members",
        action="append",
        default=[],
        type=_parse_member,
        help="KEY:NAME of an owner, by the key that it signs with",
    )
    add("--max-peers", type=_parse_max_peers, help="maximum number of member PCs")
    add("--standalone", action="store_true", help="keep running when standard input ends")
    add("--term", type=int, default=0, help="term in which to lead")
    add("--leader", default="", help="id of the peer whose daemon runs this coordinator")
    add("--replica", type=Path, help="replica of the state, used if it is newer")
    add("--lost-peer", default="", help="id of a peer that is known to be unreachable")
    add("--swarm", default="", help="id of the swarm whose state has to exist")
    add("--pairing-port", type=_parse_port, help="port of the pairing listener")
    add("--only-port", action="store_true", help="fail if the port is in use")
    parsed = vars(parser.parse_args(_bind_members(arguments)))
    parsed |= {name: tuple(parsed[name]) for name in ("addresses", "members")}
    return CoordinatorOptions(**parsed)


def advertised_addresses(options: CoordinatorOptions, port: int) -> tuple[str, ...]:
    """``host:port`` addresses for tokens. An ``--address`` may name another port."""
    hosts = options.addresses or _own_addresses(options.host)
    return tuple(format_address(host, port) for host in hosts[:_MAX_ADDRESSES])


def _bind_members(arguments: Sequence[str]) -> list[str]:
    """Write ``--member KEY`` as ``--member=KEY``, since a key may start with a dash."""
    bound: list[str] = []
    for argument in arguments:
        if bound and bound[-1] == "--member":
            bound[-1] = f"--member={argument}"
        else:
            bound.append(argument)
    return bound


def _parse_port(text: str) -> int:
    port = int(text)
    if not 0 <= port <= 65535:
        raise argparse.ArgumentTypeError(f"{text} is not a port")
    return port


def _parse_max_peers(text: str) -> int:
    peers = int(text)
    if peers < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a number of PCs")
    return peers


def _parse_member(text: str) -> tuple[str, str]:
    key, colon, name = text[:_KEY_LENGTH], text[_KEY_LENGTH : _KEY_LENGTH + 1], text[41:]
    if len(key) != _KEY_LENGTH or colon != ":" or not name:
        raise argparse.ArgumentTypeError(f"{text!r} is not KEY:NAME with a key of 40 characters")
    try:
        peer_of_key(key)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not KEY:NAME: {error}") from None
    return key, name


def _own_addresses(host: str) -> tuple[str, ...]:
    if host not in ("0.0.0.0", "::", "*"):
        return (host,)
    found = [
        entry.address
        for entries in psutil.net_if_addrs().values()
        for entry in entries
        if entry.family == socket.AF_INET and not entry.address.startswith(("127.", "169.254."))
    ]
    return tuple(found) or ("127.0.0.1",)


def format_address(host: str, port: int) -> str:
    """``host:port``, with an IPv6 address in brackets; a port in ``host`` wins."""
    if host.count(":") > 1 and not host.startswith("["):
        host = f"[{host}]"  # IPv6 without a port
    has_port = ":" in host.rpartition("]")[2]
    return host if has_port else f"{host}:{port}"
