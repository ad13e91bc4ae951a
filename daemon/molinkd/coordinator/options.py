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
class CoordinatorOptions:
    """How to run a coordinator.

    ``port`` ``None`` is the port of the last run, else the first free one from 5466 on; 0 is that
    of the last run, else any. ``members`` (public key, name) are trusted from the start.
    ``max_peers`` ``None`` is that of the last run.

    ``term``, ``leader`` (the peer whose daemon runs it), ``replica`` (a file with a copy of the
    state, taken if it is newer than the state) and ``lost_peer`` (a peer that is known not to be
    there) are what the daemon knows; ``swarm`` is the one whose state has to be there.
    ``pairing_port`` is the port where PCs may knock, or a free one below it (0: any); ``None`` for
    none. ``only_port``: where ``port`` is taken no other is.
    """

    state: Path
    host: str = "0.0.0.0"
    port: int | None = None
    name: str = ""
    addresses: tuple[str, ...] = ()
    members: tuple[tuple[str, str], ...] = ()
    standalone: bool = False
    term: int = 0
    leader: str = ""
    replica: Path | None = None
    lost_peer: str = ""
    swarm: str = ""
    max_peers: int | None = None
    pairing_port: int | None = None
    only_port: bool = False


def parse_options(arguments: Sequence[str]) -> CoordinatorOptions:
    """Read the command line; ends the process with code 2 if it is wrong."""
    parser = argparse.ArgumentParser(
        prog="molink-coordinator", description="The control plane of a molink swarm."
    )
    parser.add_argument("--state", type=Path, required=True, help="folder of the swarm's state")
    parser.add_argument("--host", default="0.0.0.0", help="address to listen on")
    parser.add_argument("--port", type=_parse_port, help="port to listen on, or the next free one")
    parser.add_argument("--name", default=socket.gethostname(), help="name of a new swarm")
    parser.add_argument(
        "--address", action="append", default=[], help="address at which peers reach this PC"
    )
    parser.add_argument(
        "--member",
        action="append",
        default=[],
        type=_parse_member,
        help="KEY:NAME of a trusted peer",
    )
    parser.add_argument(
        "--max-peers", type=_parse_max_peers, help="how many PCs may be members at once"
    )
    parser.add_argument("--standalone", action="store_true", help="run on when standard input ends")
    parser.add_argument("--term", type=int, default=0, help="the term in which to lead")
    parser.add_argument("--leader", default="", help="id of the peer whose daemon runs this")
    parser.add_argument("--replica", type=Path, help="copy of the state, taken if it is newer")
    parser.add_argument("--lost", default="", help="id of a peer that is known not to be there")
    parser.add_argument("--swarm", default="", help="id of the swarm whose state has to be there")
    parser.add_argument("--porch", type=_parse_port, help="port where PCs may ask to be let in")
    parser.add_argument(
        "--only-port", action="store_true", help="fail where the port is in use; take no other"
    )
    parsed = parser.parse_args(_bind_members(arguments))
    return CoordinatorOptions(
        state=parsed.state,
        host=parsed.host,
        port=parsed.port,
        name=parsed.name,
        addresses=tuple(parsed.address),
        members=tuple(parsed.member),
        max_peers=parsed.max_peers,
        standalone=parsed.standalone,
        term=parsed.term,
        leader=parsed.leader,
        replica=parsed.replica,
        lost_peer=parsed.lost,
        swarm=parsed.swarm,
        pairing_port=parsed.porch,
        only_port=parsed.only_port,
    )


def advertised_addresses(options: CoordinatorOptions, port: int) -> tuple[str, ...]:
    """``host:port`` addresses to put into tokens. An ``--address`` may name another port."""
    hosts = options.addresses or _own_addresses(options.host)
    return tuple(format_address(host, port) for host in hosts[:_MAX_ADDRESSES])


def _bind_members(arguments: Sequence[str]) -> list[str]:
    """``--member KEY`` as ``--member=KEY``: a key may begin with a dash."""
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
        raise argparse.ArgumentTypeError(f"{text} is no port")
    return port


def _parse_max_peers(text: str) -> int:
    peers = int(text)
    if peers < 1:
        raise argparse.ArgumentTypeError(f"{text} is no number of PCs")
    return peers


def _parse_member(text: str) -> tuple[str, str]:
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


def format_address(host: str, port: int) -> str:
    """``host:port``; an IPv6 address in brackets. A host that names a port keeps it."""
    if host.count(":") > 1 and not host.startswith("["):
        host = f"[{host}]"  # IPv6 without a port
    has_port = ":" in host.rpartition("]")[2]
    return host if has_port else f"{host}:{port}"
