"""Reads a replica's file, without the imports that the coordinator's own state needs."""

import logging
from pathlib import Path

from molink.errors import StateError
from molink.swarm.election.replica import MAX_REPLICA_BYTES, Replica, decode_replica

log = logging.getLogger(__name__)


def read_replica(path: Path) -> Replica | None:
    """Read a replica from a file; ``None`` if it is missing or invalid."""
    try:
        if path.stat().st_size > MAX_REPLICA_BYTES:
            raise StateError(f"{path} is too long for a replica")
        return decode_replica(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, StateError) as error:
        log.warning("%s can't be used: %s", path, error)
        return None
