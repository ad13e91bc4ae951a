"""Whether this PC's molink and the swarm's understand each other, and who is refused if not."""

from dataclasses import dataclass

import molink
from molink.wire.protocol import PROTOCOL

#: Who has not reported for so long, in seconds, is not refused any more, but away.
REPORT_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class PeerVersion:
    """A version of molink, and the number of what it speaks (see :mod:`molink.wire.protocol`)."""

    version: str
    protocol: int

    def __str__(self) -> str:
        return f"molink {self.version or 'of an unknown version'} (protocol {self.protocol})"


def own_version() -> PeerVersion:
    """What runs here."""
    return PeerVersion(molink.__version__, PROTOCOL)


def explain_mismatch(pc: PeerVersion, swarm: PeerVersion) -> str:
    """Why ``pc`` can't be in a swarm whose coordinator speaks ``swarm``; empty if it can.

    It is for a person at that PC.
    """
    if pc.protocol == swarm.protocol:
        return ""
    older = "this PC" if pc.protocol < swarm.protocol else "the other PCs, the leading one last,"
    return (
        f"this PC runs {pc}, and the swarm {swarm}: they don't understand each other. Update "
        f"{older} with `git pull` and `./install.sh` (Windows: install.ps1) in molink's folder"
    )


class IncompatiblePeers:
    """Members that report, and may not take part because of what they speak."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[PeerVersion, float]] = {}

    def check_version(self, peer: str, peer_version: PeerVersion, now: float) -> bool:
        """A peer reports at ``now`` (monotonic seconds); whether it may take part."""
        if explain_mismatch(peer_version, own_version()):
            self._seen[peer] = peer_version, now
            return False
        self._seen.pop(peer, None)
        return True

    def list_active(self, now: float) -> dict[str, PeerVersion]:
        """Who is refused now, and what it speaks."""
        self._seen = {
            peer: seen for peer, seen in self._seen.items() if now - seen[1] <= REPORT_TIMEOUT_S
        }
        return {peer: peer_version for peer, (peer_version, _) in self._seen.items()}
