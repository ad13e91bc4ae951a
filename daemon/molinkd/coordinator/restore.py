"""Opens the coordinator's state: this PC's own, or the replica that every peer keeps."""

import logging
import os
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

from molink.errors import DamagedState, StateError
from molink.files import retry_while_busy
from molink.swarm.controller.records import SwarmRecord
from molink.swarm.election.replica import Replica
from molink.swarm.membership.membership_log import MembershipLog
from molink.swarm.membership.sanitize import sanitize_name
from molink.wire.messages.membership import Founder, peer_of_key
from molink.wire.sockets.key_pair import KeyPair
from molinkd.coordinator.options import CoordinatorOptions
from molinkd.coordinator.replica_file import read_replica
from molinkd.coordinator.state_store import STATE_FILE, StateStore

log = logging.getLogger(__name__)


def open_state(options: CoordinatorOptions, keys: KeyPair) -> tuple[StateStore, str]:
    """Open the state; also returns a message for people if it was restored, else ``""``.

    The replica in ``options.replica`` replaces a state that is older, lost or damaged. A damaged
    file is moved aside.

    Raises:
        StateError: there is neither a usable state of the swarm nor a replica.
    """
    replica = None if options.replica is None else read_replica(options.replica)
    if replica is not None and options.swarm and replica.swarm != options.swarm:
        replica = None
    damage = ""
    try:
        state = StateStore.open(options.state)
    except DamagedState as error:
        if replica is None:
            raise
        aside = _move_aside(options.state / STATE_FILE)
        damage = f"{error}. It is now {aside.name}."
        state = StateStore.open(options.state)
    try:
        return state, _restore_newer(state, replica, keys, options, damage)
    except BaseException:
        state.close()
        raise


def _restore_newer(
    state: StateStore,
    replica: Replica | None,
    keys: KeyPair,
    options: CoordinatorOptions,
    damage: str,
) -> str:
    swarm = state.read_swarm()
    if replica is None:
        if swarm is None and options.swarm:
            raise StateError(
                f"the state of swarm {options.swarm} is gone: {state.path} is missing. Restore a "
                "copy of it, or put the `replica.msgpack` of any PC of the swarm into "
                f"{options.state.parent}. To start another swarm, run `molink leave --dissolve`."
            )
        return ""
    if swarm is not None and swarm.id == replica.swarm:
        own = state.read_log()
        merged = own.merge_log(replica.log)
        if state.read_version() >= replica.version:
            if merged.digest != own.digest:
                state.save_log(merged)
            return ""
        replica = replace(replica, log=merged)
    state.restore_replica(replica, keys.public)
    if not damage:
        if swarm is not None or not options.members:
            return ""  # another PC led before
        damage = f"{state.path} was missing."
    when = f"term {replica.term}, revision {replica.revision}"
    return f"{damage} The swarm was restored from this PC's replica ({when})."


def _move_aside(path: Path) -> Path:
    aside = path.with_name(f"{path.name}.damaged-{time.strftime('%Y%m%d-%H%M%S')}")
    for suffix in ("-wal", "-shm", "-journal"):
        journal = path.with_name(path.name + suffix)
        retry_while_busy(partial(journal.unlink, missing_ok=True))
    retry_while_busy(partial(path.replace, aside))
    return aside


def load_or_create_swarm(
    state: StateStore, keys: KeyPair, options: CoordinatorOptions
) -> SwarmRecord:
    """The swarm in the state, or a new one.

    Raises:
        StateError: it belongs to a standalone coordinator with another key.
    """
    swarm = state.read_swarm()
    if swarm is None:
        name = sanitize_name(options.name, "molink")
        members = options.members or ((keys.signer.verify_key, name),)
        founders = [Founder(key, sanitize_name(title, "?")) for key, title in members]
        log = MembershipLog.found_swarm(founders, os.urandom(16))
        swarm = SwarmRecord(log.swarm, name, keys.public)
        state.create_swarm(swarm, log)
    owners = state.read_log().owners
    for key, title in options.members:
        if peer_of_key(key) not in owners:
            raise StateError(
                f"{title} is no owner of this swarm: its peer.key is not the one that founded it. "
                "Restore that file, or run `molink leave --dissolve` and found another swarm"
            )
    if swarm.public_key != keys.public and options.leader:
        state.save_public_key(keys.public)  # its daemon tells the others
        swarm = replace(swarm, public_key=keys.public)
    if swarm.public_key != keys.public:
        raise StateError(
            f"{state.path} belongs to a coordinator with another key: restore the key file next to "
            "it, or delete both to begin a new swarm"
        )
    return swarm
