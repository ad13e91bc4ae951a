"""Whether this PC's molink and the swarm's understand each other, and who is refused if not."""

from dataclasses import dataclass

import molink
from molink.wire.protocol import PROTOCOL

#: Who has not reported for so long, in seconds, is not refused any more, but away.
GONE_S = 5.0


@dataclass(frozen=True, slots=True)
class Spoken:
    """A version of molink, and the number of what it speaks (see :mod:`molink.wire.protocol`)."""

    version: str
    protocol: int

    def __str__(self) -> str:
        return f"molink {self.version or 'of an unknown version'} (protocol {self.protocol})"


def ours() -> Spoken:
    """What runs here."""
    return Spoken(molink.__version__, PROTOCOL)


def mismatch(pc: Spoken, swarm: Spoken) -> str:
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


class RefusedPeers:
    """Members that report, and may not take part because of what they speak."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[Spoken, float]] = {}

    def heard(self, peer: str, spoken: Spoken, now: float) -> bool:
        """A peer reports at ``now`` (monotonic seconds); whether it may take part."""
        if mismatch(spoken, ours()):
            self._seen[peer] = spoken, now
            return False
        self._seen.pop(peer, None)
        return True

    def at(self, now: float) -> dict[str, Spoken]:
        """Who is refused now, and what it speaks."""
        self._seen = {peer: seen for peer, seen in self._seen.items() if now - seen[1] <= GONE_S}
        return {peer: spoken for peer, (spoken, _) in self._seen.items()}
