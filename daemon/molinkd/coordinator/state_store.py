"""The coordinator's memory: one SQLite file, written before anything is announced.

Only one process can have it open. Secrets are not in it: the coordinator's key has a file of its
own, and of an invitation the public half alone is kept.
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
from molinkd.coordinator.member_tables import InvitationTable, MemberTable
from molinkd.coordinator.model_tables import ModelTable, PipelineTable
from molinkd.coordinator.schema import prepare_database, translate_error

STATE_FILE = "swarm.sqlite"


class StateStore:
    """The open state file. Every method that writes has committed when it returns."""

    def __init__(self, connection: sqlite3.Connection, path: Path) -> None:
        self._db = connection
        self.path = path
        self._members, self._invitations = MemberTable(connection), InvitationTable(connection)
        self._models, self._pipelines = ModelTable(connection), PipelineTable(connection)

    # --- life --------------------------------------------------------------------------------

    @classmethod
    def open(cls, folder: Path) -> "StateStore":
        """Open the state in ``folder``; make it if there is none.

        Raises:
            StateError: it is damaged, newer than this molink, or another process has it open.
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
        """Begin a swarm."""
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
        """From now on this is the state of another term.

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
        """All of it, for the peers to keep."""
        swarm = self.read_swarm()
        assert swarm is not None
        term, revision = self.read_version()
        models, pipelines = self.read_models(), self.read_pipelines()
        return Replica(
            swarm=swarm.id,
            name=swarm.name,
            max_peers=swarm.max_peers,
            term=term,
            revision=revision,
            lineage=self.read_lineage(),
            members=tuple(self.read_members()),
            invitations=tuple(self.read_invitations()),
            desired=models[0] if models else None,
            pipeline=pipelines[0] if pipelines else None,
            last_numbers=self.last_numbers(),
            more_models=models[1:],
            more_pipelines=pipelines[1:],
        )

    def restore_replica(self, replica: Replica, public_key: str) -> None:
        """Put a replica in the place of what there is; ``public_key`` is this coordinator's own."""
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
                    replica.revision - 1,  # the end of a transaction counts it up
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
        """Count the revision up, so that every peer gets the state anew."""
        with self._transaction():
            pass

    def save_public_key(self, public_key: str) -> None:
        """The coordinator has another key."""
        self._write("UPDATE swarm SET public_key = ?", public_key)

    def save_port(self, port: int) -> None:
        """Remember where the coordinator listens: that is where its members look for it."""
        self._write("UPDATE swarm SET port = ?", port)

    def save_max_peers(self, peers: int) -> None:
        """Remember how many PCs may be members at once."""
        self._write("UPDATE swarm SET max_peers = ?", peers)

    # --- members -----------------------------------------------------------------------------

    def read_members(self) -> list[MemberRecord]:
        """All that ever joined, in the order of joining."""
        return self._members.read_all()

    def save_member(self, member: MemberRecord) -> None:
        """Add a member, or let one in again; an owner stays one."""
        with self._transaction():
            self._members.upsert_member(member)

    def admit_member(self, member: MemberRecord, invitation: InvitationRecord) -> None:
        """Add a member, or let one in again, and remember who has joined by the invitation."""
        with self._transaction():
            self._members.upsert_member(member)
            self._invitations.insert_uses(invitation)

    def save_standing(self, peer: str, standing: Standing) -> None:
        """A member left or was revoked, or is one again."""
        with self._transaction():
            self._members.set_standing(peer, standing)

    def save_announced(self, member: PeerInfo) -> None:
        """Remember what the others are told of a member."""
        with self._transaction():
            self._members.set_announced(member)

    # --- invitations -------------------------------------------------------------------------

    def read_invitations(self) -> list[InvitationRecord]:
        """All that haven't been deleted, oldest first."""
        return self._invitations.read_all()

    def add_invitation(self, invitation: InvitationRecord) -> None:
        """Remember a new invitation."""
        with self._transaction():
            self._invitations.insert_invitation(invitation)

    def delete_invitation(self, id: str) -> None:
        """Forget one that has expired or was revoked."""
        with self._transaction():
            self._invitations.delete_invitation(id)

    # --- desired and committed ---------------------------------------------------------------

    def read_models(self) -> tuple[DesiredModel, ...]:
        """The models to be served."""
        return self._models.read_all()

    def save_models(self, models: Sequence[DesiredModel]) -> None:
        """Serve these; pipelines of others, or with other weights, are forgotten."""
        with self._transaction():
            self._models.replace_all(models)

    def read_pipelines(self) -> tuple[PipelineRecord, ...]:
        """The pipelines as last committed."""
        return self._pipelines.read_all()

    def last_numbers(self) -> tuple[int, int]:
        """The number of the newest pipeline and the newest epoch, whether they still are or not."""
        row = self._db.execute("SELECT last_pipeline, last_epoch FROM swarm").fetchone()
        return (row[0], row[1]) if row else (0, 0)

    def commit_pipeline(self, pipeline: PipelineRecord) -> None:
        """Commit an epoch of a pipeline, or that it has formed.

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
        """Remember that an epoch and a pipeline's name are taken; the committed one stays it."""
        self._write(
            "UPDATE swarm SET last_pipeline = max(last_pipeline, ?), "
            "last_epoch = max(last_epoch, ?)",
            _pipeline_number(pipeline),
            epoch,
        )


def _pipeline_number(pipeline: str) -> int:
    return int(pipeline.removeprefix("p"))
