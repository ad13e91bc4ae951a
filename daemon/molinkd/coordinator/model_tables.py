"""What is served, as wanted and as it runs: records in their tables, inside a transaction."""

import sqlite3
from collections.abc import Sequence
from typing import Any

import msgspec

from molink.facts.model import ModelFacts
from molink.facts.profile import Profile
from molink.swarm.controller.records import DesiredModel, Pin, PipelineRecord, StageRecord


class ModelTable:
    """The models to be served, in the order in which they are named."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db

    def read_all(self) -> tuple[DesiredModel, ...]:
        """All."""
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
        """Serve these; pipelines of others, or with other weights, are forgotten."""
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
        """Write it."""
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
    """The pipelines as last committed, with their stages; of each deployment one."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db

    def read_all(self) -> tuple[PipelineRecord, ...]:
        """All."""
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
        """Its epoch; 0 if it is not known."""
        row = self._db.execute("SELECT epoch FROM pipelines WHERE id = ?", (pipeline,)).fetchone()
        return row[0] if row else 0

    def replace_pipeline(self, pipeline: PipelineRecord) -> None:
        """Put it in the place of the one before, of the same deployment."""
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
    """The row of a model, its last three columns as values."""
    *plain, pins, applied, stopped = row
    bound = msgspec.msgpack.decode(pins, type=tuple[Pin, ...])
    return *plain, bound, bool(applied), bool(stopped)


def _pack_profile(profile: Profile) -> bytes:
    return msgspec.msgpack.encode(profile)


def _unpack_profile(packed: bytes) -> Profile:
    return msgspec.msgpack.decode(packed, type=Profile)
