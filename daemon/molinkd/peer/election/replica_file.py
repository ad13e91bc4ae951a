"""The copy of the coordinator's state that this PC keeps on its disk."""

import logging
from pathlib import Path

from molink.errors import StateError
from molink.swarm.election.replica import Replica, Version, decode_replica
from molink.wire.sockets.secrets import write_secret_bytes
from molinkd.coordinator.restore import read_replica

log = logging.getLogger(__name__)


class ReplicaFile:
    """``replica.msgpack`` in the home of a daemon."""

    def __init__(self, path: Path, swarm: str | None) -> None:
        """``swarm`` is the one that the PC is a member of; a copy of another one's is no use."""
        self.path = path
        found = read_replica(path)
        self.replica: Replica | None = found if found is not None and found.swarm == swarm else None

    @property
    def version(self) -> Version:
        """How far the copy is; (0, 0) if there is none."""
        return (0, 0) if self.replica is None else self.replica.version

    @property
    def order(self) -> tuple[str, ...]:
        """Members in the order of succession."""
        return () if self.replica is None else self.replica.order

    def save_replica(self, data: bytes | memoryview, swarm: str) -> bool:
        """Keep what the coordinator sent; whether it is a copy of our swarm's state."""
        try:
            replica = decode_replica(data)
            if replica.swarm != swarm:
                raise StateError(f"it is of swarm {replica.swarm}")
        except StateError as error:
            log.warning("the coordinator sent a copy of its state that can't be used: %s", error)
            return False
        self.replica = replica
        try:
            write_secret_bytes(self.path, bytes(data))
        except OSError as error:
            log.warning("can't keep the copy of the swarm's state in %s: %s", self.path, error)
        return True
