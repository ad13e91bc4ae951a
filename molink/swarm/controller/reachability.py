"""Which peer can connect to which, as they have tried, and how a person opens a port."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from molink.swarm.controller.registry import Registry
from molink.wire.messages.peer_reports import PeerReport

#: Steps of the search for an order in which peers can connect; most need one for each peer.
_MAX_STEPS = 2000
#: Answers that are kept: each deployment asks for its own.
_CACHE_SIZE = 32


@dataclass(frozen=True, slots=True)
class UnreachablePeer:
    """``peer`` gets no stage: ``source`` can't connect to ``target``; one of these two is the
    peer."""

    peer: str
    source: str
    target: str


class Reachability:
    """What peers have found out about each other. What none has tried counts as possible."""

    def __init__(self) -> None:
        self._failed: set[tuple[str, str]] = set()
        self._steps_left = 0
        #: The last answers, by whom they were about: these are asked for after every event.
        self._cache: dict[tuple[str, ...], dict[str, UnreachablePeer]] = {}

    def record_attempt(self, source: str, target: str, ok: bool) -> None:
        """``by`` has tried to connect to ``to``."""
        if ok == ((source, target) not in self._failed):
            return  # as known; when a swarm starts, each peer tells this of all others
        self._cache.clear()
        if ok:
            self._failed.discard((source, target))
        else:
            self._failed.add((source, target))

    def drop_peer(self, peer: str) -> None:
        """The peer is gone: whoever tried it then has learnt nothing about its ports."""
        self._cache.clear()
        self._failed = {pair for pair in self._failed if peer not in pair}

    @property
    def has_failures(self) -> bool:
        """Whether any connection can't be made."""
        return bool(self._failed)

    @property
    def failed_pairs(self) -> list[tuple[str, str]]:
        """Who has failed to connect to whom."""
        return sorted(self._failed)

    def unreachable_from(self, peer: str) -> frozenset[str]:
        """Those to whom ``peer`` has failed to connect."""
        return frozenset(target for source, target in self._failed if source == peer)

    def find_unreachable(self, peers: Iterable[str]) -> dict[str, UnreachablePeer]:
        """Who of ``peers`` can't be in a ring with those before it, whatever its order is."""
        if not self._failed:
            return {}
        peers = tuple(peers)
        if peers not in self._cache:
            if len(self._cache) >= _CACHE_SIZE:
                self._cache.clear()
            self._cache[peers] = self._compute_unreachable(peers)
        return self._cache[peers]

    def _compute_unreachable(self, peers: Sequence[str]) -> dict[str, UnreachablePeer]:
        accepted: list[str] = []
        waiting = list(peers)
        while (
            fit := next((one for one in waiting if self._can_join_ring(one, accepted)), "")
        ) != "":
            waiting.remove(fit)
            accepted.append(fit)
        return {
            peer: UnreachablePeer(peer, *next(self._failed_links(peer, accepted)))
            for peer in waiting
        }

    def _can_join_ring(self, peer: str, others: Sequence[str]) -> bool:
        return next(self._failed_links(peer, others), None) is None or self._has_ring(
            [*others, peer]
        )

    def _failed_links(self, peer: str, others: Sequence[str]) -> Iterator[tuple[str, str]]:
        """The connections between ``peer`` and ``others`` that can't be made."""
        pairs = (
            (source, target)
            for other in others
            for source, target in ((other, peer), (peer, other))
        )
        return (pair for pair in pairs if pair in self._failed)

    def _has_ring(self, peers: Sequence[str]) -> bool:
        """Whether there is a ring of all ``peers`` in which each can connect to the next one.

        And all to the first one, where requests go. One that takes too long to find is none.
        """
        self._steps_left = _MAX_STEPS
        return any(
            self._has_path(first, [one for one in peers if one != first])
            for first in peers
            if not any((one, first) in self._failed for one in peers)
        )

    def _has_path(self, at: str, others: Sequence[str]) -> bool:
        """Whether a way leads from ``at`` through all ``others``."""
        self._steps_left -= 1
        return not others or any(
            self._has_path(target, [one for one in others if one != target])
            for target in others
            if (at, target) not in self._failed and self._steps_left > 0
        )


def describe_unreachable(found: UnreachablePeer, registry: Registry) -> str:
    """Which connection can't be made, and the command that opens the port; for a person."""
    source, target = registry.name_of(found.source), registry.name_of(found.target)
    report = registry.sessions[found.target].report
    at = report.addresses[0] if report.addresses else "an address that it doesn't tell"
    return (
        f"{source} can't connect to {target} at {at} port {report.control_port}; on {target} "
        "open its "
        f"ports: {describe_firewall_fix(report)}"
    )


def describe_firewall_fix(report: PeerReport) -> str:
    """The command that opens a PC's ports, for a person; to be typed there."""
    tcp = [(report.control_port, report.control_port)]
    if report.worker_ports[1]:
        tcp.append(report.worker_ports)
    (first, *others) = firewall_commands(report.platform, tcp)
    if report.platform == "win32":
        return f"{first} (in PowerShell as administrator)"
    return f"{first} (or: {', '.join(others)})"


def firewall_commands(
    system: str, tcp: Sequence[tuple[int, int]], udp: Sequence[int] = ()
) -> tuple[str, ...]:
    """Commands that let others reach ranges of TCP ports, and UDP ports, on a PC.

    Windows needs all of them, as administrator; elsewhere each is for another firewall.
    ``system`` is as ``sys.platform`` has it.
    """
    ranges = [f"{first}-{last}" if last > first else str(first) for first, last in tcp]
    if system == "win32":
        rule = "New-NetFirewallRule -DisplayName molink -Direction Inbound -Protocol"
        return tuple(
            f"{rule} {kind} -LocalPort {','.join(ports)} -Action Allow"
            for kind, ports in (("TCP", ranges), ("UDP", [str(port) for port in udp]))
            if ports
        )
    both = [f"{one}/tcp" for one in ranges] + [f"{one}/udp" for one in udp]
    allowed = " && ".join(f"sudo ufw allow {one.replace('-', ':')}" for one in both)
    added = " ".join(f"--add-port={one}" for one in both)
    return allowed, f"sudo firewall-cmd {added}"
