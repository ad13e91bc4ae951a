"""Homes behind routers: namespaces whose routers translate addresses as home routers do.

A node of the rig is what the internet sees of a home: its router, or its only PC. Behind a router
the PC has the address that every home has, 192.168.1.2.
"""

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, get_args

from tools.wan.namespaces import (
    Namespaces,
    RigError,
    enter_command,
    run_ip,
    run_system,
    unavailable,
)
from tools.wan.node import Node
from tools.wan.rig import Rig

#: ``open`` has no router. ``cone`` routers give one public port to a local port, and let in anyone,
#: known addresses, or known addresses and ports; a ``symmetric`` one takes another port for each
#: destination. A ``carrier`` translates once more. Routers of ``no-udp`` and ``only-443`` let out
#: TCP only, to any port and to 443. ``only-ipv6`` has no router and no IPv4, ``open`` has both.
Kind = Literal[
    "open",
    "full-cone",
    "address-cone",
    "port-cone",
    "symmetric",
    "carrier",
    "no-udp",
    "only-443",
    "only-ipv6",
]
KINDS: tuple[Kind, ...] = get_args(Kind)

#: Holds the files that ``ip netns exec`` puts in the place of those in ``/etc``.
_NAMESERVICE = Path("/etc/netns")
_LAN_ROUTER, _LAN_PC = "192.168.1.1", "192.168.1.2"
_CARRIER, _CUSTOMER = "100.64.0.1", "100.64.0.2"

#: Linux keeps a local port as the public one where it can, which makes it a cone; only what a
#: router lets in differs. ``wan0`` is outside.
_RULES = """
table ip home {{
    set mapped {{
        type inet_service
        flags dynamic,timeout
        timeout 5m
    }}
    set known {{
        type ipv4_addr . inet_service
        flags dynamic,timeout
        timeout 5m
    }}
    chain prerouting {{
        type nat hook prerouting priority dstnat
        {let_in}
    }}
    chain postrouting {{
        type nat hook postrouting priority srcnat
        oifname "wan0" masquerade {masquerade}
    }}
    chain forward {{
        type filter hook forward priority filter
        {let_out}
        oifname "wan0" tcp flags & (syn | ack) == syn update @mapped {{ tcp sport }}
        oifname "wan0" tcp flags & (syn | ack) == syn update @known {{ ip daddr . tcp sport }}
        iifname "wan0" ct status dnat accept
        iifname "wan0" ct state new drop
    }}
    chain input {{
        type filter hook input priority filter
        iifname "wan0" ct state new drop
    }}
}}
"""
_UNROUTED = ("open", "only-ipv6")
_LET_IN: dict[str, str] = {
    "full-cone": f'iifname "wan0" tcp dport @mapped dnat to {_LAN_PC}',
    "address-cone": f'iifname "wan0" ip saddr . tcp dport @known dnat to {_LAN_PC}',
}
_LET_OUT: dict[str, str] = {
    "no-udp": 'oifname "wan0" meta l4proto udp drop',
    "only-443": 'oifname "wan0" tcp dport != 443 drop\n oifname "wan0" meta l4proto udp drop',
}


def homes_unavailable() -> str | None:
    """Reason why homes are unavailable, or ``None``."""
    if shutil.which("nft") is None:
        return unavailable() or "there is no `nft` command: install nftables"
    return unavailable()


def make_rules(kind: Kind) -> str:
    """The nftables rules of a router."""
    return _RULES.format(
        let_in=_LET_IN.get(kind, ""),
        let_out=_LET_OUT.get(kind, ""),
        masquerade="fully-random" if kind == "symmetric" else "",
    )


class Homes(Rig):
    """A rig whose nodes are homes; :meth:`run` starts programs on their PCs."""

    def __init__(self, nodes: Sequence[Node], kinds: Sequence[Kind], *, seed: int = 0) -> None:
        """``kinds``: what stands between each node and its PC."""
        super().__init__(nodes, seed=seed)
        self._kinds = tuple(kinds)
        depths = [_depth(kind) for kind in kinds]
        self._inner = Namespaces(sum(depths), "cubic")
        inner = iter(self._inner.names)
        #: Namespaces of each home, from the internet to the PC.
        self._chains = [
            [name, *(next(inner) for _ in range(depth))]
            for name, depth in zip(self._spaces.names, depths, strict=True)
        ]

    def _set_up(self) -> None:
        super()._set_up()
        self._inner.create()
        for index, kind in enumerate(self._kinds):
            if kind in _UNROUTED:
                self._add_ipv6(index)
            if kind == "only-ipv6":
                run_ip("-n", self.namespace(index), "-4", "address", "flush", "dev", "wan0")
        for kind, chain in zip(self._kinds, self._chains, strict=True):
            if kind == "carrier":
                carrier, router, pc = chain
                _join(carrier, router, _CARRIER, _CUSTOMER, "wan0")
                _start_router(carrier, "port-cone")
                _join(router, pc, _LAN_ROUTER, _LAN_PC, "eth0")
                _start_router(router, "port-cone")
            elif kind not in _UNROUTED:
                router, pc = chain
                _join(router, pc, _LAN_ROUTER, _LAN_PC, "eth0")
                _start_router(router, kind)

    def _add_ipv6(self, index: int) -> None:
        enable = "for each in all default wan0 lo; do"
        enable += " echo 0 > /proc/sys/net/ipv6/conf/$each/disable_ipv6; done"
        run_system(*enter_command(self.namespace(index)), "sh", "-c", enable)
        own = f"{self.address6(index)}/64"
        run_ip("-n", self.namespace(index), "address", "add", own, "dev", "wan0", "nodad")

    def address6(self, index: int) -> str:
        """The IPv6 address of an unrouted node ``index``."""
        return f"fd77::{index + 1:x}"

    def name_host(self, index: int, name: str) -> None:
        """Let all PCs know node ``index`` by a name."""
        lines = [f"{address} {name}\n" for address in (self.address(index), self.address6(index))]
        for chain in self._chains:
            folder = _NAMESERVICE / chain[-1]
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "hosts").write_text(
                "".join(["127.0.0.1 localhost\n", *lines]), encoding="ascii"
            )

    def close(self) -> None:
        """Stop all processes and clean up."""
        super().close()
        for chain in self._chains:
            shutil.rmtree(_NAMESERVICE / chain[-1], ignore_errors=True)
        self._inner.remove()

    def router(self, index: int) -> str:
        """The name of the namespace of a home's router, or of its only PC."""
        return self._chains[index][-2 if len(self._chains[index]) > 1 else -1]

    def namespace(self, index: int) -> str:
        """The name of the namespace of a home's PC."""
        return self._chains[index][-1]


def _depth(kind: Kind) -> int:
    """Namespaces behind a home's outermost one."""
    return 0 if kind in _UNROUTED else 2 if kind == "carrier" else 1


def _join(outer: str, inner: str, gateway: str, address: str, device: str) -> None:
    """Connect two namespaces; the inner one's default route leads to the outer one."""
    peer = ("peer", "name", device, "netns", inner)
    run_ip("-n", outer, "link", "add", "lan0", "type", "veth", *peer)
    for name, end, own in ((outer, "lan0", gateway), (inner, device, address)):
        run_ip("-n", name, "address", "add", f"{own}/24", "dev", end)
        run_ip("-n", name, "link", "set", end, "up")
    run_ip("-n", inner, "route", "add", "default", "via", gateway)


def _start_router(name: str, kind: Kind) -> None:
    """Forward between a namespace's ``lan0`` and ``wan0`` as a router of that kind."""
    run_system(*enter_command(name), "sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward")
    command = [*enter_command(name), "nft", "-f", "-"]
    done = subprocess.run(
        command, input=make_rules(kind), capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise RigError(f"nft refuses the rules of a {kind} router: {done.stderr.strip()}")
