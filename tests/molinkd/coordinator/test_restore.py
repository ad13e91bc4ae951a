"""The state that a coordinator starts from."""

import contextlib
from pathlib import Path

import pytest

from molink.errors import DamagedState, StateError
from molink.facts.identity import derive_peer_id
from molink.swarm.controller.records import MemberRecord, SwarmRecord
from molink.swarm.election.replica import Replica
from molink.wire.sockets.key_pair import KeyPair
from molinkd.coordinator.options import CoordinatorOptions
from molinkd.coordinator.restore import open_state, read_replica
from molinkd.coordinator.state_store import STATE_FILE, StateStore

KEYS = KeyPair.generate()
OTHER = KeyPair.generate()
ME = MemberRecord(derive_peer_id(KEYS.public), KEYS.public, "me", is_owner=True)


def make_state(folder: Path, swarm: str = "s1") -> Replica:
    """Create a state with one member; returns its replica."""
    with contextlib.closing(StateStore.open(folder)) as state:
        state.create_swarm(SwarmRecord(swarm, "home", KEYS.public))
        state.save_member(ME)
        return state.to_replica()


def options(root: Path, **more: object) -> CoordinatorOptions:
    values = {"swarm": "s1", "leader": ME.peer, "members": ((KEYS.public, "me"),), **more}
    return CoordinatorOptions(root / "state", replica=root / "replica.msgpack", **values)  # type: ignore[arg-type]


def opened(options: CoordinatorOptions) -> tuple[Replica, str]:
    state, said = open_state(options, KEYS)
    with contextlib.closing(state):
        return state.to_replica(), said


def test_own_state_is_used_without_a_replica(tmp_path: Path) -> None:
    made = make_state(tmp_path / "state")
    assert opened(options(tmp_path)) == (made, "")


def test_lost_state_without_a_replica_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(StateError, match=r"the state of swarm s1 is gone: .*replica\.msgpack"):
        open_state(options(tmp_path), KEYS)
    assert not list((tmp_path / "state").glob("*.damaged*"))


def test_lost_state_is_restored_from_the_replica(tmp_path: Path) -> None:
    made = make_state(tmp_path / "elsewhere")
    (tmp_path / "replica.msgpack").write_bytes(made.encode())
    found, said = opened(options(tmp_path))
    assert found == made
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
    assert found == made
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
            state.save_standing(ME.peer, "left")
            made = state.to_replica()
    (tmp_path / "replica.msgpack").write_bytes(later.encode())
    if newer == "copy":
        (tmp_path / "state" / STATE_FILE).unlink()
        make_state(tmp_path / "state")
    assert opened(options(tmp_path)) == (made if newer == "state" else later, "")


def test_replica_of_another_swarm_is_ignored(tmp_path: Path) -> None:
    made = make_state(tmp_path / "elsewhere", "s2")
    (tmp_path / "replica.msgpack").write_bytes(made.encode())
    with pytest.raises(StateError, match="is gone"):
        open_state(options(tmp_path), KEYS)


@pytest.mark.parametrize("data", [b"", b"nonsense", bytes(1 << 20)])
def test_invalid_replica_is_ignored(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "replica.msgpack"
    assert read_replica(path) is None
    path.write_bytes(data)
    assert read_replica(path) is None
