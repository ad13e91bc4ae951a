"""Which peer can connect to which, as they have tried, and how a person opens a port."""

from collections.abc import Iterable
from dataclasses import dataclass

from molink.wire.messages.reports import PeerReport


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

    def tried(self, by: str, to: str, ok: bool) -> None:
        """``by`` has tried to connect to ``to``."""
        if ok:
            self._failed.discard((by, to))
        else:
            self._failed.add((by, to))

    def forget(self, peer: str) -> None:
        """The peer is gone: whoever tried it then has learnt nothing about its ports."""
        self._failed = {pair for pair in self._failed if peer not in pair}

    def left_out(self, peers: Iterable[str]) -> dict[str, Unreachable]:
        """Who of ``peers`` can't be in a ring with those before it, by peer.

        All of a ring's stages have to reach their next one, whichever that will be.
        """
        if not self._failed:
            return {}
        accepted: list[str] = []
        found: dict[str, Unreachable] = {}
        for peer in peers:
            pairs = ((by, to) for other in accepted for by, to in ((other, peer), (peer, other)))
            failed = next((pair for pair in pairs if pair in self._failed), None)
            if failed is None:
                accepted.append(peer)
            else:
                found[peer] = Unreachable(peer, *failed)
        return found


def how_to_open(report: PeerReport) -> str:
    """The command that opens a PC's ports, for a person; to be typed there."""
    first, last = report.worker_ports
    ports = [str(report.control_port)]
    if last:
        ports.append(f"{first}-{last}" if last > first else str(first))
    if report.system == "win32":
        return (
            "New-NetFirewallRule -DisplayName molink -Direction Inbound -Protocol TCP "
            f"-LocalPort {','.join(ports)} -Action Allow (in PowerShell as administrator)"
        )
    allowed = " && ".join(f"sudo ufw allow {port.replace('-', ':')}/tcp" for port in ports)
    added = " ".join(f"--add-port={port}/tcp" for port in ports)
    return f"{allowed} (or: sudo firewall-cmd {added})"
