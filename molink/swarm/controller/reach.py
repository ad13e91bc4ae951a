"""Which peer can connect to which, as they have tried, and how a person opens a port."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from molink.swarm.controller.registry import Registry
from molink.wire.messages.reports import PeerReport

#: Steps of the search for an order in which peers can connect; most need one for each peer.
_STEPS = 2000
#: Answers that are kept: each deployment asks for its own.
_ANSWERS = 32


@dataclass(frozen=True, slots=True)
class Unreachable:
    """``peer`` gets no stage: ``by`` can't connect to ``to``; one of these two is the peer."""

    peer: str
    by: str
    to: str


class Reach:
    """What peers have found out about each other. What none has tried counts as possible."""

    def __init__(self) -> None:
        self._failed: set[tuple[str, str]] = set()
        self._steps = 0
        #: The last answers, by whom they were about: these are asked for after every event.
        self._answers: dict[tuple[str, ...], dict[str, Unreachable]] = {}

    def tried(self, by: str, to: str, ok: bool) -> None:
        """``by`` has tried to connect to ``to``."""
        if ok == ((by, to) not in self._failed):
            return  # as known; when a swarm starts, each peer tells this of all others
        self._answers.clear()
        if ok:
            self._failed.discard((by, to))
        else:
            self._failed.add((by, to))

    def forget(self, peer: str) -> None:
        """The peer is gone: whoever tried it then has learnt nothing about its ports."""
        self._answers.clear()
        self._failed = {pair for pair in self._failed if peer not in pair}

    @property
    def failed(self) -> bool:
        """Whether any connection can't be made."""
        return bool(self._failed)

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """Who has failed to connect to whom."""
        return sorted(self._failed)

    def blocked(self, peer: str) -> frozenset[str]:
        """Those to whom ``peer`` has failed to connect."""
        return frozenset(to for by, to in self._failed if by == peer)

    def left_out(self, peers: Iterable[str]) -> dict[str, Unreachable]:
        """Who of ``peers`` can't be in a ring with those before it, whatever its order is."""
        if not self._failed:
            return {}
        peers = tuple(peers)
        if peers not in self._answers:
            if len(self._answers) >= _ANSWERS:
                self._answers.clear()
            self._answers[peers] = self._left_out(peers)
        return self._answers[peers]

    def _left_out(self, peers: Sequence[str]) -> dict[str, Unreachable]:
        accepted: list[str] = []
        waiting = list(peers)
        while (fit := next((one for one in waiting if self._fits(one, accepted)), "")) != "":
            waiting.remove(fit)
            accepted.append(fit)
        return {peer: Unreachable(peer, *next(self._closed(peer, accepted))) for peer in waiting}

    def _fits(self, peer: str, others: Sequence[str]) -> bool:
        return next(self._closed(peer, others), None) is None or self._ring([*others, peer])

    def _closed(self, peer: str, others: Sequence[str]) -> Iterator[tuple[str, str]]:
        """The connections between ``peer`` and ``others`` that can't be made."""
        pairs = ((by, to) for other in others for by, to in ((other, peer), (peer, other)))
        return (pair for pair in pairs if pair in self._failed)

    def _ring(self, peers: Sequence[str]) -> bool:
        """Whether there is a ring of all ``peers`` in which each can connect to the next one.

        And all to the first one, where requests go. One that takes too long to find is none.
        """
        self._steps = _STEPS
        return any(
            self._way(first, [one for one in peers if one != first])
            for first in peers
            if not any((one, first) in self._failed for one in peers)
        )

    def _way(self, at: str, others: Sequence[str]) -> bool:
        """Whether a way leads from ``at`` through all ``others``."""
        self._steps -= 1
        return not others or any(
            self._way(to, [one for one in others if one != to])
            for to in others
            if (at, to) not in self._failed and self._steps > 0
        )


def closed(found: Unreachable, registry: Registry) -> str:
    """Which connection can't be made, and the command that opens the port; for a person."""
    by, to = registry.name(found.by), registry.name(found.to)
    report = registry.sessions[found.to].report
    at = report.addresses[0] if report.addresses else "an address that it doesn't tell"
    return (
        f"{by} can't connect to {to} at {at} port {report.control_port}; on {to} open its "
        f"ports: {how_to_open(report)}"
    )


def how_to_open(report: PeerReport) -> str:
    """The command that opens a PC's ports, for a person; to be typed there."""
    tcp = [(report.control_port, report.control_port)]
    if report.worker_ports[1]:
        tcp.append(report.worker_ports)
    (first, *others) = opening(report.system, tcp)
    if report.system == "win32":
        return f"{first} (in PowerShell as administrator)"
    return f"{first} (or: {', '.join(others)})"


def opening(
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
