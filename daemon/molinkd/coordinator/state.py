"""The coordinator's memory: one SQLite file, written before anything is announced.

Only one process can have it open. Secrets are not in it: the coordinator's key has a file of its
own, and of an invitation the public half alone is kept.
"""

import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from molink.errors import InvariantError, StateError
from molink.facts.model import ModelFacts
from molink.facts.profile import Profile
from molink.swarm.records import (
    Desired,
    InvitationRecord,
    MemberRecord,
    PipelineRecord,
    StageRecord,
    Standing,
    SwarmRecord,
)
from molink.wire.messages.control import Member
from molink.wire.sockets.secrets import private_folder
from molinkd.coordinator.state_tables import explain, prepare

FILE = "swarm.sqlite"


class State:
    """The open state file. Every method that writes has committed when it returns."""

    def __init__(self, connection: sqlite3.Connection, path: Path) -> None:
        self._db = connection
        self.path = path

    # --- life --------------------------------------------------------------------------------

    @classmethod
    def open(cls, folder: Path) -> "State":
        """Open the state in ``folder``; make it if there is none.

        Raises:
            StateError: it is damaged, newer than this molink, or another process has it open.
        """
        path = private_folder(folder) / FILE
        connection: sqlite3.Connection | None = None
        try:
            connection = sqlite3.connect(path, timeout=5.0, isolation_level=None)
            prepare(connection, path)
        except (sqlite3.Error, StateError) as error:
            if connection is not None:
                connection.close()
            raise explain(error, path) from error
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
            except BaseException:
                self._db.execute("ROLLBACK")
                raise
            self._db.execute("COMMIT")
        except sqlite3.Error as error:
            raise explain(error, self.path) from error

    def _write(self, statement: str, *values: Any) -> None:
        with self._transaction():
            self._db.execute(statement, values)

    # --- swarm -------------------------------------------------------------------------------

    def swarm(self) -> SwarmRecord | None:
        """The swarm, if this folder holds one."""
        row = self._db.execute("SELECT id, name, public_key, port FROM swarm").fetchone()
        return SwarmRecord(*row) if row else None

    def create_swarm(self, swarm: SwarmRecord) -> None:
        """Begin a swarm."""
        self._write(
            "INSERT INTO swarm (id, name, public_key, port, created) VALUES (?, ?, ?, ?, ?)",
            swarm.id,
            swarm.name,
            swarm.public_key,
            swarm.port,
            time.time(),
        )

    def save_port(self, port: int) -> None:
        """Remember where the coordinator listens: that is where its members look for it."""
        self._write("UPDATE swarm SET port = ?", port)

    # --- members -----------------------------------------------------------------------------

    def members(self) -> list[MemberRecord]:
        """All that ever joined, in the order of joining."""
        rows = self._db.execute(
            "SELECT peer, public_key, name, owner, standing, announced FROM members "
            "ORDER BY ordinal"
        )
        return [
            MemberRecord(
                peer,
                public_key,
                name,
                bool(owner),
                standing,
                None if announced is None else msgspec.msgpack.decode(announced, type=Member),
            )
            for peer, public_key, name, owner, standing, announced in rows
        ]

    def save_member(self, member: MemberRecord) -> None:
        """Add a member, or let one in again; an owner stays one."""
        self._write(
            "INSERT INTO members (peer, public_key, name, owner, standing, joined) "
            "VALUES (?, ?, ?, ?, ?, ?) ON CONFLICT (peer) DO UPDATE SET name = excluded.name, "
            "owner = max(owner, excluded.owner), standing = excluded.standing",
            member.peer,
            member.public_key,
            member.name,
            member.owner,
            member.standing,
            time.time(),
        )

    def save_standing(self, peer: str, standing: Standing) -> None:
        """A member left, or was revoked."""
        self._write("UPDATE members SET standing = ? WHERE peer = ?", standing, peer)

    def save_announced(self, member: Member) -> None:
        """Remember what the others are told of a member."""
        self._write(
            "UPDATE members SET announced = ?, name = ? WHERE peer = ?",
            msgspec.msgpack.encode(member),
            member.name,
            member.peer,
        )

    # --- invitations -------------------------------------------------------------------------

    def invitations(self) -> list[InvitationRecord]:
        """All that haven't been deleted, oldest first."""
        rows = self._db.execute(
            "SELECT id, public_key, expires, creator FROM invitations ORDER BY created, id"
        )
        return [InvitationRecord(*row) for row in rows]

    def add_invitation(self, invitation: InvitationRecord) -> None:
        """Remember a new invitation."""
        self._write(
            "INSERT INTO invitations (id, public_key, expires, creator, created) "
            "VALUES (?, ?, ?, ?, ?)",
            invitation.id,
            invitation.public_key,
            invitation.expires,
            invitation.creator,
            time.time(),
        )

    def delete_invitation(self, id: str) -> None:
        """Forget one that has expired or was revoked."""
        self._write("DELETE FROM invitations WHERE id = ?", id)

    # --- desired and committed ---------------------------------------------------------------

    def desired(self) -> Desired | None:
        """The model to be served."""
        row = self._db.execute(
            "SELECT facts, source, min_peers, dtype, micro_batches, quantize FROM models"
        ).fetchone()
        if row is None:
            return None
        return Desired(msgspec.msgpack.decode(row[0], type=ModelFacts), *row[1:])

    def save_desired(self, desired: Desired) -> None:
        """Serve this model; a pipeline of another one, or with other weights, is forgotten."""
        facts = msgspec.msgpack.encode(desired.facts)
        with self._transaction():
            self._db.execute(
                "DELETE FROM models WHERE facts != ? OR dtype != ? OR quantize != ?",
                (facts, desired.dtype, desired.quantize),
            )
            self._db.execute(
                "INSERT INTO models (name, facts, source, min_peers, dtype, micro_batches, "
                "quantize) VALUES (?, ?, ?, ?, ?, ?, ?) ON CONFLICT (name) DO UPDATE SET "
                "facts = excluded.facts, source = excluded.source, "
                "min_peers = excluded.min_peers, dtype = excluded.dtype, "
                "micro_batches = excluded.micro_batches, quantize = excluded.quantize",
                (
                    desired.facts.name,
                    facts,
                    desired.source,
                    desired.min_peers,
                    desired.dtype,
                    desired.micro_batches,
                    desired.quantize,
                ),
            )

    def last(self) -> tuple[int, int]:
        """The number of the newest pipeline and the newest epoch, whether they still are or not."""
        row = self._db.execute("SELECT last_pipeline, last_epoch FROM swarm").fetchone()
        return (row[0], row[1]) if row else (0, 0)

    def pipeline(self) -> PipelineRecord | None:
        """The pipeline as last committed."""
        row = self._db.execute(
            "SELECT id, model, epoch, formed, blocks, micro_batches, block_size FROM pipelines"
        ).fetchone()
        if row is None:
            return None
        id, model, epoch, formed, *sizes = row
        stages = tuple(
            StageRecord(peer, (first, last), port, max_blocks, _profile(profile))
            for peer, first, last, port, max_blocks, profile in self._db.execute(
                "SELECT peer, first, last, port, max_blocks, profile FROM stages "
                "WHERE pipeline = ? ORDER BY stage",
                (id,),
            )
        )
        return PipelineRecord(id, model, epoch, stages, bool(formed), *sizes)

    def commit(self, pipeline: PipelineRecord) -> None:
        """Commit an epoch of a pipeline, or that it has formed.

        Raises:
            InvariantError: the epoch is older than one already committed.
        """
        number, epoch = self.last()
        if pipeline.epoch < epoch:
            raise InvariantError(f"epoch {pipeline.epoch} after {epoch} was committed")
        with self._transaction():
            self._db.execute("DELETE FROM pipelines")
            self._db.execute(
                "INSERT INTO pipelines (id, model, epoch, formed, blocks, micro_batches, "
                "block_size) VALUES (?, ?, ?, ?, ?, ?, ?)",
                (
                    pipeline.id,
                    pipeline.model,
                    pipeline.epoch,
                    pipeline.formed,
                    pipeline.blocks,
                    pipeline.micro_batches,
                    pipeline.block_size,
                ),
            )
            self._db.executemany(
                "INSERT INTO stages (pipeline, stage, peer, first, last, port, max_blocks, "
                "profile) VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                [
                    (pipeline.id, i, s.peer, *s.layers, s.port, s.max_blocks, _packed(s.profile))
                    for i, s in enumerate(pipeline.stages)
                ],
            )
            self._db.execute(
                "UPDATE swarm SET last_pipeline = ?, last_epoch = ?",
                (max(number, int(pipeline.id.removeprefix("p"))), pipeline.epoch),
            )


def _packed(profile: Profile) -> bytes:
    return msgspec.msgpack.encode(profile)


def _profile(packed: bytes) -> Profile:
    return msgspec.msgpack.decode(packed, type=Profile)
