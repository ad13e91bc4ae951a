"""The coordinator's state: one SQLite file, committed before anything is announced.

Only one process can open it. It holds no secrets: the coordinator's key has its own file, and of
invitations only public keys are stored.
"""

import sqlite3
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from molink.errors import InvariantError, StateError
from molink.swarm.controller.records import (
    DesiredModel,
    InvitationRecord,
    MemberRecord,
    PipelineRecord,
    Standing,
    SwarmRecord,
)
from molink.swarm.election.replica import Replica, Version, next_lineage
from molink.wire.messages.instructions import PeerInfo
from molink.wire.sockets.secrets import private_folder
from molinkd.coordinator.tables import (
    InvitationTable,
    MemberTable,
    ModelTable,
    PipelineTable,
    prepare_database,
    translate_error,
)

STATE_FILE = "swarm.sqlite"


class StateStore:
    """The open state file. Each writing method commits before it returns."""

    def __init__(self, connection: sqlite3.Connection, path: Path) -> None:
        self._db = connection
        self.path = path
        self._members, self._invitations = MemberTable(connection), InvitationTable(connection)
        self._models, self._pipelines = ModelTable(connection), PipelineTable(connection)

    # --- life --------------------------------------------------------------------------------

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
            except BaseException:
                self._db.execute("ROLLBACK")
                raise
            self._db.execute("COMMIT")
        except sqlite3.Error as error:
            raise translate_error(error, self.path) from error

    def _write(self, statement: str, *values: Any) -> None:
        with self._transaction():
            self._db.execute(statement, values)

    # --- swarm -------------------------------------------------------------------------------

    def read_swarm(self) -> SwarmRecord | None:
        """The swarm, if this folder holds one."""
        row = self._db.execute("SELECT id, name, public_key, port, max_peers FROM swarm").fetchone()
        return SwarmRecord(*row) if row else None

    def create_swarm(self, swarm: SwarmRecord) -> None:
        """Create a swarm."""
        self._write(
            "INSERT INTO swarm (id, name, public_key, port, max_peers, created) "
            "VALUES (?, ?, ?, ?, ?, ?)",
            swarm.id,
            swarm.name,
            swarm.public_key,
            swarm.port,
            swarm.max_peers,
            time.time(),
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
            members=tuple(self.read_members()),
            invitations=tuple(self.read_invitations()),
            models=self.read_models(),
            pipelines=self.read_pipelines(),
            last_numbers=self.last_numbers(),
        )

    def restore_replica(self, replica: Replica, public_key: str) -> None:
        """Replace the state by a replica; ``public_key`` is this coordinator's own."""
        known = {member.peer for member in replica.members}
        with self._transaction():
            for table in ("invitation_uses", "stages", "pipelines", "models", "invitations"):
                self._db.execute(f"DELETE FROM {table}")
            self._db.execute("DELETE FROM members")
            self._db.execute("DELETE FROM swarm")
            self._db.execute(
                "INSERT INTO swarm (id, name, public_key, max_peers, created, term, revision, "
                "lineage, last_pipeline, last_epoch) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (
                    replica.swarm,
                    replica.name,
                    public_key,
                    replica.max_peers,
                    time.time(),
                    replica.term,
                    replica.revision - 1,  # the transaction adds 1
                    msgspec.msgpack.encode(replica.lineage),
                    *replica.last_numbers,
                ),
            )
            for member in replica.members:
                self._members.upsert_member(member)
                if member.announced is not None:
                    self._members.set_announced(member.announced)
            for invitation in replica.invitations:
                used = tuple(use for use in invitation.used_by if use.peer in known)
                self._invitations.insert_invitation(replace(invitation, used_by=used))
            for desired in replica.models:
                self._models.upsert_model(desired)
            for pipeline in replica.pipelines:
                self._pipelines.replace_pipeline(pipeline)

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

    def read_members(self) -> list[MemberRecord]:
        """Everyone who ever joined, in order of joining."""
        return self._members.read_all()

    def save_member(self, member: MemberRecord) -> None:
        """Add or readmit a member; owners stay owners."""
        with self._transaction():
            self._members.upsert_member(member)

    def admit_member(self, member: MemberRecord, invitation: InvitationRecord) -> None:
        """Add or readmit a member, and store its use of the invitation."""
        with self._transaction():
            self._members.upsert_member(member)
            self._invitations.insert_uses(invitation)

    def save_standing(self, peer: str, standing: Standing) -> None:
        """Set a member's standing."""
        with self._transaction():
            self._members.set_standing(peer, standing)

    def save_announced(self, member: PeerInfo) -> None:
        """Store what other peers are told about a member."""
        with self._transaction():
            self._members.set_announced(member)

    # --- invitations -------------------------------------------------------------------------

    def read_invitations(self) -> list[InvitationRecord]:
        """All invitations, oldest first."""
        return self._invitations.read_all()

    def add_invitation(self, invitation: InvitationRecord) -> None:
        """Add an invitation."""
        with self._transaction():
            self._invitations.insert_invitation(invitation)

    def delete_invitation(self, id: str) -> None:
        """Delete an expired or revoked invitation."""
        with self._transaction():
            self._invitations.delete_invitation(id)

    # --- desired and committed ---------------------------------------------------------------

    def read_models(self) -> tuple[DesiredModel, ...]:
        """The desired models."""
        return self._models.read_all()

    def save_models(self, models: Sequence[DesiredModel]) -> None:
        """Store the desired models; delete pipelines of other models or weights."""
        with self._transaction():
            self._models.replace_all(models)

    def read_pipelines(self) -> tuple[PipelineRecord, ...]:
        """The committed pipelines."""
        return self._pipelines.read_all()

    def last_numbers(self) -> tuple[int, int]:
        """The highest pipeline number and epoch ever used."""
        row = self._db.execute("SELECT last_pipeline, last_epoch FROM swarm").fetchone()
        return (row[0], row[1]) if row else (0, 0)

    def commit_pipeline(self, pipeline: PipelineRecord) -> None:
        """Commit an epoch of a pipeline, or its formation.

        Raises:
            InvariantError: the epoch is older than one of it that was committed.
        """
        number, newest = self.last_numbers()
        epoch = self._pipelines.read_epoch(pipeline.id)
        if pipeline.epoch < epoch:
            raise InvariantError(f"epoch {pipeline.epoch} after {epoch} was committed")
        with self._transaction():
            self._pipelines.replace_pipeline(pipeline)
            self._db.execute(
                "UPDATE swarm SET last_pipeline = ?, last_epoch = ?",
                (max(number, _pipeline_number(pipeline.id)), max(newest, pipeline.epoch)),
            )

    def reserve_epoch(self, pipeline: str, epoch: int) -> None:
        """Mark an epoch and a pipeline's name as used, without committing."""
        self._write(
            "UPDATE swarm SET last_pipeline = max(last_pipeline, ?), "
            "last_epoch = max(last_epoch, ?)",
            _pipeline_number(pipeline),
            epoch,
        )


def _pipeline_number(pipeline: str) -> int:
    return int(pipeline.removeprefix("p"))
