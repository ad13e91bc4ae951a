"""Checks whether others can reach this PC: ports, firewall, NAT, WSL, discovery."""

import ipaddress

from molink.swarm.controller.reachability import firewall_commands
from molinkd.cli.doctor.facts import Finding, NetworkFacts, PortFact, SwarmFacts
from molinkd.cli.translation import tr, tr_count
from molinkd.peer.membership.addresses import is_loopback
from molinkd.peer.settings import MAX_PORTS_TRIED

#: mDNS.
_DISCOVERY_PORT = 5353
_ADVERTISE = ("molink up --advertise ADDRESS  # or: molink join --advertise ADDRESS",)
_FORWARD = ("MOLINK_PORT_MAPPING=true molink up  # or: port_mapping = true in config.toml",)
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
        text = tr("molink runs here (process {pid}) and holds its ports", pid=daemon)
        return Finding("ports", "ok", text)
    refused = [one for one in facts.ports if one.is_reserved]
    if refused and facts.system == "win32":
        return Finding(
            "ports",
            "problem",
            tr(
                "Windows reserves {ports} ({reason}), for instance for Hyper-V; molink can't use "
                "other ports unannounced",
                ports=_list_ports(refused),
                reason=refused[0].used_by,
            ),
            (
                "netsh interface ipv4 show excludedportrange protocol=tcp",
                f"net stop winnat; net start winnat  # {tr('as administrator')}",
            ),
        )
    if refused:
        text = tr(
            "{ports} can't be used: {reason}",
            ports=_list_ports(refused),
            reason=refused[0].used_by,
        )
        return Finding("ports", "problem", text, (f"molink up --{_option_name(refused[0])} 0",))
    workers = [one for one in facts.ports if one.setting == "worker_ports"]
    if workers and all(one.used_by for one in workers):
        first, last = facts.worker_ports
        text = tr(
            "all worker ports, {first} to {last}, are in use; {program} has one",
            first=first,
            last=last,
            program=workers[0].used_by,
        )
        return Finding("ports", "problem", text, ("molink status", "molink down"))
    taken = [one for one in facts.ports if one.used_by and one.setting != "worker_ports"]
    if taken:
        return Finding(
            "ports",
            "warning",
            tr(
                "{ports} in use by {program}: molink uses the next free port, which a firewall may "
                "block. Stop that program, or choose another port",
                ports=_list_ports(taken),
                program=taken[0].used_by,
            ),
            _other_port_command(taken[0]),
        )
    return Finding("ports", "ok", tr("molink's ports are free"))


def _option_name(port: PortFact) -> str:
    return port.setting.replace("_", "-")


def _other_port_command(port: PortFact) -> tuple[str, ...]:
    """Suggest another port."""
    return (f"molink up --{_option_name(port)} {port.port + 100}",)


def _list_ports(ports: list[PortFact]) -> str:
    return ", ".join(
        tr("port {port} (`{setting}`)", port=one.port, setting=one.setting) for one in ports[:4]
    )


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
        return tuple(f"{one}  # {tr('in PowerShell as administrator')}" for one in commands)
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
            tr(
                "a firewall ({firewall}) is active, and no other PC has connected yet. If one "
                "can't, open molink's ports",
                firewall=facts.firewall,
            ),
            _open_port_commands(facts),
        )
    text = tr("no firewall found on this PC")
    if facts.firewall:
        text = tr("a rule for molink exists")
    return Finding("firewall", "ok", text)


def _check_reachability(facts: NetworkFacts, swarm: SwarmFacts) -> Finding:
    failed = ", ".join(_failed_peers(facts, swarm, far=False))
    if failed:
        wall = tr("a firewall")
        if facts.firewall:
            wall = tr("its firewall ({firewall})", firewall=facts.firewall)
        text = tr(
            "{pcs} can't connect to this PC on port {port}: {firewall} blocks the connection",
            pcs=failed,
            port=facts.control_port,
            firewall=wall,
        )
        return Finding("firewall", "problem", text, _open_port_commands(facts))
    blocked = ", ".join(swarm.peer_name(to) for by, to in swarm.unreachable if by == swarm.own_id)
    if blocked:
        text = tr("this PC can't connect to {pcs}: run `molink doctor` there", pcs=blocked)
        return Finding("firewall", "warning", text)
    return Finding("firewall", "ok", tr("all other PCs of the swarm can connect to this one"))


def _check_nat(facts: NetworkFacts, swarm: SwarmFacts | None) -> Finding:
    if is_loopback(facts.host):
        return Finding(
            "nat",
            "warning",
            tr("`host` is {address}: only this PC can reach molink here", address=facts.host),
            ("molink up --host 0.0.0.0  # or: molink join --host 0.0.0.0",),
        )
    usable = [one for one in facts.addresses if not is_loopback(one)]
    if not usable and not facts.advertise:
        return Finding("nat", "problem", tr("this PC has no network address: is it connected?"))
    names = "" if swarm is None else ", ".join(_failed_peers(facts, swarm, far=True))
    if names:
        own = ", ".join(facts.advertise or usable)
        return Finding(
            "nat",
            "problem",
            tr(
                "{pcs} can't reach {addresses} from another network: a router (NAT) is in between, "
                "and no peer relays. Name a rendezvous that both reach (`molink rendezvous`), or "
                "put both PCs into one VPN (WireGuard, Tailscale) and advertise this PC's VPN "
                "address",
                pcs=names,
                addresses=own,
            ),
            _ADVERTISE,
        )
    router = None if swarm is None else _check_router(swarm)
    if router is not None:
        return router
    if facts.advertise:
        text = tr("advertised addresses: {addresses}", addresses=", ".join(facts.advertise))
        return Finding("nat", "ok", text)
    if all(not _is_public(one) for one in usable):
        text = tr(
            "{address} is a local address: only PCs on the same network can reach it",
            address=usable[0],
        )
        return Finding("nat", "ok", text)
    text = tr("this PC has a public address: {address}", address=_first_public(usable))
    return Finding("nat", "ok", text)


def _check_router(swarm: SwarmFacts) -> Finding | None:
    """What kind of router this PC is behind, and what would help; ``None`` if it needs none."""
    if swarm.not_forwarded:
        text = tr("the router forwards no ports: {reason}", reason=swarm.not_forwarded)
        return Finding("nat", "warning", text)
    relayed = _describe_relays(swarm)
    if relayed and swarm.router == "symmetric":
        text = tr(
            "{routes}: this PC's router takes another port for each connection (symmetric). Let it "
            "forward molink's ports, or use a VPN (WireGuard, Tailscale) for all PCs",
            routes=relayed,
        )
        return Finding("nat", "warning", text, (*_FORWARD, *_ADVERTISE))
    if relayed:
        text = tr(
            "{routes}. This works, but a direct connection may be faster: use a VPN (WireGuard, "
            "Tailscale) for all PCs and advertise this PC's VPN address",
            routes=relayed,
        )
        return Finding("nat", "warning", text, _ADVERTISE)
    if swarm.forwarded:
        text = tr(
            "the router forwards molink's ports of {address} ({protocol})",
            address=swarm.forwarded,
            protocol=swarm.forwarded_by,
        )
        return Finding("nat", "ok", text)
    return _describe_punched(swarm)


def _describe_punched(swarm: SwarmFacts) -> Finding | None:
    """Name the PCs to which direct connections pass the routers."""
    ends = (
        by if to == swarm.own_id else to for by, to in swarm.punched if swarm.own_id in (by, to)
    )
    names = ", ".join(dict.fromkeys(map(swarm.peer_name, ends)))
    if not names:
        return None
    if swarm.router == "cone":
        text = tr(
            "{pcs} and this PC connect directly: its router keeps a connection's port (cone)",
            pcs=names,
        )
    else:
        text = tr("{pcs} and this PC connect directly through their routers", pcs=names)
    return Finding("nat", "ok", text)


def _describe_relays(swarm: SwarmFacts) -> str:
    """Describe the relayed routes to this PC."""
    return ", ".join(
        tr(
            "{pc} reaches this PC through {relay}",
            pc=swarm.peer_name(by),
            relay=swarm.peer_name(through),
        )
        if through != by
        else tr("{pc} reaches this PC over connections that this PC opens", pc=swarm.peer_name(by))
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
        return Finding("wsl", "ok", tr("WSL shares the network of Windows (mirrored)"))
    if facts.advertise:
        text = tr(
            "WSL has its own network ({mode}); other addresses are advertised: Windows must "
            "forward the ports",
            mode=facts.wsl,
        )
        return Finding("wsl", "warning", text)
    return Finding(
        "wsl",
        "problem",
        tr(
            "WSL has its own network ({mode}), so other PCs can't reach molink here. Use mirrored "
            "networking (in PowerShell), or install molink in Windows",
            mode=facts.wsl,
        ),
        (
            'Add-Content "$env:USERPROFILE\\.wslconfig" "[wsl2]`nnetworkingMode=mirrored"',
            "wsl --shutdown",
        ),
    )


def _check_discovery(facts: NetworkFacts, swarm: SwarmFacts | None) -> Finding:
    by_hand = tr(
        "to join, use `molink join ADDRESS` with the address of the PC that leads the swarm instead"
    )
    if not facts.discovery:
        return Finding("discovery", "ok", tr("disabled (`discovery = false`)"))
    if facts.multicast_error:
        text = tr("this PC can't use multicast (mDNS): {error}", error=facts.multicast_error)
        text += f"; {by_hand}"
        return Finding("discovery", "warning", text, _open_port_commands(facts))
    if not facts.interfaces:
        text = f"{tr('no network for discovery found')}; {by_hand}"
        return Finding("discovery", "warning", text)
    if (
        swarm is not None
        and swarm.id
        and swarm.pairing_port
        and swarm.id not in facts.announced_swarms
    ):
        whose = tr("the swarm's announcement")
        if swarm.leader == swarm.own_id:
            whose = tr("this PC's own announcement of the swarm")
        text = tr(
            "{whose} is not received here: UDP port {port} is closed, the PCs are on different "
            "networks, or the Wi-Fi isolates its clients",
            whose=whose,
            port=_DISCOVERY_PORT,
        )
        commands = _open_port_commands(facts)
        return Finding("discovery", "warning", f"{text}; {by_hand}", commands)
    count = len(facts.announced_swarms)
    text = tr("no swarm found on this network")
    if count:
        text = tr_count(
            "{count} swarm found on this network", "{count} swarms found on this network", count
        )
    return Finding("discovery", "ok", text)
