"""A worker's life: load a stage, take its place in one ring after another, report, exit."""

import asyncio
import logging
import time
from collections import Counter
from functools import partial
from pathlib import Path

import zmq.asyncio

from molink.errors import MolinkError, UsageError, WorkerError
from molink.model.folder import ModelFolder
from molink.stage.stage import Stage
from molink.wire.codec import data_codec
from molink.wire.data import DataMessage
from molink.wire.keys import KeyPair, peer_id
from molink.wire.pipe import (
    Formed,
    FormRing,
    Loaded,
    Members,
    NextStageLost,
    Start,
    Stats,
    Stop,
    ToWorker,
    WorkerFailed,
)
from molink.wire.server import Sender, Server
from molink.wire.zap import Gatekeeper
from molink.worker.meter import LoopMeter
from molink.worker.pipe import DaemonPipe
from molink.worker.place import Place

log = logging.getLogger(__name__)

#: Seconds between reports of what ``/metrics`` shows, and between looks for lost daemons.
STATS_INTERVAL = 0.2
SWEEP_INTERVAL = 2.0


class Worker:
    """The shell of one stage process. ``run`` ends when the daemon says so."""

    def __init__(self, start: Start, pipe: DaemonPipe) -> None:
        self._start = start
        self._pipe = pipe
        self._context = zmq.asyncio.Context()
        self._gatekeeper = Gatekeeper(self._context)
        self._server: Server[DataMessage] = Server(
            self._context,
            KeyPair(start.public_key, start.secret_key),
            data_codec(),
            self._gatekeeper,
            self._handle,
        )
        self._orders: asyncio.Queue[ToWorker] = asyncio.Queue()
        self._place: Place | None = None
        self._meter = LoopMeter()
        #: Counters of earlier epochs: what ``/metrics`` calls a counter never falls.
        self._past: Counter[str] = Counter()

    async def run(self) -> None:
        """Load, then follow the daemon's orders.

        Raises:
            MolinkError: the stage can't be loaded or run; it has been reported on the pipe.
        """
        self._pipe.listen(asyncio.get_running_loop(), self._orders.put_nowait)
        self._gatekeeper.start()
        self._gatekeeper.allow(self._start.public_key)
        reports: asyncio.Task[None] | None = None
        try:
            stage = await self._load()
            reports = asyncio.create_task(self._report())
            await self._obey(stage)
        except MolinkError as error:
            self._pipe.send(WorkerFailed(kind=type(error).__name__, message=str(error)[:1024]))
            raise
        finally:
            if reports is not None:
                reports.cancel()
            await self._leave()
            await self._server.close()
            self._gatekeeper.close()
            self._context.term()

    # --- the daemon's orders ---------------------------------------------------------------------

    async def _load(self) -> Stage:
        """Load the stage's weights and bind the data socket."""
        start = self._start
        stage = await asyncio.to_thread(_load_stage, start)
        decode_s = await asyncio.to_thread(stage.measure_decode)
        blocks = start.kv_bytes // stage.block_bytes(start.block_size)
        if blocks < 1:
            raise WorkerError(
                f"no KV block fits {start.kv_bytes} bytes (one takes"
                f" {stage.block_bytes(start.block_size)}); give this peer more memory"
            )
        port = self._server.bind(start.bind, start.ports, "worker_ports")
        log.info("layers %d:%d loaded, %d blocks, port %d", *start.layers, blocks, port)
        self._pipe.send(
            Loaded(
                port=port,
                max_blocks=min(blocks, 2**31 - 1),
                decode_s=decode_s,
                weight_bytes=stage.weight_bytes,
            )
        )
        return stage

    async def _obey(self, stage: Stage) -> None:
        while True:
            match await self._orders.get():
                case Members() as members:
                    self._admit(members)
                case FormRing() as order:
                    await self._form(stage, order)
                case Stop():
                    return
                case Start():
                    raise WorkerError("a worker is started only once")

    def _admit(self, members: Members) -> None:
        """Let in exactly these members; whoever is missing is dropped at once."""
        wanted = {member.peer: member.public_key for member in members.members}
        wanted[peer_id(self._start.public_key)] = self._start.public_key
        for user in self._gatekeeper.users - wanted.keys():
            self._server.deny(user)
            if self._place is not None and self._place.desk is not None:
                self._place.desk.forget_owner(user, time.monotonic())
                self._place.ring.pump()
        for peer, key in wanted.items():
            if peer not in self._gatekeeper.users:
                self._gatekeeper.allow(key, peer)

    async def _form(self, stage: Stage, order: FormRing) -> None:
        """Take our place in a new ring; the old one's KV and links are gone."""
        if self._place is not None and order.epoch <= self._place.epoch:
            log.warning("ignoring epoch %d after %d", order.epoch, self._place.epoch)
            return
        await self._leave()
        await asyncio.to_thread(stage.allocate, order.blocks, self._start.block_size)
        lost = partial(self._next_lost, order.epoch)
        self._place = Place(self._start, order, stage, self._context, self._server, lost)
        self._place.open()
        self._pipe.send(Formed(epoch=order.epoch))
        log.info("in the ring of epoch %d, %d stages", order.epoch, len(order.ring))

    async def _leave(self) -> None:
        place, self._place = self._place, None
        if place is not None:
            await place.close()
            self._past.update(place.stats()[0])

    def _next_lost(self, epoch: int, reason: str) -> None:
        self._pipe.send(NextStageLost(epoch=epoch, reason=reason[:1024]))

    # --- messages and reports --------------------------------------------------------------------

    def _handle(self, sender: Sender, message: DataMessage, payload: memoryview | None) -> None:
        if self._place is not None:
            self._place.handle(sender, message, payload)

    async def _report(self) -> None:
        """Tell the daemon what ``/metrics`` shows, as soon as it changes; look for lost daemons."""
        last: Stats | None = None
        swept = time.monotonic()
        while True:
            await asyncio.sleep(STATS_INTERVAL)
            now, place = time.monotonic(), self._place
            if place is None:
                continue
            if now - swept >= SWEEP_INTERVAL and place.desk is not None:
                swept = now
                place.desk.sweep(now)
                place.ring.pump()
            stats = self._stats(place)
            if stats != last:
                last = stats
                self._pipe.send(stats)

    def _stats(self, place: Place) -> Stats:
        counters, gauges = place.stats()
        for name, value in self._past.items():
            counters[name] = counters.get(name, 0.0) + value
        counters["strangers_refused_total"] = float(self._gatekeeper.refused)
        counters["malformed_messages_total"] = float(self._server.counters.malformed)
        # Rounded, so that an idle worker has nothing new to say.
        gauges["loop_busy_share"] = round(self._meter.share(), 2)
        return Stats(epoch=place.epoch, counters=counters, gauges=gauges)


def _load_stage(start: Start) -> Stage:
    folder = ModelFolder.open(Path(start.model_dir), start.layers)
    if start.max_context > folder.config.context:
        raise UsageError(
            f"a context of {start.max_context} tokens is more than the model's"
            f" {folder.config.context}"
        )
    return Stage.load(folder, start.layers, start.device, start.dtype)
