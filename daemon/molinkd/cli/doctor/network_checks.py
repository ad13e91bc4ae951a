"""Checks whether others can reach this PC: ports, firewall, NAT, WSL, discovery."""

import ipaddress

from molink.swarm.controller.reachability import firewall_commands
from molinkd.cli.doctor.facts import Finding, NetworkFacts, PortFact, SwarmFacts
from molinkd.peer.membership.addresses import is_loopback
from molinkd.peer.settings import MAX_PORTS_TRIED

#: mDNS.
_DISCOVERY_PORT = 5353
_ADVERTISE = ("molink up --advertise ADDRESS  # or: molink join --advertise ADDRESS",)
#: Prefix length within which two addresses count as one network.
_HOME_PREFIX_BITS = 24


def check_network(facts: NetworkFacts, swarm: SwarmFacts | None, daemon: int) -> list[Finding]:
    """Check the network; one finding each. Without a ``daemon`` only local checks are possible."""
    found = [_check_ports(facts, daemon), _check_firewall(facts, swarm), _check_nat(facts, swarm)]
    if facts.wsl:
        found.append(_check_wsl(facts))
    found.append(_check_discovery(facts, swarm))
    return found


def _check_ports(facts: NetworkFacts, daemon: int) -> Finding:
    if daemon:
        return Finding("ports", "ok", f"molink runs here (process {daemon}) and holds its ports")
    refused = [one for one in facts.ports if one.is_reserved]
    if refused and facts.system == "win32":
        return Finding(
            "ports",
            "problem",
            f"Windows reserves {_list_ports(refused)} ({refused[0].used_by}), for instance "
            "for Hyper-V; molink can't use other ports unannounced",
            (
                "netsh interface ipv4 show excludedportrange protocol=tcp",
                "net stop winnat; net start winnat  # as administrator",
            ),
        )
    if refused:
        text = f"{_list_ports(refused)} can't be used: {refused[0].used_by}"
        return Finding("ports", "problem", text, (f"molink up --{_option_name(refused[0])} 0",))
    workers = [one for one in facts.ports if one.setting == "worker_ports"]
    if workers and all(one.used_by for one in workers):
        first, last = facts.worker_ports
        text = f"all worker ports, {first} to {last}, are in use; {workers[0].used_by} has one"
        return Finding("ports", "problem", text, ("molink status", "molink down"))
    taken = [one for one in facts.ports if one.used_by and one.setting != "worker_ports"]
    if taken:
        return Finding(
            "ports",
            "warning",
            f"{_list_ports(taken)} in use by {taken[0].used_by}: molink uses the next free "
            "port, which a firewall may block. Stop that program, or choose another port",
            _other_port_command(taken[0]),
        )
    return Finding("ports", "ok", "molink's ports are free")


def _option_name(port: PortFact) -> str:
    return port.setting.replace("_", "-")


def _other_port_command(port: PortFact) -> tuple[str, ...]:
    """Suggest another port."""
    return (f"molink up --{_option_name(port)} {port.port + 100}",)


def _list_ports(ports: list[PortFact]) -> str:
    return ", ".join(f"port {one.port} (`{one.setting}`)" for one in ports[:4])


def _open_port_commands(facts: NetworkFacts) -> tuple[str, ...]:
    """Return commands that open molink's ports, including the fallback ports."""
    ranges = [(one, one) for one in (facts.coordinator_port, facts.pairing_port) if one]
    ranges.append((facts.control_port, facts.control_port + MAX_PORTS_TRIED - 1))
    ranges.append(facts.worker_ports)
    merged: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if merged and low <= merged[-1][1] + 1:
            merged[-1] = merged[-1][0], max(high, merged[-1][1])
        else:
            merged.append((low, high))
    commands = firewall_commands(facts.system, merged, [_DISCOVERY_PORT] if facts.discovery else [])
    if facts.system == "win32":
        return tuple(f"{one}  # in PowerShell as administrator" for one in commands)
    return commands[1:] if facts.firewall == "firewalld" else commands[:1]


def _failed_peers(facts: NetworkFacts, swarm: SwarmFacts, *, far: bool) -> list[str]:
    """Names of peers that can't connect to this PC, from its own networks or from ``far``."""
    mine = [one for one in facts.addresses if not is_loopback(one)]
    found = [by for by, to in swarm.unreachable if to == swarm.own_id and by != swarm.own_id]
    return [swarm.peer_name(one) for one in found if _is_far(swarm, one, mine) is far]


def _check_firewall(facts: NetworkFacts, swarm: SwarmFacts | None) -> Finding:
    if swarm is not None and any(one.is_online for one in swarm.others):
        return _check_reachability(facts, swarm)
    if facts.firewall and facts.has_firewall_rule is not True:
        return Finding(
            "firewall",
            "warning",
            f"a firewall ({facts.firewall}) is active, and no other PC has connected yet. "
            "If one can't, open molink's ports",
            _open_port_commands(facts),
        )
    text = "a rule for molink exists" if facts.firewall else "no firewall found on this PC"
    return Finding("firewall", "ok", text)


def _check_reachability(facts: NetworkFacts, swarm: SwarmFacts) -> Finding:
    failed = ", ".join(_failed_peers(facts, swarm, far=False))
    if failed:
        wall = f"its firewall ({facts.firewall})" if facts.firewall else "a firewall"
        text = f"{failed} can't connect to this PC on port {facts.control_port}: {wall} "
        return Finding(
            "firewall", "problem", f"{text}blocks the connection", _open_port_commands(facts)
        )
    blocked = ", ".join(swarm.peer_name(to) for by, to in swarm.unreachable if by == swarm.own_id)
    if blocked:
        text = f"this PC can't connect to {blocked}: run `molink doctor` there"
        return Finding("firewall", "warning", text)
    return Finding("firewall", "ok", "all other PCs of the swarm can connect to this one")


def _check_nat(facts: NetworkFacts, swarm: SwarmFacts | None) -> Finding:
    if is_loopback(facts.host):
        return Finding(
            "nat",
            "warning",
            f"`host` is {facts.host}: only this PC can reach molink here",
            ("molink up --host 0.0.0.0  # or: molink join --host 0.0.0.0",),
        )
    usable = [one for one in facts.addresses if not is_loopback(one)]
    if not usable and not facts.advertise:
        return Finding("nat", "problem", "this PC has no network address: is it connected?")
    names = "" if swarm is None else ", ".join(_failed_peers(facts, swarm, far=True))
    if names:
        own = ", ".join(facts.advertise or usable)
        return Finding(
            "nat",
            "problem",
            f"{names} can't reach {own} from another network: a router (NAT) is in "
            "between, and no peer relays. Name a rendezvous that both reach (`molink "
            "rendezvous`), or put both PCs into one VPN (WireGuard, Tailscale) and advertise this "
            "PC's VPN address",
            _ADVERTISE,
        )
    relayed = "" if swarm is None else _describe_relays(swarm)
    if relayed:
        text = (
            f"{relayed}. This works, but a direct connection may be faster: use a VPN (WireGuard, "
        )
        text += "Tailscale) for all PCs and advertise this PC's VPN address"
        return Finding("nat", "warning", text, _ADVERTISE)
    if facts.advertise:
        text = f"advertised addresses: {', '.join(facts.advertise)}"
        return Finding("nat", "ok", text)
    if all(not _is_public(one) for one in usable):
        text = f"{usable[0]} is a local address: only PCs on the same network can reach it"
        return Finding("nat", "ok", text)
    return Finding("nat", "ok", f"this PC has a public address: {_first_public(usable)}")


def _describe_relays(swarm: SwarmFacts) -> str:
    """Describe the relayed routes to this PC."""
    return ", ".join(
        f"{swarm.peer_name(by)} reaches this PC through {swarm.peer_name(through)}"
        if through != by
        else f"{swarm.peer_name(by)} reaches this PC over connections that this PC opens"
        for by, to, through in swarm.relayed
        if to == swarm.own_id
    )


def _is_far(swarm: SwarmFacts, peer: str, mine: list[str]) -> bool:
    """Whether a peer's address is outside all networks of this PC."""
    theirs = next((one.address for one in swarm.peers if one.id == peer), "")
    try:
        address = ipaddress.ip_address(theirs)
    except ValueError:
        return False
    own = [
        ipaddress.ip_network(f"{one}/{_HOME_PREFIX_BITS}", strict=False)
        for one in mine
        if _is_ipv4(one)
    ]
    return not any(address in network for network in own)


def _is_public(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_global
    except ValueError:
        return False


def _is_ipv4(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).version == 4
    except ValueError:
        return False


def _first_public(addresses: list[str]) -> str:
    return next(one for one in addresses if _is_public(one))


def _check_wsl(facts: NetworkFacts) -> Finding:
    if facts.wsl == "mirrored":
        return Finding("wsl", "ok", "WSL shares the network of Windows (mirrored)")
    if facts.advertise:
        text = f"WSL has its own network ({facts.wsl}); other addresses are advertised"
        return Finding("wsl", "warning", f"{text}: Windows must forward the ports")
    return Finding(
        "wsl",
        "problem",
        f"WSL has its own network ({facts.wsl}), so other PCs can't reach molink here. Use "
        "mirrored networking (in PowerShell), or install molink in Windows",
        (
            'Add-Content "$env:USERPROFILE\\.wslconfig" "[wsl2]`nnetworkingMode=mirrored"',
            "wsl --shutdown",
        ),
    )


def _check_discovery(facts: NetworkFacts, swarm: SwarmFacts | None) -> Finding:
    by_hand = "use `molink join ADDRESS` with the address of the PC that leads the swarm instead"
    if not facts.discovery:
        return Finding("discovery", "ok", "disabled (`discovery = false`)")
    if facts.multicast_error:
        text = f"this PC can't use multicast (mDNS): {facts.multicast_error}. To join, {by_hand}"
        return Finding("discovery", "warning", text, _open_port_commands(facts))
    if not facts.interfaces:
        text = f"no network for discovery found. To join, {by_hand}"
        return Finding("discovery", "warning", text)
    if (
        swarm is not None
        and swarm.id
        and swarm.pairing_port
        and swarm.id not in facts.announced_swarms
    ):
        whose = "this PC's own announcement" if swarm.leader == swarm.own_id else "its announcement"
        return Finding(
            "discovery",
            "warning",
            f"{whose} of the swarm is not received here: UDP port {_DISCOVERY_PORT} is "
            "closed, the PCs are on different networks, or the Wi-Fi isolates its clients. "
            f"To join, {by_hand}",
            _open_port_commands(facts),
        )
    count = len(facts.announced_swarms)
    heard = f"{count} swarm{'s' * (count != 1)} found" if count else "no swarm found"
    return Finding("discovery", "ok", f"{heard} on this network")
