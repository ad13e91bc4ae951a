"""Schema of the coordinator's state file, and the errors of opening one."""

import sqlite3
from pathlib import Path

from molink.errors import DamagedState, StateError

SCHEMA_VERSION = 10
#: Statements that turn a format into the next one. Formats before the first one are refused.
UPGRADES = {9: ("ALTER TABLE models ADD COLUMN kv_cache_dtype TEXT NOT NULL DEFAULT 'auto'",)}

#: ``profile`` is msgpack of :class:`molink.facts.profile.Profile`.
_STAGES = """CREATE TABLE stages (
    pipeline TEXT NOT NULL REFERENCES pipelines (id) ON DELETE CASCADE, stage INTEGER NOT NULL,
    peer TEXT NOT NULL REFERENCES members (peer), first INTEGER NOT NULL, last INTEGER NOT NULL,
    port INTEGER NOT NULL, max_blocks INTEGER NOT NULL, profile BLOB NOT NULL,
    PRIMARY KEY (pipeline, stage)
)
"""
_SCHEMA = """
CREATE TABLE schema (version INTEGER NOT NULL);
CREATE TABLE swarm (
    id TEXT PRIMARY KEY, name TEXT NOT NULL, public_key TEXT NOT NULL, created REAL NOT NULL,
    port INTEGER NOT NULL DEFAULT 0,
    last_pipeline INTEGER NOT NULL DEFAULT 0, last_epoch INTEGER NOT NULL DEFAULT 0,
    max_peers INTEGER NOT NULL DEFAULT 64, term INTEGER NOT NULL DEFAULT 0,
    revision INTEGER NOT NULL DEFAULT 0, lineage BLOB NOT NULL DEFAULT X'90'
);
CREATE TABLE log (
    ordinal INTEGER PRIMARY KEY AUTOINCREMENT, hash TEXT NOT NULL UNIQUE, body BLOB NOT NULL,
    signature BLOB NOT NULL
);
CREATE TABLE members (peer TEXT PRIMARY KEY, announced BLOB);
CREATE TABLE models (
    name TEXT PRIMARY KEY, facts BLOB NOT NULL, source TEXT NOT NULL REFERENCES members (peer),
    min_peers INTEGER NOT NULL, dtype TEXT NOT NULL, micro_batches INTEGER NOT NULL,
    quantize TEXT NOT NULL DEFAULT 'none', objective TEXT NOT NULL DEFAULT 'latency',
    min_stages INTEGER NOT NULL DEFAULT 0, replicas INTEGER NOT NULL DEFAULT 1,
    pins BLOB NOT NULL DEFAULT X'90', applied INTEGER NOT NULL DEFAULT 0,
    stopped INTEGER NOT NULL DEFAULT 0, kv_cache_dtype TEXT NOT NULL DEFAULT 'auto'
);
CREATE TABLE pipelines (
    id TEXT PRIMARY KEY, model TEXT NOT NULL REFERENCES models (name) ON DELETE CASCADE,
    epoch INTEGER NOT NULL, formed INTEGER NOT NULL, blocks INTEGER NOT NULL,
    micro_batches INTEGER NOT NULL, block_size INTEGER NOT NULL DEFAULT 16,
    replica INTEGER NOT NULL DEFAULT 0
);
"""


def prepare_database(connection: sqlite3.Connection, path: Path) -> None:
    """Configure the connection, check the file, and create the tables of a new one.

    A file of a former format is upgraded; a copy stays beside it, for the molink that wrote it.

    Raises:
        StateError: its format is newer, or too old.
    """
    for pragma in (
        "locking_mode = EXCLUSIVE",
        "journal_mode = DELETE",  # the file alone is a complete copy
        "synchronous = FULL",
        "foreign_keys = ON",
    ):
        connection.execute(f"PRAGMA {pragma}")
    connection.execute("BEGIN IMMEDIATE")
    tables = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
    if tables == 0:
        for statement in (*_SCHEMA.split(";"), _STAGES):
            connection.execute(statement)
        connection.execute("INSERT INTO schema VALUES (?)", (SCHEMA_VERSION,))
    connection.execute("COMMIT")
    damage = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
    if damage != "ok":
        raise sqlite3.DatabaseError(damage)
    (version,) = connection.execute("SELECT version FROM schema").fetchone() or (0,)
    if version in UPGRADES:
        upgrade_database(connection, path, version)
    elif version != SCHEMA_VERSION:
        raise StateError(
            f"{path} has format {version}, but this molink needs {SCHEMA_VERSION}: run the molink "
            "that wrote it, or move the file away"
        )


def upgrade_database(connection: sqlite3.Connection, path: Path, version: int) -> None:
    """Copy the file to ``PATH.VERSION``, then bring it to the present format, or leave it alone."""
    copy = path.with_name(f"{path.name}.{version}")
    copy.unlink(missing_ok=True)
    connection.execute("VACUUM INTO ?", (str(copy),))
    connection.execute("BEGIN IMMEDIATE")
    try:
        for former in range(version, SCHEMA_VERSION):
            for statement in UPGRADES[former]:
                connection.execute(statement)
        connection.execute("UPDATE schema SET version = ?", (SCHEMA_VERSION,))
        connection.execute("COMMIT")
    except BaseException:
        connection.execute("ROLLBACK")
        raise


def translate_error(error: Exception, path: Path) -> StateError:
    """The user-facing error for one of SQLite's."""
    if isinstance(error, StateError):
        return error
    if isinstance(error, sqlite3.OperationalError) and "locked" in str(error):
        return StateError(f"another coordinator uses {path}: stop it, or choose another folder")
    if isinstance(error, sqlite3.OperationalError):
        return StateError(f"can't use {path}: {error}. Is the disk full or read-only?")
    return DamagedState(
        f"{path} is damaged ({error}): replace it by a copy, or move it away. Without it, molink "
        "uses the replica that each PC keeps (`replica.msgpack`)"
    )
