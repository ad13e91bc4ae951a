"""Collects facts about ports, firewalls, WSL and multicast."""

import contextlib
import errno
import os
import socket
import sys
from pathlib import Path

import psutil

from molink.errors import MolinkError
from molinkd.cli.doctor.facts import NetworkFacts, PortFact
from molinkd.cli.doctor.run_program import run_program
from molinkd.peer.membership.addresses import advertised_addresses, multicast_addresses
from molinkd.peer.membership.discovery import scan_network
from molinkd.peer.settings import Settings

#: How long to listen for swarms, and how long after the first one, in seconds.
_LISTEN_S, _MORE_S = 3.0, 0.5
#: Windows' error for a reserved port (``WSAEACCES``).
_WSAEACCES = 10013


def collect_network(settings: Settings, running: bool) -> NetworkFacts:
    """Collect network facts; ports are probed only if no daemon is ``running``."""
    announced, multicast_error = _listen_for_swarms(settings)
    firewall, rule = _detect_firewall()
    return NetworkFacts(
        system=sys.platform,
        host=settings.host,
        advertise=settings.advertise,
        addresses=advertised_addresses(settings.host),
        ports=() if running else _probe_ports(settings),
        control_port=settings.control_port,
        worker_ports=settings.worker_ports,
        coordinator_port=settings.coordinator_port,
        pairing_port=settings.pairing_port if settings.discovery else 0,
        firewall=firewall,
        has_firewall_rule=rule,
        wsl=_wsl_network(),
        discovery=settings.discovery,
        interfaces=multicast_addresses(settings.host),
        announced_swarms=announced,
        multicast_error=multicast_error,
    )


def _listen_for_swarms(settings: Settings) -> tuple[tuple[str, ...], str]:
    if not settings.discovery:
        return (), ""
    try:
        return tuple(one.swarm for one in scan_network(settings.host, _LISTEN_S, _MORE_S)), ""
    except MolinkError as error:
        return (), str(error)


# --- ports ------------------------------------------------------------------------------------


def _probe_ports(settings: Settings) -> tuple[PortFact, ...]:
    first, last = settings.worker_ports
    endpoints = [
        ("api_port", settings.api_host, settings.api_port),
        ("coordinator_port", settings.host, settings.coordinator_port),
        ("control_port", settings.host, settings.control_port),
        *(("worker_ports", settings.host, port) for port in range(first, last + 1) if first),
    ]
    return tuple(_probe_port(setting, host, port) for setting, host, port in endpoints if port)


def _probe_port(setting: str, host: str, port: int) -> PortFact:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        socket.create_server(("" if host == "*" else host, port), family=family).close()
    except OSError as error:
        if error.errno in (errno.EADDRINUSE, getattr(errno, "WSAEADDRINUSE", None)):
            return PortFact(setting, port, _port_user(port))
        kept = (
            error.errno in (errno.EACCES, _WSAEACCES) or getattr(error, "winerror", 0) == _WSAEACCES
        )
        return PortFact(setting, port, error.strerror or str(error), is_reserved=kept)
    return PortFact(setting, port)


def _port_user(port: int) -> str:
    """Return the program that listens on a port, if the system reports it."""
    with contextlib.suppress(psutil.Error, OSError):
        for one in psutil.net_connections("tcp"):
            if one.laddr and one.laddr.port == port and one.status == psutil.CONN_LISTEN:
                if one.pid is None:
                    break
                return f"{psutil.Process(one.pid).name()} (process {one.pid})"
    return "another program"


# --- firewall and WSL -------------------------------------------------------------------------


def _detect_firewall() -> tuple[str, bool | None]:
    """Return the active firewall, and whether it has a rule named molink (``None``: unknown)."""
    if sys.platform == "win32":
        netsh = os.path.expandvars(r"%SystemRoot%\System32\netsh.exe")
        shown = run_program(netsh, "advfirewall", "firewall", "show", "rule", "name=molink")
        code = -1 if shown is None else shown[0]
        return "Windows Defender Firewall", None if code < 0 else code == 0
    with contextlib.suppress(OSError):
        text = Path("/etc/ufw/ufw.conf").read_text(encoding="utf-8", errors="replace")
        if "ENABLED=yes" in text:
            return "ufw", None
    state = run_program("firewall-cmd", "--state")
    if state is not None and state[0] == 0:
        return "firewalld", None
    return "", None


def _wsl_network() -> str:
    """Return the networking mode of WSL 2; empty outside of it and in WSL 1."""
    release = ""
    with contextlib.suppress(OSError):
        release = Path("/proc/sys/kernel/osrelease").read_text(encoding="utf-8").lower()
    if sys.platform != "linux" or "microsoft" not in release or "wsl2" not in release:
        return ""
    code, text = run_program("wslinfo", "--networking-mode") or (1, "")
    return text.strip() if code == 0 and text.strip() else "nat"
