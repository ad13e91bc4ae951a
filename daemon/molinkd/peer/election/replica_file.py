"""The replica of the coordinator's state on this PC's disk."""

import logging
from pathlib import Path

from molink.errors import StateError
from molink.swarm.election.replica import Replica, Version, decode_replica
from molink.wire.sockets.secrets import write_secret_bytes
from molinkd.coordinator.restore import read_replica

log = logging.getLogger(__name__)


class ReplicaFile:
    """``replica.msgpack`` in a daemon's home."""

    def __init__(self, path: Path, swarm: str | None) -> None:
        """A replica of another swarm than ``swarm`` is ignored."""
        self.path = path
        found = read_replica(path)
        self.replica: Replica | None = found if found is not None and found.swarm == swarm else None

    @property
    def version(self) -> Version:
        """Version of the replica; (0, 0) without one."""
        return (0, 0) if self.replica is None else self.replica.version

    @property
    def order(self) -> tuple[str, ...]:
        """Peers in the order of succession."""
        return () if self.replica is None else self.replica.order

    def save_replica(self, data: bytes | memoryview, swarm: str) -> bool:
        """Store a replica; returns whether it is valid and of ``swarm``."""
        try:
            replica = decode_replica(data)
            if replica.swarm != swarm:
                raise StateError(f"it belongs to swarm {replica.swarm}")
        except StateError as error:
            log.warning("the coordinator sent an invalid replica of its state: %s", error)
            return False
        self.replica = replica
        try:
            write_secret_bytes(self.path, bytes(data))
        except OSError as error:
            log.warning("can't store the replica of the swarm's state in %s: %s", self.path, error)
        return True
