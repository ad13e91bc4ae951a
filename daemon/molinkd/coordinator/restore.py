"""Opening the coordinator's state: this PC's own, or the copy of it that every peer keeps."""

import logging
import os
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

from molink.errors import DamagedState, StateError
from molink.files import patiently
from molink.swarm.controller.records import SwarmRecord
from molink.swarm.election.replica import MAX_BYTES, Replica, decode_replica
from molink.swarm.membership.hygiene import clean_name
from molink.wire.sockets.curve import KeyPair
from molinkd.coordinator.arguments import Options
from molinkd.coordinator.state import FILE, State

log = logging.getLogger(__name__)


def open_state(options: Options, keys: KeyPair) -> tuple[State, str]:
    """The state to go on from, and what a person should know of how it was got; else ``""``.

    The copy in ``options.replica`` takes the place of a state that is older, lost or damaged; a
    damaged file is moved aside.

    Raises:
        StateError: there is neither a state of the swarm nor a copy, or it can't be used.
    """
    replica = None if options.replica is None else read_replica(options.replica)
    if replica is not None and options.swarm and replica.swarm != options.swarm:
        replica = None
    damage = ""
    try:
        state = State.open(options.state)
    except DamagedState as error:
        if replica is None:
            raise
        kept = _move_aside(options.state / FILE)
        damage = f"{error}. It is now {kept.name}."
        state = State.open(options.state)
    try:
        return state, _bring_up_to_date(state, replica, keys, options, damage)
    except BaseException:
        state.close()
        raise


def _bring_up_to_date(
    state: State, replica: Replica | None, keys: KeyPair, options: Options, damage: str
) -> str:
    swarm = state.swarm()
    if replica is None:
        if swarm is None and options.swarm:
            raise StateError(
                f"the state of swarm {options.swarm} is gone: {state.path} is not there. Put a "
                "copy of it there, or the `replica.msgpack` of any PC of the swarm into "
                f"{options.state.parent}. To begin another swarm, run `molink leave --dissolve`."
            )
        return ""
    if swarm is not None and swarm.id == replica.swarm and state.version() >= replica.version:
        return ""
    state.restore(replica, keys.public)
    if not damage:
        if swarm is not None or not options.members:
            return ""  # another PC led before
        damage = f"{state.path} was not there."
    when = f"term {replica.term}, revision {replica.revision}"
    return f"{damage} The swarm goes on from the copy that this PC kept ({when})."


def read_replica(path: Path) -> Replica | None:
    """The copy of the state in a file; ``None`` if there is none that can be read."""
    try:
        if path.stat().st_size > MAX_BYTES:
            raise StateError(f"{path} is too long for a copy of a swarm's state")
        return decode_replica(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, StateError) as error:
        log.warning("%s can't be used: %s", path, error)
        return None


def _move_aside(path: Path) -> Path:
    aside = path.with_name(f"{path.name}.damaged-{time.strftime('%Y%m%d-%H%M%S')}")
    for suffix in ("-wal", "-shm", "-journal"):
        beside = path.with_name(path.name + suffix)
        patiently(partial(beside.unlink, missing_ok=True))
    patiently(partial(path.replace, aside))
    return aside


def swarm_of(state: State, keys: KeyPair, options: Options) -> SwarmRecord:
    """The swarm that the state holds; a new one if it holds none.

    Raises:
        StateError: it is that of a coordinator with another key, which has no daemon.
    """
    swarm = state.swarm()
    if swarm is None:
        name = clean_name(options.name, "molink")
        swarm = SwarmRecord(os.urandom(8).hex(), name, keys.public)
        state.create_swarm(swarm)
    if swarm.public_key != keys.public and options.leader:
        state.save_public_key(keys.public)  # its daemon tells the others
        swarm = replace(swarm, public_key=keys.public)
    if swarm.public_key != keys.public:
        raise StateError(
            f"{state.path} belongs to a coordinator with another key: restore the key file beside "
            "it, or delete both to begin a new swarm"
        )
    return swarm
