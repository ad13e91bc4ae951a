"""The command line of the coordinator process."""

import argparse
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

DEFAULT_PORT = 5466
#: The ports that one firewall rule opens; half-open.
LAST_PORT = 5480
_KEY_LENGTH = 40
_MAX_ADDRESSES = 6


@dataclass(frozen=True, slots=True)
class Options:
    """How to run a coordinator.

    ``port`` ``None`` is the port of the last run, else the first free one from 5466 on; 0 is that
    of the last run, else any. ``members`` (public key, name) are trusted from the start.
    """

    state: Path
    host: str = "0.0.0.0"
    port: int | None = None
    name: str = ""
    addresses: tuple[str, ...] = ()
    members: tuple[tuple[str, str], ...] = ()
    standalone: bool = False


def parse_options(arguments: Sequence[str]) -> Options:
    """Read the command line; ends the process with code 2 if it is wrong."""
    parser = argparse.ArgumentParser(
        prog="molink-coordinator", description="The control plane of a molink swarm."
    )
    parser.add_argument("--state", type=Path, required=True, help="folder of the swarm's state")
    parser.add_argument("--host", default="0.0.0.0", help="address to listen on")
    parser.add_argument("--port", type=_port, help="port to listen on; the next free one is taken")
    parser.add_argument("--name", default=socket.gethostname(), help="name of a new swarm")
    parser.add_argument(
        "--address", action="append", default=[], help="address at which peers reach this PC"
    )
    parser.add_argument(
        "--member", action="append", default=[], type=_member, help="KEY:NAME of a trusted peer"
    )
    parser.add_argument("--standalone", action="store_true", help="run on when standard input ends")
    given = parser.parse_args(_bind_members(arguments))
    return Options(
        state=given.state,
        host=given.host,
        port=given.port,
        name=given.name,
        addresses=tuple(given.address),
        members=tuple(given.member),
        standalone=given.standalone,
    )


def reachable_at(options: Options, port: int) -> tuple[str, ...]:
    """``host:port`` addresses to put into tokens. An ``--address`` may name another port."""
    hosts = options.addresses or _own_addresses(options.host)
    return tuple(_with_port(host, port) for host in hosts[:_MAX_ADDRESSES])


def _bind_members(arguments: Sequence[str]) -> list[str]:
    """``--member KEY`` as ``--member=KEY``: a key may begin with a dash."""
    bound: list[str] = []
    for argument in arguments:
        if bound and bound[-1] == "--member":
            bound[-1] = f"--member={argument}"
        else:
            bound.append(argument)
    return bound


def _port(text: str) -> int:
    port = int(text)
    if not 0 <= port <= 65535:
        raise argparse.ArgumentTypeError(f"{text} is no port")
    return port


def _member(text: str) -> tuple[str, str]:
    key, colon, name = text[:_KEY_LENGTH], text[_KEY_LENGTH : _KEY_LENGTH + 1], text[41:]
    if len(key) != _KEY_LENGTH or colon != ":" or not name:
        raise argparse.ArgumentTypeError(f"{text!r} is not KEY:NAME with a key of 40 characters")
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


def _with_port(host: str, port: int) -> str:
    if host.count(":") > 1 and not host.startswith("["):
        host = f"[{host}]"  # IPv6 without a port
    has_port = ":" in host.rpartition("]")[2]
    return host if has_port else f"{host}:{port}"
