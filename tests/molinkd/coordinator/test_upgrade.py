"""A state of an earlier format is converted to the current one, and the original is kept."""

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from molink.errors import StateError
from molink.swarm.election.replica import decode_replica
from molinkd.coordinator import schema
from molinkd.coordinator.schema import SCHEMA_VERSION, UPGRADES
from molinkd.coordinator.state_store import STATE_FILE, StateStore
from molinkd.peer.membership.membership_record import read_membership
from molinkd.peer.settings import read_options
from tests.support.former_state import FORMAT, SWARM, restore_home


def columns(path: Path) -> dict[str, set[tuple[object, ...]]]:
    """The columns of each table with type, constraints and default."""
    with closing(sqlite3.connect(path)) as connection:
        tables = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
        return {
            table: {row[1:] for row in connection.execute(f"PRAGMA table_info({table})")}
            for (table,) in tables.fetchall()
        }


def read_format(path: Path) -> int:
    with closing(sqlite3.connect(path)) as connection:
        return int(connection.execute("SELECT version FROM schema").fetchone()[0])


def test_state_of_the_former_format_is_upgraded(tmp_path: Path) -> None:
    home = restore_home(tmp_path / "home")
    file = home.coordinator / STATE_FILE
    before = file.read_bytes()
    state = StateStore.open(home.coordinator)
    swarm = state.read_swarm()
    (model,) = state.read_models()
    (pipeline,) = state.read_pipelines()
    (peer,) = state.read_announced().values()
    members = state.read_log().members
    state.close()
    assert swarm is not None
    assert (swarm.id, swarm.name) == (SWARM, "desk")
    assert (model.facts.name, model.kv_cache_dtype) == ("molink-demo", "auto")
    assert [stage.layers for stage in pipeline.stages] == [(0, 8)]
    assert list(members) == [peer.peer] == [stage.peer for stage in pipeline.stages]
    assert file.read_bytes() != before
    assert read_format(file) == SCHEMA_VERSION
    assert read_format(file.with_name(f"{STATE_FILE}.{FORMAT}")) == FORMAT
    StateStore.open(home.coordinator).close()


def test_an_upgraded_file_has_the_columns_of_a_new_one(tmp_path: Path) -> None:
    home = restore_home(tmp_path / "home")
    for folder in (home.coordinator, tmp_path / "new"):
        StateStore.open(folder).close()
    assert columns(home.coordinator / STATE_FILE) == columns(tmp_path / "new" / STATE_FILE)


def test_files_beside_it_are_still_read(tmp_path: Path) -> None:
    home = restore_home(tmp_path / "home")
    member = read_membership(home.membership)
    assert member is not None
    assert (member.swarm, member.is_founder, member.model) == (SWARM, True, "molink-demo")
    assert read_options(home.options) == {"host": "127.0.0.1", "max_model_len": 1024}
    replica = decode_replica(home.replica.read_bytes())
    assert (replica.swarm, [one.facts.name for one in replica.models]) == (SWARM, ["molink-demo"])


def test_a_failed_upgrade_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = restore_home(tmp_path / "home")
    before = columns(home.coordinator / STATE_FILE)
    monkeypatch.setitem(schema.UPGRADES, FORMAT, (*UPGRADES[FORMAT], "UPDATE nowhere SET x = 1"))
    with pytest.raises(StateError, match="nowhere"):
        StateStore.open(home.coordinator)
    assert read_format(home.coordinator / STATE_FILE) == FORMAT
    assert columns(home.coordinator / STATE_FILE) == before
