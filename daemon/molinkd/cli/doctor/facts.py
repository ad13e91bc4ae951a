"""What ``molink doctor`` finds out, and what it concludes: plain values, no I/O.

Texts of other programs and PCs are in here as they came; who prints them cleans them.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from molinkd.peer.agent.kernel_self_test import SelfTestResult

Level = Literal["ok", "warning", "problem"]
#: What ``--fix`` can do: nothing that takes rights, opens anything, or loses what is needed.
Fix = Literal["restrict-folder", "set-aside-options"]


@dataclass(frozen=True, slots=True)
class Finding:
    """The outcome of one check, in words; ``commands`` mend it, or are a first step."""

    check: str
    level: Level
    text: str
    commands: tuple[str, ...] = ()
    fix: Fix | None = None


@dataclass(frozen=True, slots=True)
class NvidiaCard:
    """What ``nvidia-smi`` says. ``cuda`` is the latest version that the driver is for."""

    names: tuple[str, ...] = ()
    driver: str = ""
    cuda: str = ""
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFacts:
    """Python, torch and the GPU. ``card`` is ``None`` where there is no ``nvidia-smi``.

    ``is_plugged_in``: whether an NVIDIA card is plugged in; ``None`` if that can't be seen.
    """

    system: str
    test: SelfTestResult
    configured_device: str = "auto"
    card: NvidiaCard | None = None
    is_plugged_in: bool | None = None


@dataclass(frozen=True, slots=True)
class PortFact:
    """A port that molink would listen on. ``used_by`` says by whom, or why it can't be had."""

    setting: str
    port: int
    used_by: str = ""
    is_reserved: bool = False


@dataclass(frozen=True, slots=True)
class PeerFact:
    """A member of the swarm, as the coordinator knows it."""

    id: str
    name: str
    version: str = ""
    address: str = ""
    is_online: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class SwarmFacts:
    """The swarm by ``molink status``; there is none of these facts where no daemon runs.

    ``clock_offset_s`` is how many seconds this PC's clock is ahead of the one that leads, give or
    take ``clock_error_s``; ``None`` if that isn't known. ``unreachable`` are pairs of ids: who
    can't reach whom; ``relayed`` says who reaches whom by way of whom; ``model`` is what is served.
    """

    id: str
    own_id: str = ""
    leader: str = ""
    pairing_port: int = 0
    trouble: str = ""
    peers: tuple[PeerFact, ...] = ()
    unreachable: tuple[tuple[str, str], ...] = ()
    relayed: tuple[tuple[str, str, str], ...] = ()
    model: str = ""
    clock_offset_s: float | None = None
    clock_error_s: float = 0.0

    def peer_name(self, peer: str) -> str:
        """What a member is called."""
        return next((one.name for one in self.peers if one.id == peer), peer)

    @property
    def others(self) -> tuple[PeerFact, ...]:
        """All members but this PC."""
        return tuple(one for one in self.peers if one.id != self.own_id)


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkFacts:
    """How others reach this PC.

    ``firewall`` is the one that runs here, empty if none was seen; ``has_firewall_rule`` whether it
    has a rule of ours. ``wsl`` is the network of WSL 2 (``nat``, ``mirrored`` …), empty outside of
    it. ``announced_swarms`` are the ids of swarms that are announced, ``multicast_error`` says why
    none could be heard.
    """

    system: str
    host: str = "0.0.0.0"
    advertise: tuple[str, ...] = ()
    addresses: tuple[str, ...] = ()
    ports: tuple[PortFact, ...] = ()
    control_port: int = 5467
    worker_ports: tuple[int, int] = (5468, 5479)
    coordinator_port: int = 5466
    pairing_port: int = 5479
    firewall: str = ""
    has_firewall_rule: bool | None = None
    wsl: str = ""
    discovery: bool = True
    interfaces: tuple[str, ...] = ()
    announced_swarms: tuple[str, ...] = ()
    multicast_error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFacts:
    """The state folder, the disk, and whether this PC may fall asleep. Sizes in bytes.

    ``write_error`` says why the folder can't be used; ``is_open_to_others`` that other users can
    read it; ``options_error`` why the options of the last start can't be read.
    """

    system: str
    home: Path
    user: str = ""
    write_error: str = ""
    is_open_to_others: bool = False
    options_error: str = ""
    free_bytes: int = 0
    model_bytes: int = 0
    year: int = 2026
    keep_awake: bool = True
    has_inhibitor: bool = True
    on_battery: bool = False
    version: str = ""
    trouble: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorFacts:
    """All of them. ``daemon_pid`` is the process id of the daemon that runs here, 0 if none
    does."""

    device: DeviceFacts
    network: NetworkFacts
    host: HostFacts
    daemon_pid: int = 0
    swarm: SwarmFacts | None = field(default=None)
