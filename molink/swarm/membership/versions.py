"""Protocol compatibility of the PCs in a swarm."""

from dataclasses import dataclass

import molink
from molink.wire.protocol import PROTOCOL

#: Seconds without a report after which an incompatible peer counts as offline.
REPORT_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class PeerVersion:
    """A version of molink and its protocol number (:mod:`molink.wire.protocol`)."""

    version: str
    protocol: int

    def __str__(self) -> str:
        return f"molink {self.version or 'of an unknown version'} (protocol {self.protocol})"


def own_version() -> PeerVersion:
    """Return the version that runs on this PC."""
    return PeerVersion(molink.__version__, PROTOCOL)


def explain_mismatch(pc: PeerVersion, swarm: PeerVersion) -> str:
    """Tell the user of ``pc`` why it is incompatible with the swarm; empty if it is not."""
    if pc.protocol == swarm.protocol:
        return ""
    older = "this PC" if pc.protocol < swarm.protocol else "the other PCs, the leading one last,"
    return (
        f"this PC runs {pc}, the swarm {swarm}; they are incompatible. Update "
        f"{older} with `molink update`, or in a clone with `git pull` and its installer"
    )


class IncompatiblePeers:
    """Members that report but are excluded because of their protocol."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[PeerVersion, float]] = {}

    def check_version(self, peer: str, peer_version: PeerVersion, now: float) -> bool:
        """Record a report; return whether the peer may take part. ``now`` is monotonic seconds."""
        if explain_mismatch(peer_version, own_version()):
            self._seen[peer] = peer_version, now
            return False
        self._seen.pop(peer, None)
        return True

    def list_active(self, now: float) -> dict[str, PeerVersion]:
        """List the versions of excluded peers that still report."""
        self._seen = {
            peer: seen for peer, seen in self._seen.items() if now - seen[1] <= REPORT_TIMEOUT_S
        }
        return {peer: version for peer, (version, _) in self._seen.items()}
