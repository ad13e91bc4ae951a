"""The tables of the coordinator's state file; each method runs inside a transaction."""

import sqlite3
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from molink.errors import DamagedState, StateError
from molink.facts.model import ModelFacts
from molink.facts.profile import Profile
from molink.swarm.controller.records import (
    DesiredModel,
    InvitationRecord,
    InvitationUse,
    MemberRecord,
    Pin,
    PipelineRecord,
    StageRecord,
    Standing,
)
from molink.wire.messages.instructions import PeerInfo

SCHEMA_VERSION = 8

#: ``profile`` is msgpack of :class:`molink.facts.profile.Profile`.
_STAGES = """CREATE TABLE stages (
    pipeline TEXT NOT NULL REFERENCES pipelines (id) ON DELETE CASCADE, stage INTEGER NOT NULL,
    peer TEXT NOT NULL REFERENCES members (peer), first INTEGER NOT NULL, last INTEGER NOT NULL,
    port INTEGER NOT NULL, max_blocks INTEGER NOT NULL, profile BLOB NOT NULL,
    PRIMARY KEY (pipeline, stage)
)
"""
#: Members that joined by each invitation.
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


def prepare_database(connection: sqlite3.Connection, path: Path) -> None:
    """Configure the connection, check the file, and create the tables of a new one."""
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
        for statement in (*_SCHEMA.split(";"), _STAGES, _USES):
            connection.execute(statement)
        connection.execute("INSERT INTO schema VALUES (?)", (SCHEMA_VERSION,))
    connection.execute("COMMIT")
    damage = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
    if damage != "ok":
        raise sqlite3.DatabaseError(damage)
    (version,) = connection.execute("SELECT version FROM schema").fetchone() or (0,)
    if version != SCHEMA_VERSION:
        raise StateError(
            f"{path} has format {version}, but this molink needs {SCHEMA_VERSION}: run the molink "
            "that wrote it, or move the file away"
        )


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


class MemberTable:
    """Everyone who ever joined."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db

    def read_all(self) -> list[MemberRecord]:
        """All members, in order of joining."""
        rows = self._db.execute(
            "SELECT peer, public_key, name, owner, standing, announced, invitation FROM members "
            "ORDER BY ordinal"
        )
        return [
            MemberRecord(
                peer,
                public_key,
                name,
                bool(owner),
                standing,
                None if announced is None else msgspec.msgpack.decode(announced, type=PeerInfo),
                invitation,
            )
            for peer, public_key, name, owner, standing, announced, invitation in rows
        ]

    def upsert_member(self, member: MemberRecord) -> None:
        """Add or readmit a member; owners stay owners."""
        self._db.execute(
            "INSERT INTO members (peer, public_key, name, owner, standing, invitation, joined) "
            "VALUES (?, ?, ?, ?, ?, ?, ?) ON CONFLICT (peer) DO UPDATE SET name = excluded.name, "
            "owner = max(owner, excluded.owner), standing = excluded.standing, "
            "invitation = coalesce(nullif(excluded.invitation, ''), invitation)",
            (
                member.peer,
                member.public_key,
                member.name,
                member.is_owner,
                member.standing,
                member.invitation,
                time.time(),
            ),
        )

    def set_standing(self, peer: str, standing: Standing) -> None:
        """Set a member's standing."""
        self._db.execute("UPDATE members SET standing = ? WHERE peer = ?", (standing, peer))

    def set_announced(self, member: PeerInfo) -> None:
        """Store what other peers are told about a member."""
        self._db.execute(
            "UPDATE members SET announced = ?, name = ? WHERE peer = ?",
            (msgspec.msgpack.encode(member), member.name, member.peer),
        )


class InvitationTable:
    """Invitations and their uses."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db

    def read_all(self) -> list[InvitationRecord]:
        """All invitations, oldest first."""
        used: defaultdict[str, list[InvitationUse]] = defaultdict(list)
        for id, peer, at in self._db.execute(
            "SELECT invitation, peer, used FROM invitation_uses ORDER BY used, peer"
        ):
            used[id].append(InvitationUse(peer, at))
        rows = self._db.execute(
            "SELECT id, public_key, expires, creator, created, uses FROM invitations "
            "ORDER BY created, id"
        )
        return [
            InvitationRecord(id, public_key, expires, creator, created, uses, tuple(used[id]))
            for id, public_key, expires, creator, created, uses in rows
        ]

    def insert_invitation(self, invitation: InvitationRecord) -> None:
        """Add an invitation with its uses."""
        self._db.execute(
            "INSERT INTO invitations (id, public_key, expires, creator, created, uses) "
            "VALUES (?, ?, ?, ?, ?, ?)",
            (
                invitation.id,
                invitation.public_key,
                invitation.expires_at,
                invitation.creator,
                invitation.created_at,
                invitation.max_uses,
            ),
        )
        self._db.executemany(
            "INSERT INTO invitation_uses (invitation, peer, used) VALUES (?, ?, ?)",
            [(invitation.id, use.peer, use.used_at) for use in invitation.used_by],
        )

    def insert_uses(self, invitation: InvitationRecord) -> None:
        """Add new uses of an invitation."""
        self._db.executemany(
            "INSERT OR IGNORE INTO invitation_uses (invitation, peer, used) VALUES (?, ?, ?)",
            [(invitation.id, use.peer, use.used_at) for use in invitation.used_by],
        )

    def delete_invitation(self, id: str) -> None:
        """Delete an invitation and its uses."""
        self._db.execute("DELETE FROM invitations WHERE id = ?", (id,))


class ModelTable:
    """The desired models, in the given order."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db

    def read_all(self) -> tuple[DesiredModel, ...]:
        """All models."""
        rows = self._db.execute(
            "SELECT facts, source, min_peers, dtype, micro_batches, quantize, objective, "
            "min_stages, replicas, pins, applied, stopped FROM models ORDER BY rowid"
        )
        return tuple(
            DesiredModel(
                msgspec.msgpack.decode(facts, type=ModelFacts),
                *plain,
            )
            for facts, *plain in map(_unpack_model_row, rows)
        )

    def replace_all(self, models: Sequence[DesiredModel]) -> None:
        """Store the desired models; delete pipelines of other models or weights."""
        kept = {one.facts.name: one for one in models}
        for (name,) in self._db.execute("SELECT name FROM models").fetchall():
            if name not in kept:
                self._db.execute("DELETE FROM models WHERE name = ?", (name,))
        for one in models:
            packed = msgspec.msgpack.encode(one.facts)
            self._db.execute(
                "DELETE FROM models WHERE name = ? AND (facts != ? OR dtype != ? OR quantize != ?)",
                (one.facts.name, packed, one.dtype, one.quantize),
            )
            self._db.execute(
                "DELETE FROM pipelines WHERE model = ? AND replica >= ?",
                (one.facts.name, one.num_pipelines),
            )
            self.upsert_model(one)

    def upsert_model(self, desired: DesiredModel) -> None:
        """Add or update a model."""
        values = {
            "name": desired.facts.name,
            "facts": msgspec.msgpack.encode(desired.facts),
            "source": desired.source,
            "min_peers": desired.min_peers,
            "dtype": desired.dtype,
            "micro_batches": desired.micro_batches,
            "quantize": desired.quantize,
            "objective": desired.objective,
            "min_stages": desired.min_stages,
            "replicas": desired.replicas,
            "pins": msgspec.msgpack.encode(desired.pins),
            "applied": desired.applied,
            "stopped": desired.stopped,
        }
        changed = ", ".join(f"{name} = excluded.{name}" for name in values if name != "name")
        self._db.execute(
            f"INSERT INTO models ({', '.join(values)}) VALUES ({', '.join('?' * len(values))}) "
            f"ON CONFLICT (name) DO UPDATE SET {changed}",
            tuple(values.values()),
        )


class PipelineTable:
    """The committed pipelines with their stages, one per deployment."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db

    def read_all(self) -> tuple[PipelineRecord, ...]:
        """All pipelines."""
        rows = self._db.execute(
            "SELECT id, model, epoch, formed, blocks, micro_batches, block_size, replica "
            "FROM pipelines ORDER BY rowid"
        ).fetchall()
        return tuple(
            PipelineRecord(id, model, epoch, self._read_stages(id), bool(formed), *sizes)
            for id, model, epoch, formed, *sizes in rows
        )

    def _read_stages(self, pipeline: str) -> tuple[StageRecord, ...]:
        return tuple(
            StageRecord(peer, (first, last), port, max_blocks, _unpack_profile(profile))
            for peer, first, last, port, max_blocks, profile in self._db.execute(
                "SELECT peer, first, last, port, max_blocks, profile FROM stages "
                "WHERE pipeline = ? ORDER BY stage",
                (pipeline,),
            )
        )

    def read_epoch(self, pipeline: str) -> int:
        """The epoch of a pipeline; 0 if it is unknown."""
        row = self._db.execute("SELECT epoch FROM pipelines WHERE id = ?", (pipeline,)).fetchone()
        return row[0] if row else 0

    def replace_pipeline(self, pipeline: PipelineRecord) -> None:
        """Replace the pipeline of the same deployment."""
        self._db.execute(
            "DELETE FROM pipelines WHERE id = ? OR (model = ? AND replica = ?)",
            (pipeline.id, pipeline.model, pipeline.replica),
        )
        self._db.execute(
            "INSERT INTO pipelines (id, model, epoch, formed, blocks, micro_batches, "
            "block_size, replica) VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            (
                pipeline.id,
                pipeline.model,
                pipeline.epoch,
                pipeline.formed,
                pipeline.blocks,
                pipeline.micro_batches,
                pipeline.block_size,
                pipeline.replica,
            ),
        )
        self._db.executemany(
            "INSERT INTO stages (pipeline, stage, peer, first, last, port, max_blocks, "
            "profile) VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            [
                (pipeline.id, i, s.peer, *s.layers, s.port, s.max_blocks, _pack_profile(s.profile))
                for i, s in enumerate(pipeline.stages)
            ],
        )


def _unpack_model_row(row: tuple[Any, ...]) -> tuple[Any, ...]:
    """The row of a model with its last three columns decoded."""
    *plain, pins, applied, stopped = row
    bound = msgspec.msgpack.decode(pins, type=tuple[Pin, ...])
    return *plain, bound, bool(applied), bool(stopped)


def _pack_profile(profile: Profile) -> bytes:
    return msgspec.msgpack.encode(profile)


def _unpack_profile(packed: bytes) -> Profile:
    return msgspec.msgpack.decode(packed, type=Profile)
