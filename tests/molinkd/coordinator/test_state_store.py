import contextlib
import copy
import sqlite3
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from molink.errors import InvariantError, StateError
from molink.facts.model import ModelFacts
from molink.facts.profile import Profile
from molink.swarm.controller.records import (
    DesiredModel,
    PipelineRecord,
    StageRecord,
    SwarmRecord,
)
from molink.swarm.election.replica import decode_replica
from molink.swarm.membership.membership_log import MembershipLog
from molink.wire.messages.instructions import PeerInfo
from molinkd.coordinator import state_store as module
from molinkd.coordinator.state_store import StateStore
from tests.support.membership import LogBuilder, TestPeer

PROFILE = Profile(decode=((1, 0.01), (4, 0.012)), prefill=((16, 0.02), (64, 0.04)), tile=16)
PEERS = [TestPeer(name=name) for name in "ab"]
KEYS = [one.keys for one in PEERS]
A, B = (one.peer for one in PEERS)
BUILT = LogBuilder(PEERS[0])
BUILT.admit(*PEERS)
SWARM = SwarmRecord(BUILT.log.swarm, "home", KEYS[0].public)


def changed(change: Callable[[LogBuilder], object]) -> MembershipLog:
    """A copy of the log with another entry."""
    built = copy.copy(BUILT)
    change(built)
    return built.log


FACTS = ModelFacts(
    name="toy", layers=6, layer_bytes=1, first_bytes=2, last_bytes=3, kv_bytes=4, max_model_len=5
)


@pytest.fixture
def state(tmp_path: Path) -> Iterator[StateStore]:
    with contextlib.closing(StateStore.open(tmp_path / "state")) as state:
        state.create_swarm(SWARM, BUILT.log)
        yield state


@contextlib.contextmanager
def reopened(state: StateStore) -> Iterator[StateStore]:
    state.close()
    with contextlib.closing(StateStore.open(state.path.parent)) as again:
        yield again


def pipeline(epoch: int = 1, id: str = "p1", **changes: int) -> PipelineRecord:
    stages = (StageRecord(A, (0, 3), 5468, 10, PROFILE), StageRecord(B, (3, 6)))
    return PipelineRecord(id, "toy", epoch, stages, **changes)


def test_restart_finds_everything(state: StateStore) -> None:
    announced = PeerInfo(
        peer=B, name="bob", public_key=KEYS[1].public, addresses=("::1",), control_port=7
    )
    state.save_port(5466)
    state.save_announced(announced)
    state.save_max_peers(3)
    log = changed(lambda built: built.invite(PEERS[1], uses=2))
    state.save_log(log)
    state.save_models((DesiredModel(FACTS, A, 3, "f32", 2),))
    state.commit_pipeline(pipeline())
    state.commit_pipeline(pipeline(epoch=2, formed=True, blocks=10, micro_batches=2))
    with reopened(state) as again:
        assert again.read_swarm() == replace(SWARM, port=5466, max_peers=3)
        assert again.read_log().entries == log.entries
        assert again.read_announced() == {B: announced}
        again.save_log(BUILT.log)
        assert again.read_log().entries == BUILT.log.entries, "an expired invitation is dropped"
        assert again.read_models() == (DesiredModel(FACTS, A, 3, "f32", 2),)
        assert again.read_pipelines() == (
            pipeline(epoch=2, formed=True, blocks=10, micro_batches=2),
        )
        assert again.last_numbers() == (1, 2)


def test_new_folder_is_empty(tmp_path: Path) -> None:
    with contextlib.closing(StateStore.open(tmp_path)) as state:
        assert state.read_swarm() is None
        assert state.read_log().entries == ()
        assert state.read_models() == ()
        assert state.read_pipelines() == ()
        assert state.last_numbers() == (0, 0)


OTHER = msgspec.structs.replace(FACTS, name="other")


def test_models_and_pipelines_are_stored(state: StateStore, tmp_path: Path) -> None:
    models = (
        DesiredModel(FACTS, A, replicas=2, applied=True),
        DesiredModel(OTHER, B, pins=((B, "1-6"),), applied=True),
    )
    stopped = (replace(models[0], stopped=True), models[1])
    state.save_models(models)
    state.commit_pipeline(pipeline())
    state.commit_pipeline(pipeline(epoch=2, id="p2", replica=1))
    other = replace(pipeline(epoch=3, id="p3"), model="other")
    state.commit_pipeline(other)
    # A pipeline of an older epoch may form after one of a newer epoch.
    state.commit_pipeline(pipeline(formed=True, blocks=10))
    assert state.last_numbers() == (3, 3)
    kept = {pipeline(formed=True, blocks=10), pipeline(epoch=2, id="p2", replica=1), other}
    with reopened(state) as again:
        assert again.read_models() == models
        assert set(again.read_pipelines()) == kept
        replica = decode_replica(again.to_replica().encode())
    with contextlib.closing(StateStore.open(tmp_path / "copy")) as copy:
        copy.restore_replica(replica, KEYS[1].public)
        assert copy.read_models() == models
        assert set(copy.read_pipelines()) == kept
        copy.save_models(stopped)
        assert copy.read_models() == stopped
        assert copy.read_pipelines() == (other,)
        copy.save_models(models)
        copy.commit_pipeline(pipeline(epoch=4, formed=True, blocks=10))
        # Excess pipelines and those of removed models are deleted.
        copy.save_models((DesiredModel(FACTS, A),))
        assert copy.read_pipelines() == (pipeline(epoch=4, formed=True, blocks=10),)
        copy.commit_pipeline(pipeline(epoch=5, id="p5"))
        assert copy.read_pipelines() == (pipeline(epoch=5, id="p5"),)


def test_placement_objective_is_stored(state: StateStore) -> None:
    wanted = DesiredModel(FACTS, A, objective="throughput", min_stages=3, kv_cache_dtype="int8")
    state.save_models((wanted,))
    with reopened(state) as again:
        assert again.read_models() == (wanted,)


def test_epochs_never_decrease(state: StateStore) -> None:
    state.save_models((DesiredModel(FACTS, A),))
    state.commit_pipeline(pipeline(epoch=5))
    with pytest.raises(InvariantError, match="epoch 4 after 5"):
        state.commit_pipeline(pipeline(epoch=4))
    assert state.read_pipelines() == (pipeline(epoch=5),)


def test_replaced_model_ends_the_pipeline_but_not_the_numbering(state: StateStore) -> None:
    state.save_models((DesiredModel(FACTS, A),))
    state.commit_pipeline(pipeline(epoch=5))
    state.save_models((DesiredModel(FACTS, B),))
    assert state.read_pipelines() != ()
    state.save_models((DesiredModel(FACTS, B, dtype="f32"),))
    assert state.read_pipelines() == ()
    state.commit_pipeline(pipeline(epoch=6, id="p2"))
    state.save_models((DesiredModel(FACTS, B, dtype="f32", quantize="nf4"),))
    assert state.read_pipelines() == ()
    assert state.read_models() == (DesiredModel(FACTS, B, dtype="f32", quantize="nf4"),)
    other = ModelFacts(
        name="x", layers=1, layer_bytes=1, first_bytes=1, last_bytes=1, kv_bytes=1, max_model_len=1
    )
    state.save_models((DesiredModel(other, B),))
    assert state.read_pipelines() == ()
    assert state.read_models() == (DesiredModel(other, B),)
    assert state.last_numbers() == (2, 6)


def test_failed_write_changes_nothing(state: StateStore) -> None:
    with pytest.raises(StateError):
        state.save_models((DesiredModel(FACTS, "nobody"),))
    assert state.read_models() == ()
    state.save_models((DesiredModel(FACTS, A),))


class FullDisk:
    """A database connection on which statements that begin with ``statement`` find a full disk."""

    def __init__(self, connection: sqlite3.Connection, statement: str, ends: bool) -> None:
        """``ends``: SQLite has rolled back by itself, which some errors cause."""
        self._connection, self._statement, self._ends = connection, statement, ends

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)

    def execute(self, statement: str, *values: Any) -> Any:
        if statement.startswith(self._statement):
            if self._ends:
                self._connection.execute("ROLLBACK")
            raise sqlite3.OperationalError("database or disk is full")
        return self._connection.execute(statement, *values)


@pytest.mark.parametrize("ends", [False, True])
@pytest.mark.parametrize("statement", ["UPDATE swarm SET term", "UPDATE swarm SET rev", "COMMIT"])
def test_a_full_disk_changes_nothing_and_is_reported(
    state: StateStore, statement: str, ends: bool
) -> None:
    """Once there is room again, writes succeed."""
    before, connection = state.to_replica().encode(), state._db
    state._db = FullDisk(connection, statement, ends)  # type: ignore[assignment]
    for _ in range(2):
        with pytest.raises(StateError, match=r"disk is full\. Is the disk full or read-only\?"):
            state.begin_term(1 << 16)
        assert state.to_replica().encode() == before
    state._db = connection
    state.begin_term(1 << 16)
    assert state.read_version()[0] == 1 << 16


def test_only_one_process_opens_the_state(
    state: StateStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    connect = sqlite3.connect
    monkeypatch.setattr(
        module.sqlite3, "connect", lambda p, **kw: connect(p, **{**kw, "timeout": 0})
    )
    with pytest.raises(StateError, match=r"another coordinator uses .*swarm\.sqlite"):
        StateStore.open(state.path.parent)


@pytest.mark.parametrize("version", [8, 99])
def test_other_formats_are_refused(state: StateStore, version: int) -> None:
    state._db.execute("UPDATE schema SET version = ?", (version,))
    state.close()
    with pytest.raises(StateError, match=f"has format {version}"):
        StateStore.open(state.path.parent)


@pytest.mark.parametrize("damage", ["text", "truncated", "foreign"])
def test_damaged_file_is_named(tmp_path: Path, damage: str) -> None:
    path = tmp_path / module.STATE_FILE
    StateStore.open(tmp_path).close()
    if damage == "text":
        path.write_bytes(b"not a database, but long enough to be looked at as if it were" * 40)
    elif damage == "truncated":
        path.write_bytes(path.read_bytes()[:5000])
    else:
        path.unlink()
        with contextlib.closing(sqlite3.connect(path)) as other:
            other.execute("CREATE TABLE songs (title TEXT)")
    with pytest.raises(StateError, match=r"swarm\.sqlite"):
        StateStore.open(tmp_path)


def test_reservation_only_takes_its_number(state: StateStore) -> None:
    state.save_models((DesiredModel(FACTS, A),))
    state.commit_pipeline(pipeline(epoch=5, formed=True))
    state.reserve_epoch("p2", 6)
    assert state.read_pipelines() == (pipeline(epoch=5, formed=True),)
    assert state.last_numbers() == (2, 6)
    with pytest.raises(InvariantError):
        state.commit_pipeline(pipeline(epoch=4, formed=True))


def test_replica_reproduces_the_state(state: StateStore, tmp_path: Path) -> None:
    announced = PeerInfo(
        peer=B, name="bob", public_key=KEYS[1].public, addresses=("::1",), control_port=7
    )
    state.save_announced(announced)
    state.save_log(changed(lambda built: built.invite(PEERS[0])))
    state.save_models((DesiredModel(FACTS, A, 3, "f32", 2),))
    state.commit_pipeline(pipeline(epoch=4, formed=True, blocks=10, micro_batches=2))
    replica = decode_replica(state.to_replica().encode())
    with contextlib.closing(StateStore.open(tmp_path / "other")) as other:
        other.restore_replica(replica, KEYS[1].public)
        assert other.to_replica().encode() == replica.encode()
        assert other.read_swarm() == replace(SWARM, public_key=KEYS[1].public)
        other.restore_replica(replica, KEYS[1].public)  # also over an existing state
        assert other.to_replica().encode() == replica.encode()


def test_changes_raise_the_revision_and_leaders_the_term(state: StateStore) -> None:
    term, revision = state.read_version()
    state.save_port(1)
    assert state.read_version() == (term, revision + 1)
    state.begin_term(0)
    assert state.read_version() == (0, revision + 1)
    state.begin_term(70000)
    assert state.read_lineage() == ((0, revision + 1),)
    assert state.read_version() == (70000, revision + 2)
    with pytest.raises(InvariantError, match="term 5 after 70000"):
        state.begin_term(5)
    with reopened(state) as again:
        assert again.read_version() == (70000, revision + 2)


def test_file_copy_is_complete(state: StateStore, tmp_path: Path) -> None:
    """The main database file, which errors name, contains all committed state."""
    state.save_log(changed(lambda built: built.leave(PEERS[1])))
    elsewhere = tmp_path / "copy"
    elsewhere.mkdir()
    (elsewhere / module.STATE_FILE).write_bytes(state.path.read_bytes())
    with contextlib.closing(StateStore.open(elsewhere)) as other:
        assert other.to_replica().encode() == state.to_replica().encode()
