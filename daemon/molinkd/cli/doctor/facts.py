"""Facts and findings of ``molink doctor``: plain values, no I/O.

Texts of other programs and PCs are stored as received; sanitize them for output.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from molinkd.peer.agent.kernel_self_test import SelfTestResult

Level = Literal["ok", "warning", "problem"]
#: Fixes for ``--fix``: they need no privileges, open nothing, and lose no data.
Fix = Literal["restrict-folder", "set-aside-options"]


@dataclass(frozen=True, slots=True)
class Finding:
    """The outcome of one check; ``commands`` fix it or are a first step."""

    check: str
    level: Level
    text: str
    commands: tuple[str, ...] = ()
    fix: Fix | None = None


@dataclass(frozen=True, slots=True)
class NvidiaCard:
    """Output of ``nvidia-smi``. ``cuda`` is the newest version that the driver supports."""

    names: tuple[str, ...] = ()
    driver: str = ""
    cuda: str = ""
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFacts:
    """Python, torch and the GPU. ``card`` is ``None`` without ``nvidia-smi``.

    ``is_plugged_in``: an NVIDIA GPU is on the PCI bus; ``None`` if unknown.
    """

    system: str
    test: SelfTestResult
    configured_device: str = "auto"
    card: NvidiaCard | None = None
    is_plugged_in: bool | None = None


@dataclass(frozen=True, slots=True)
class PortFact:
    """A port that molink uses. ``used_by`` is the program that has it, or the error."""

    setting: str
    port: int
    used_by: str = ""
    is_reserved: bool = False


@dataclass(frozen=True, slots=True)
class PeerFact:
    """A peer, as the coordinator knows it."""

    id: str
    name: str
    version: str = ""
    address: str = ""
    is_online: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class SwarmFacts:
    """The swarm by ``molink status``; absent if no daemon runs.

    ``clock_offset_s`` is how far this PC's clock is ahead of the leader's, within
    ``clock_error_s``; ``None`` if unknown. ``unreachable`` are pairs of ids (source, target);
    ``relayed`` are triples (source, target, relay) of connections that stay with their relay, and
    ``punched`` pairs that leave it; ``model`` is the served model. ``router`` is the kind of this
    PC's router, ``forwarded`` the address whose ports it forwards, by the protocol
    ``forwarded_by``, ``not_forwarded`` why it doesn't.
    """

    id: str
    own_id: str = ""
    leader: str = ""
    pairing_port: int = 0
    trouble: str = ""
    peers: tuple[PeerFact, ...] = ()
    unreachable: tuple[tuple[str, str], ...] = ()
    relayed: tuple[tuple[str, str, str], ...] = ()
    punched: tuple[tuple[str, str], ...] = ()
    router: str = ""
    forwarded: str = ""
    forwarded_by: str = ""
    not_forwarded: str = ""
    model: str = ""
    clock_offset_s: float | None = None
    clock_error_s: float = 0.0

    def peer_name(self, peer: str) -> str:
        """Return the name of a peer."""
        return next((one.name for one in self.peers if one.id == peer), peer)

    @property
    def others(self) -> tuple[PeerFact, ...]:
        """All peers but this PC."""
        return tuple(one for one in self.peers if one.id != self.own_id)


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkFacts:
    """How others reach this PC.

    ``firewall`` is the active firewall, empty if none was found; ``has_firewall_rule`` tells
    whether it has a rule for molink. ``wsl`` is the networking mode of WSL 2 (``nat``, ``mirrored``
    …), empty outside of it. ``announced_swarms`` are the ids of discovered swarms;
    ``multicast_error`` is why discovery failed.
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
    """The state folder, the disk, and power. Sizes in bytes.

    ``write_error`` is why the state folder can't be written; ``is_open_to_others``: other users can
    read it; ``options_error`` is why the saved options can't be read.
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
    """All facts. ``daemon_pid`` is the process id of the daemon here, 0 if none runs."""

    device: DeviceFacts
    network: NetworkFacts
    host: HostFacts
    daemon_pid: int = 0
    swarm: SwarmFacts | None = field(default=None)
