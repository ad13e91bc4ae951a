"""What is served, as wanted and as it runs: records in their tables, inside a transaction."""

import sqlite3

import msgspec

from molink.facts.model import ModelFacts
from molink.facts.profile import Profile
from molink.swarm.records import Desired, PipelineRecord, StageRecord


class ModelTable:
    """The model to be served."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db

    def read(self) -> Desired | None:
        """It, if there is one."""
        row = self._db.execute(
            "SELECT facts, source, min_peers, dtype, micro_batches, quantize, objective, "
            "min_stages FROM models"
        ).fetchone()
        if row is None:
            return None
        return Desired(msgspec.msgpack.decode(row[0], type=ModelFacts), *row[1:])

    def replace(self, desired: Desired | None) -> None:
        """Serve this one; a pipeline of another one, or with other weights, is forgotten."""
        if desired is None:
            self._db.execute("DELETE FROM models")
            return
        self._db.execute(
            "DELETE FROM models WHERE facts != ? OR dtype != ? OR quantize != ?",
            (msgspec.msgpack.encode(desired.facts), desired.dtype, desired.quantize),
        )
        self.put(desired)

    def put(self, desired: Desired) -> None:
        """Write it."""
        self._db.execute(
            "INSERT INTO models (name, facts, source, min_peers, dtype, micro_batches, "
            "quantize, objective, min_stages) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?) "
            "ON CONFLICT (name) DO UPDATE SET "
            "facts = excluded.facts, source = excluded.source, "
            "min_peers = excluded.min_peers, dtype = excluded.dtype, "
            "micro_batches = excluded.micro_batches, quantize = excluded.quantize, "
            "objective = excluded.objective, min_stages = excluded.min_stages",
            (
                desired.facts.name,
                msgspec.msgpack.encode(desired.facts),
                desired.source,
                desired.min_peers,
                desired.dtype,
                desired.micro_batches,
                desired.quantize,
                desired.objective,
                desired.min_stages,
            ),
        )


class PipelineTable:
    """The pipeline as last committed, with its stages."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db

    def read(self) -> PipelineRecord | None:
        """It, if there is one."""
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

    def replace(self, pipeline: PipelineRecord) -> None:
        """Put it in the place of the one before."""
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


def _packed(profile: Profile) -> bytes:
    return msgspec.msgpack.encode(profile)


def _profile(packed: bytes) -> Profile:
    return msgspec.msgpack.decode(packed, type=Profile)
