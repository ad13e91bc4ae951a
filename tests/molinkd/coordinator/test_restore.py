"""The state that a coordinator starts from."""

import contextlib
import copy
from dataclasses import replace
from pathlib import Path

import pytest

from molink.errors import DamagedState, StateError
from molink.swarm.controller.records import SwarmRecord
from molink.swarm.election.replica import Replica
from molink.swarm.membership.membership_log import MembershipLog
from molinkd.coordinator.options import CoordinatorOptions
from molinkd.coordinator.replica_file import read_replica
from molinkd.coordinator.restore import load_or_create_swarm, open_state
from molinkd.coordinator.state_store import STATE_FILE, StateStore
from tests.support.membership import LogBuilder, TestPeer

ME = TestPeer(name="me")
KEYS = ME.keys
BUILT = LogBuilder(ME)
SWARM = BUILT.log.swarm


def make_state(folder: Path, log: MembershipLog = BUILT.log) -> Replica:
    """Create a state with one member; returns its replica."""
    with contextlib.closing(StateStore.open(folder)) as state:
        state.create_swarm(SwarmRecord(log.swarm, "home", KEYS.public), log)
        return state.to_replica()


def options(root: Path, **more: object) -> CoordinatorOptions:
    values = {
        "swarm": SWARM,
        "leader": ME.peer,
        "members": ((KEYS.signer.verify_key, "me"),),
        **more,
    }
    return CoordinatorOptions(root / "state", replica=root / "replica.msgpack", **values)  # type: ignore[arg-type]


def opened(options: CoordinatorOptions) -> tuple[bytes, str]:
    state, said = open_state(options, KEYS)
    with contextlib.closing(state):
        return state.to_replica().encode(), said


def test_own_state_is_used_without_a_replica(tmp_path: Path) -> None:
    made = make_state(tmp_path / "state")
    assert opened(options(tmp_path)) == (made.encode(), "")


def test_lost_state_without_a_replica_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(StateError, match=r"the state of swarm \w+ is gone: .*replica\.msgpack"):
        open_state(options(tmp_path), KEYS)
    assert not list((tmp_path / "state").glob("*.damaged*"))


def test_lost_state_is_restored_from_the_replica(tmp_path: Path) -> None:
    made = make_state(tmp_path / "elsewhere")
    (tmp_path / "replica.msgpack").write_bytes(made.encode())
    found, said = opened(options(tmp_path))
    assert found == made.encode()
    assert said.endswith(
        f"{STATE_FILE} was missing. The swarm was restored from this PC's replica (term 0, "
        f"revision {made.revision})."
    )


def test_damaged_state_is_moved_aside(tmp_path: Path) -> None:
    made = make_state(tmp_path / "state")
    (tmp_path / "replica.msgpack").write_bytes(made.encode())
    file = tmp_path / "state" / STATE_FILE
    file.write_bytes(b"SQLite format 3\0" + b"smashed" * 1000)
    found, said = opened(options(tmp_path))
    assert found == made.encode()
    (aside,) = file.parent.glob(f"{STATE_FILE}.damaged-*")
    assert aside.name in said
    assert "restored from this PC's replica" in said


def test_damaged_state_without_a_replica_is_an_error(tmp_path: Path) -> None:
    make_state(tmp_path / "state")
    (tmp_path / "state" / STATE_FILE).write_bytes(b"SQLite format 3\0" + b"smashed" * 1000)
    with pytest.raises(DamagedState, match=r"replica\.msgpack"):
        open_state(options(tmp_path), KEYS)


@pytest.mark.parametrize("newer", ["state", "copy"])
def test_newer_of_state_and_replica_wins(tmp_path: Path, newer: str) -> None:
    made = make_state(tmp_path / "state")
    with contextlib.closing(StateStore.open(tmp_path / "state")) as state:
        if newer == "copy":
            state.begin_term(1 << 16)
        later = state.to_replica()
        if newer == "state":
            state.save_max_peers(7)
            made = state.to_replica()
    (tmp_path / "replica.msgpack").write_bytes(later.encode())
    if newer == "copy":
        (tmp_path / "state" / STATE_FILE).unlink()
        make_state(tmp_path / "state")
    wanted = made if newer == "state" else later
    assert opened(options(tmp_path)) == (wanted.encode(), "")


def test_replica_of_another_swarm_is_ignored(tmp_path: Path) -> None:
    made = make_state(tmp_path / "elsewhere", LogBuilder().log)
    (tmp_path / "replica.msgpack").write_bytes(made.encode())
    with pytest.raises(StateError, match="is gone"):
        open_state(options(tmp_path), KEYS)


@pytest.mark.parametrize("data", [b"", b"nonsense", bytes(1 << 20)])
def test_invalid_replica_is_ignored(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "replica.msgpack"
    assert read_replica(path) is None
    path.write_bytes(data)
    assert read_replica(path) is None


@pytest.mark.parametrize("newer", ["state", "replica"])
def test_no_entry_of_either_log_is_lost(tmp_path: Path, newer: str) -> None:
    made = make_state(tmp_path / "state")
    other = copy.copy(BUILT)
    other.admit(ME, TestPeer(name="late"))
    revision = 0 if newer == "state" else 99
    replica = replace(made, log=other.log, revision=revision)
    (tmp_path / "replica.msgpack").write_bytes(replica.encode())
    state, _ = open_state(options(tmp_path), KEYS)
    with contextlib.closing(state):
        assert state.read_log().digest == other.log.digest


def test_a_swarm_is_named_by_its_founding_and_owned_by_its_founder(tmp_path: Path) -> None:
    with contextlib.closing(StateStore.open(tmp_path)) as state:
        swarm = load_or_create_swarm(state, KEYS, options(tmp_path))
        log = MembershipLog.check_entries(swarm.id, state.read_log().entries)
        assert log.owners == {ME.peer}
        other = ((TestPeer().verify_key, "somebody"),)
        with pytest.raises(StateError, match="somebody is no owner"):
            load_or_create_swarm(state, KEYS, options(tmp_path, members=other))
