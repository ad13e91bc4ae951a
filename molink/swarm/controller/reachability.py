"""Tracks which peers can connect to which others, and explains how users open ports."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from molink.swarm.controller.registry import Registry
from molink.wire.messages.peer_reports import PeerReport

#: Maximum steps of the search for a connectable order; most searches take one per peer.
_MAX_STEPS = 2000
#: Maximum cached answers; each deployment asks about its own peers.
_CACHE_SIZE = 32


@dataclass(frozen=True, slots=True)
class UnreachablePeer:
    """``peer`` (source or target) gets no stage: ``source`` cannot connect to ``target``."""

    peer: str
    source: str
    target: str


class Reachability:
    """Failed connections between peers. Untried connections count as possible."""

    def __init__(self) -> None:
        self._failed: set[tuple[str, str]] = set()
        self._steps_left = 0
        #: Recent results by peers, which are requested after every event.
        self._cache: dict[tuple[str, ...], dict[str, UnreachablePeer]] = {}

    def record_attempt(self, source: str, target: str, ok: bool) -> None:
        """Record that ``source`` has tried to connect to ``target``."""
        if ok == ((source, target) not in self._failed):
            return  # unchanged, like most reports at the start of a swarm
        self._cache.clear()
        if ok:
            self._failed.discard((source, target))
        else:
            self._failed.add((source, target))

    def drop_peer(self, peer: str) -> None:
        """Drop a peer that has left; failed attempts to it say nothing about its ports."""
        self._cache.clear()
        self._failed = {pair for pair in self._failed if peer not in pair}

    @property
    def has_failures(self) -> bool:
        """Whether any connection has failed."""
        return bool(self._failed)

    @property
    def failed_pairs(self) -> list[tuple[str, str]]:
        """Failed connections: source and target."""
        return sorted(self._failed)

    def unreachable_from(self, peer: str) -> frozenset[str]:
        """Return the peers to which ``peer`` failed to connect."""
        return frozenset(target for source, target in self._failed if source == peer)

    def find_unreachable(self, peers: Iterable[str]) -> dict[str, UnreachablePeer]:
        """Return the peers that fit no ring with the peers before them, in any order."""
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
        """Return the failed connections between ``peer`` and ``others``."""
        pairs = (
            (source, target)
            for other in others
            for source, target in ((other, peer), (peer, other))
        )
        return (pair for pair in pairs if pair in self._failed)

    def _has_ring(self, peers: Sequence[str]) -> bool:
        """Whether a ring of all ``peers`` exists in which each can connect to the next.

        All must also be able to connect to the first one, which receives requests. A search that
        takes too long fails.
        """
        self._steps_left = _MAX_STEPS
        return any(
            self._has_path(first, [one for one in peers if one != first])
            for first in peers
            if not any((one, first) in self._failed for one in peers)
        )

    def _has_path(self, at: str, others: Sequence[str]) -> bool:
        """Whether a path leads from ``at`` through all ``others``."""
        self._steps_left -= 1
        return not others or any(
            self._has_path(target, [one for one in others if one != target])
            for target in others
            if (at, target) not in self._failed and self._steps_left > 0
        )


def describe_unreachable(found: UnreachablePeer, registry: Registry) -> str:
    """Describe the failed connection, and the command that opens the port, for the user."""
    source, target = registry.name_of(found.source), registry.name_of(found.target)
    report = registry.sessions[found.target].report
    at = report.addresses[0] if report.addresses else "an unknown address"
    return (
        f"{source} can't connect to {target} at {at} port {report.control_port}; to open the "
        f"ports, run on {target}: {describe_firewall_fix(report)}"
    )


def describe_firewall_fix(report: PeerReport) -> str:
    """Return the command that opens a PC's ports, for its user to run."""
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
    """Return commands that open TCP port ranges and UDP ports in a PC's firewall.

    Windows needs all of them, as administrator; on other systems each is for a different firewall.
    ``system`` is ``sys.platform``.
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
