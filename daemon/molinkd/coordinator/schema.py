"""The tables of the coordinator's state file, and what can be wrong with such a file."""

import sqlite3
from pathlib import Path

from molink.errors import DamagedState, StateError

SCHEMA_VERSION = 7

#: ``profile`` is msgpack of :class:`molink.facts.profile.Profile`.
_STAGES = """CREATE TABLE stages (
    pipeline TEXT NOT NULL REFERENCES pipelines (id) ON DELETE CASCADE, stage INTEGER NOT NULL,
    peer TEXT NOT NULL REFERENCES members (peer), first INTEGER NOT NULL, last INTEGER NOT NULL,
    port INTEGER NOT NULL, max_blocks INTEGER NOT NULL, profile BLOB NOT NULL,
    PRIMARY KEY (pipeline, stage)
)
"""
#: Who has joined by which invitation.
_USES = """CREATE TABLE invitation_uses (
    invitation TEXT NOT NULL REFERENCES invitations (id) ON DELETE CASCADE,
    peer TEXT NOT NULL REFERENCES members (peer), used REAL NOT NULL,
    PRIMARY KEY (invitation, peer)
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
CREATE TABLE members (
    ordinal INTEGER PRIMARY KEY AUTOINCREMENT, peer TEXT NOT NULL UNIQUE,
    public_key TEXT NOT NULL UNIQUE, name TEXT NOT NULL, owner INTEGER NOT NULL,
    standing TEXT NOT NULL CHECK (standing IN ('member', 'left', 'revoked')),
    joined REAL NOT NULL, announced BLOB, invitation TEXT NOT NULL DEFAULT ''
);
CREATE TABLE invitations (
    id TEXT PRIMARY KEY, public_key TEXT NOT NULL UNIQUE, created REAL NOT NULL,
    expires INTEGER NOT NULL, creator TEXT NOT NULL REFERENCES members (peer),
    uses INTEGER NOT NULL DEFAULT 1
);
CREATE TABLE models (
    name TEXT PRIMARY KEY, facts BLOB NOT NULL, source TEXT NOT NULL REFERENCES members (peer),
    min_peers INTEGER NOT NULL, dtype TEXT NOT NULL, micro_batches INTEGER NOT NULL,
    quantize TEXT NOT NULL DEFAULT 'none', objective TEXT NOT NULL DEFAULT 'latency',
    min_stages INTEGER NOT NULL DEFAULT 0, replicas INTEGER NOT NULL DEFAULT 1,
    pins BLOB NOT NULL DEFAULT X'90', applied INTEGER NOT NULL DEFAULT 0,
    stopped INTEGER NOT NULL DEFAULT 0
);
CREATE TABLE pipelines (
    id TEXT PRIMARY KEY, model TEXT NOT NULL REFERENCES models (name) ON DELETE CASCADE,
    epoch INTEGER NOT NULL, formed INTEGER NOT NULL, blocks INTEGER NOT NULL,
    micro_batches INTEGER NOT NULL, block_size INTEGER NOT NULL DEFAULT 16,
    replica INTEGER NOT NULL DEFAULT 0
);
"""

#: What makes a file of each version one of the next: an older molink's state goes on.
_MIGRATIONS: dict[int, tuple[str, ...]] = {
    1: (
        "ALTER TABLE models ADD COLUMN quantize TEXT NOT NULL DEFAULT 'none'",
        "ALTER TABLE stages RENAME TO stages_1",
        _STAGES,
        "INSERT INTO stages SELECT pipeline, stage, peer, first, last, port, max_blocks, X'80' "
        "FROM stages_1",
        "DROP TABLE stages_1",
        "ALTER TABLE pipelines ADD COLUMN block_size INTEGER NOT NULL DEFAULT 16",
    ),
    # Invitations were for any number of PCs; those that still hold are now for one more.
    2: (
        "ALTER TABLE swarm ADD COLUMN max_peers INTEGER NOT NULL DEFAULT 64",
        "ALTER TABLE members ADD COLUMN invitation TEXT NOT NULL DEFAULT ''",
        "ALTER TABLE invitations ADD COLUMN uses INTEGER NOT NULL DEFAULT 1",
        _USES,
    ),
    3: (
        "ALTER TABLE swarm ADD COLUMN term INTEGER NOT NULL DEFAULT 0",
        "ALTER TABLE swarm ADD COLUMN revision INTEGER NOT NULL DEFAULT 0",
        "ALTER TABLE swarm ADD COLUMN lineage BLOB NOT NULL DEFAULT X'90'",
    ),
    4: (
        "ALTER TABLE models ADD COLUMN objective TEXT NOT NULL DEFAULT 'latency'",
        "ALTER TABLE models ADD COLUMN min_stages INTEGER NOT NULL DEFAULT 0",
    ),
    # There was one model, with one pipeline.
    5: (
        "ALTER TABLE models ADD COLUMN replicas INTEGER NOT NULL DEFAULT 1",
        "ALTER TABLE models ADD COLUMN pins BLOB NOT NULL DEFAULT X'90'",
        "ALTER TABLE models ADD COLUMN applied INTEGER NOT NULL DEFAULT 0",
        "ALTER TABLE pipelines ADD COLUMN replica INTEGER NOT NULL DEFAULT 0",
    ),
    6: ("ALTER TABLE models ADD COLUMN stopped INTEGER NOT NULL DEFAULT 0",),
}


def prepare_database(connection: sqlite3.Connection, path: Path) -> None:
    """Set the connection up, check the file and make the tables if it is new."""
    for pragma in (
        "locking_mode = EXCLUSIVE",
        "journal_mode = DELETE",  # what is committed is in this one file: a copy of it is whole
        "synchronous = FULL",
        "foreign_keys = ON",
    ):
        connection.execute(f"PRAGMA {pragma}")
    connection.execute("BEGIN IMMEDIATE")
    tables = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
    if tables == 0:
        for statement in (*_SCHEMA.split(";"), _STAGES, _USES):
            connection.execute(statement)
        connection.execute("INSERT INTO schema VALUES (?)", (SCHEMA_VERSION,))
    connection.execute("COMMIT")
    damage = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
    if damage != "ok":
        raise sqlite3.DatabaseError(damage)
    version = _migrate(connection)
    if version != SCHEMA_VERSION:
        raise StateError(
            f"{path} was written by a newer molink (its format is {version}, this one knows "
            f"{SCHEMA_VERSION}): update molink on this PC"
        )


def _migrate(connection: sqlite3.Connection) -> int:
    """Take the file from an older version to ours, all or nothing; returns the one it then has."""
    (version,) = connection.execute("SELECT version FROM schema").fetchone() or (0,)
    found: int = version
    connection.execute("BEGIN IMMEDIATE")
    try:
        while found in _MIGRATIONS:
            for statement in _MIGRATIONS[found]:
                connection.execute(statement)
            found += 1
        connection.execute("UPDATE schema SET version = ?", (found,))
    except BaseException:
        connection.execute("ROLLBACK")
        raise
    connection.execute("COMMIT")
    return found


def translate_error(error: Exception, path: Path) -> StateError:
    """The error to show for one of SQLite's."""
    if isinstance(error, StateError):
        return error
    if isinstance(error, sqlite3.OperationalError) and "locked" in str(error):
        return StateError(f"another coordinator uses {path}: stop it first, or name another folder")
    if isinstance(error, sqlite3.OperationalError):
        return StateError(f"can't use {path}: {error}. Is the disk full or read-only?")
    return DamagedState(
        f"{path} is damaged ({error}): put a copy of that file in its place, or move it away, and "
        "molink goes on from the copy of the state that each PC keeps (`replica.msgpack`)"
    )
