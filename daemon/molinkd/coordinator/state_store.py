"""The coordinator's state: one SQLite file, committed before anything is announced.

Only one process can open it. It holds no secrets: the coordinator's key has its own file, and the
membership log only public keys.
"""

import sqlite3
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from molink.errors import InvariantError, StateError
from molink.facts.model import ModelFacts
from molink.facts.profile import Profile
from molink.swarm.controller.records import (
    DesiredModel,
    Pin,
    PipelineRecord,
    StageRecord,
    SwarmRecord,
)
from molink.swarm.election.replica import Replica, Version, next_lineage
from molink.swarm.membership.membership_log import MembershipLog
from molink.wire.messages.instructions import PeerInfo
from molink.wire.messages.membership import SignedEntry
from molink.wire.sockets.secrets import private_folder
from molinkd.coordinator.schema import prepare_database, translate_error

STATE_FILE = "swarm.sqlite"


class StateStore:
    """The open state file. Each writing method commits before it returns."""

    def __init__(self, connection: sqlite3.Connection, path: Path) -> None:
        self._db = connection
        self.path = path

    @classmethod
    def open(cls, folder: Path) -> "StateStore":
        """Open or create the state in ``folder``.

        Raises:
            StateError: it is damaged, of another version's format, or open in another process.
        """
        path = private_folder(folder) / STATE_FILE
        connection: sqlite3.Connection | None = None
        try:
            connection = sqlite3.connect(path, timeout=5.0, isolation_level=None)
            prepare_database(connection, path)
        except (sqlite3.Error, StateError) as error:
            if connection is not None:
                connection.close()
            raise translate_error(error, path) from error
        return cls(connection, path)

    def close(self) -> None:
        """Close the file."""
        self._db.close()

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        try:
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._db.execute("UPDATE swarm SET revision = revision + 1")
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:  # SQLite itself ends one if the disk is full
                    self._db.execute("ROLLBACK")
                raise
        except sqlite3.Error as error:
            raise translate_error(error, self.path) from error

    def _write(self, statement: str, *values: Any) -> None:
        with self._transaction():
            self._db.execute(statement, values)

    def _insert(self, table: str, conflict: str = "", **values: Any) -> None:
        """Insert a row; the SQL of ``conflict`` follows."""
        self._db.execute(
            f"INSERT INTO {table} ({', '.join(values)}) VALUES ({', '.join('?' * len(values))}) "
            f"{conflict}",
            tuple(values.values()),
        )

    # --- swarm -------------------------------------------------------------------------------

    def read_swarm(self) -> SwarmRecord | None:
        """The swarm, if this folder holds one."""
        row = self._db.execute("SELECT id, name, public_key, port, max_peers FROM swarm").fetchone()
        return SwarmRecord(*row) if row else None

    def create_swarm(self, swarm: SwarmRecord, log: MembershipLog) -> None:
        """Create a swarm with the log of its founding."""
        with self._transaction():
            self._put_log(log)
            self._insert(
                "swarm",
                id=swarm.id,
                name=swarm.name,
                public_key=swarm.public_key,
                port=swarm.port,
                max_peers=swarm.max_peers,
                created=time.time(),
            )

    def read_version(self) -> Version:
        """The term, and the revision in it."""
        row = self._db.execute("SELECT term, revision FROM swarm").fetchone()
        return (row[0], row[1]) if row else (0, 0)

    def read_lineage(self) -> tuple[Version, ...]:
        """Earlier terms, oldest first, with the last revision of each."""
        row = self._db.execute("SELECT lineage FROM swarm").fetchone()
        return msgspec.msgpack.decode(row[0], type=tuple[Version, ...]) if row else ()

    def begin_term(self, term: int) -> None:
        """Start another term.

        Raises:
            InvariantError: it is older than the present one.
        """
        before, revision = self.read_version()
        if term < before:
            raise InvariantError(f"term {term} after {before}")
        if term > before:
            lineage = next_lineage(self.read_lineage(), before, revision)
            packed = msgspec.msgpack.encode(lineage)
            self._write("UPDATE swarm SET term = ?, lineage = ?", term, packed)

    def to_replica(self) -> Replica:
        """The whole state, for peers to replicate."""
        swarm = self.read_swarm()
        assert swarm is not None
        term, revision = self.read_version()
        return Replica(
            swarm=swarm.id,
            name=swarm.name,
            max_peers=swarm.max_peers,
            term=term,
            revision=revision,
            lineage=self.read_lineage(),
            log=self.read_log(),
            announced=tuple(self.read_announced().values()),
            models=self.read_models(),
            pipelines=self.read_pipelines(),
            last_numbers=self.last_numbers(),
        )

    def restore_replica(self, replica: Replica, public_key: str) -> None:
        """Replace the state by a replica; ``public_key`` is this coordinator's own."""
        last_pipeline, last_epoch = replica.last_numbers
        with self._transaction():
            for table in ("stages", "pipelines", "models", "log", "members", "swarm"):
                self._db.execute(f"DELETE FROM {table}")
            self._insert(
                "swarm",
                id=replica.swarm,
                name=replica.name,
                public_key=public_key,
                max_peers=replica.max_peers,
                created=time.time(),
                term=replica.term,
                revision=replica.revision - 1,  # the transaction adds 1
                lineage=msgspec.msgpack.encode(replica.lineage),
                last_pipeline=last_pipeline,
                last_epoch=last_epoch,
            )
            self._put_log(replica.log)
            for info in replica.announced:
                self._set_announced(info)
            for desired in replica.models:
                self._put_model(desired)
            for pipeline in replica.pipelines:
                self._put_pipeline(pipeline)

    def bump_revision(self) -> None:
        """Raise the revision, so that every peer receives the state."""
        with self._transaction():
            pass

    def save_public_key(self, public_key: str) -> None:
        """Store the coordinator's new public key."""
        self._write("UPDATE swarm SET public_key = ?", public_key)

    def save_port(self, port: int) -> None:
        """Store the coordinator's port, where members look for it."""
        self._write("UPDATE swarm SET port = ?", port)

    def save_max_peers(self, peers: int) -> None:
        """Store the maximum number of members."""
        self._write("UPDATE swarm SET max_peers = ?", peers)

    # --- members -----------------------------------------------------------------------------

    def read_log(self) -> MembershipLog:
        """The membership log."""
        row = self._db.execute("SELECT id FROM swarm").fetchone()
        rows = self._db.execute("SELECT hash, body, signature FROM log ORDER BY ordinal")
        entries = {entry_hash: SignedEntry(body, signed) for entry_hash, body, signed in rows}
        return MembershipLog(row[0] if row else "", entries)

    def save_log(self, log: MembershipLog) -> None:
        """Store a changed log; stored entries keep their order."""
        with self._transaction():
            self._put_log(log)

    def read_announced(self) -> dict[str, PeerInfo]:
        """What other peers were told about members, by peer id."""
        rows = self._db.execute("SELECT peer, announced FROM members WHERE announced IS NOT NULL")
        return {peer: msgspec.msgpack.decode(info, type=PeerInfo) for peer, info in rows}

    def save_announced(self, info: PeerInfo) -> None:
        """Store what other peers are told about a member."""
        with self._transaction():
            self._set_announced(info)

    def _put_log(self, log: MembershipLog) -> None:
        rows = [(one.hash, one.body, one.signature) for one in log.entries]
        kept = {row[0] for row in rows}
        for (entry_hash,) in self._db.execute("SELECT hash FROM log").fetchall():
            if entry_hash not in kept:
                self._db.execute("DELETE FROM log WHERE hash = ?", (entry_hash,))
        self._db.executemany(
            "INSERT OR IGNORE INTO log (hash, body, signature) VALUES (?, ?, ?)", rows
        )
        self._db.executemany(
            "INSERT OR IGNORE INTO members (peer) VALUES (?)", [(peer,) for peer in log.members]
        )

    def _set_announced(self, info: PeerInfo) -> None:
        self._db.execute(
            "UPDATE members SET announced = ? WHERE peer = ?",
            (msgspec.msgpack.encode(info), info.peer),
        )

    # --- models ------------------------------------------------------------------------------

    def read_models(self) -> tuple[DesiredModel, ...]:
        """The desired models, in the given order."""
        rows = self._db.execute(
            "SELECT facts, source, min_peers, dtype, micro_batches, quantize, objective, "
            "min_stages, replicas, pins, applied, stopped, kv_cache_dtype "
            "FROM models ORDER BY rowid"
        )
        models: list[DesiredModel] = []
        for facts, *plain, pins, applied, stopped, kept in rows:
            decoded = msgspec.msgpack.decode(pins, type=tuple[Pin, ...])
            values = (*plain, decoded, bool(applied), bool(stopped), kept)
            models.append(DesiredModel(msgspec.msgpack.decode(facts, type=ModelFacts), *values))
        return tuple(models)

    def save_models(self, models: Sequence[DesiredModel]) -> None:
        """Store the desired models; delete pipelines of other models or weights."""
        desired = {one.facts.name for one in models}
        with self._transaction():
            for (name,) in self._db.execute("SELECT name FROM models").fetchall():
                if name not in desired:
                    self._db.execute("DELETE FROM models WHERE name = ?", (name,))
            for one in models:
                packed = msgspec.msgpack.encode(one.facts)
                self._db.execute(
                    "DELETE FROM models WHERE name = ? "
                    "AND (facts != ? OR dtype != ? OR quantize != ? OR kv_cache_dtype != ?)",
                    (one.facts.name, packed, one.dtype, one.quantize, one.kv_cache_dtype),
                )
                self._db.execute(
                    "DELETE FROM pipelines WHERE model = ? AND replica >= ?",
                    (one.facts.name, one.num_pipelines),
                )
                self._put_model(one)

    def _put_model(self, desired: DesiredModel) -> None:
        values = {
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
            "kv_cache_dtype": desired.kv_cache_dtype,
        }
        changed = ", ".join(f"{name} = excluded.{name}" for name in values)
        conflict = f"ON CONFLICT (name) DO UPDATE SET {changed}"
        self._insert("models", conflict, name=desired.facts.name, **values)

    # --- pipelines ---------------------------------------------------------------------------

    def read_pipelines(self) -> tuple[PipelineRecord, ...]:
        """The committed pipelines."""
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
            StageRecord(
                peer,
                (first, last),
                port,
                max_blocks,
                msgspec.msgpack.decode(profile, type=Profile),
            )
            for peer, first, last, port, max_blocks, profile in self._db.execute(
                "SELECT peer, first, last, port, max_blocks, profile FROM stages "
                "WHERE pipeline = ? ORDER BY stage",
                (pipeline,),
            )
        )

    def last_numbers(self) -> tuple[int, int]:
        """The highest pipeline number and epoch ever used."""
        row = self._db.execute("SELECT last_pipeline, last_epoch FROM swarm").fetchone()
        return (row[0], row[1]) if row else (0, 0)

    def commit_pipeline(self, pipeline: PipelineRecord) -> None:
        """Commit an epoch of a pipeline, or its formation.

        Raises:
            InvariantError: the epoch is older than a committed one.
        """
        row = self._db.execute("SELECT epoch FROM pipelines WHERE id = ?", (pipeline.id,))
        (epoch,) = row.fetchone() or (0,)
        if pipeline.epoch < epoch:
            raise InvariantError(f"epoch {pipeline.epoch} after {epoch} was committed")
        with self._transaction():
            self._put_pipeline(pipeline)
            self._raise_numbers(pipeline.id, pipeline.epoch)

    def reserve_epoch(self, pipeline: str, epoch: int) -> None:
        """Mark an epoch and a pipeline's name as used, without committing."""
        with self._transaction():
            self._raise_numbers(pipeline, epoch)

    def _raise_numbers(self, pipeline: str, epoch: int) -> None:
        self._db.execute(
            "UPDATE swarm SET last_pipeline = max(last_pipeline, ?), "
            "last_epoch = max(last_epoch, ?)",
            (int(pipeline.removeprefix("p")), epoch),
        )

    def _put_pipeline(self, pipeline: PipelineRecord) -> None:
        """Replace the pipeline of the same deployment."""
        self._db.execute(
            "DELETE FROM pipelines WHERE id = ? OR (model = ? AND replica = ?)",
            (pipeline.id, pipeline.model, pipeline.replica),
        )
        self._insert(
            "pipelines",
            id=pipeline.id,
            model=pipeline.model,
            epoch=pipeline.epoch,
            formed=pipeline.formed,
            blocks=pipeline.blocks,
            micro_batches=pipeline.micro_batches,
            block_size=pipeline.block_size,
            replica=pipeline.replica,
        )
        for number, stage in enumerate(pipeline.stages):
            first, last = stage.layers
            self._insert(
                "stages",
                pipeline=pipeline.id,
                stage=number,
                peer=stage.peer,
                first=first,
                last=last,
                port=stage.port,
                max_blocks=stage.max_blocks,
                profile=msgspec.msgpack.encode(stage.profile),
            )
