"""A worker's life: load a stage, take its place in one ring after another, report, exit."""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import zmq.asyncio

from molink.errors import MolinkError, WorkerError
from molink.facts.identity import peer_id
from molink.link.estimate.remembered import LinkMemory
from molink.ring.hosted import NO_ROOM, HostRoom
from molink.scheduler.policies.lengths import AnswerLengths
from molink.wire.messages.codec import DataMessage, data_codec
from molink.wire.messages.pipe import (
    Formed,
    FormRing,
    Loaded,
    MemberBlocked,
    Members,
    NextStageLost,
    Ping,
    Pong,
    Start,
    Stats,
    ToWorker,
    Warm,
    WorkerFailed,
)
from molink.wire.messages.serving import Rejected, Submit
from molink.wire.sockets.curve import KeyPair
from molink.wire.sockets.server import Sender, Server
from molink.wire.sockets.zap import Gatekeeper
from molinkd.worker.daemon_pipe import DaemonPipe
from molinkd.worker.engine import Engine, LoadedStage, LoadEngine
from molinkd.worker.meter import LoopMeter
from molinkd.worker.place import Place
from molinkd.worker.shortage import Shortage

log = logging.getLogger(__name__)

#: Seconds between reports of what ``/metrics`` shows, and between looks for lost daemons.
STATS_INTERVAL = 0.2
SWEEP_INTERVAL = 2.0


class Worker:
    """The shell of one stage process. ``run`` ends when the daemon says so.

    ``load`` makes what computes: in the product :func:`molinkd.worker.loading.load_engine`. Here
    nothing imports torch, so that one which computes nothing starts at once.
    """

    def __init__(self, start: Start, pipe: DaemonPipe, load: LoadEngine) -> None:
        self._start = start
        self._load_engine = load
        self._pipe = pipe
        self._context = zmq.asyncio.Context()
        self._gatekeeper = Gatekeeper(self._context)
        self._server: Server[DataMessage] = Server(
            self._context,
            KeyPair(start.public_key, start.secret_key),
            data_codec(),
            self._gatekeeper,
            self._handle,
            on_blocked=self._blocked,
        )
        #: Why each member that was cut off was.
        self._blocks: dict[str, str] = {}
        self._orders: asyncio.Queue[ToWorker | WorkerError] = asyncio.Queue()
        self._place: Place | None = None
        #: Of the data socket; 0 until it is bound.
        self._port = 0
        self._links = LinkMemory(_links_file(start))
        #: What heads of all epochs have learned of answers.
        self._answers = AnswerLengths()
        self._meter = LoopMeter()
        self._shortage = Shortage()
        #: Counters of earlier epochs: what ``/metrics`` calls a counter never falls.
        self._past: Counter[str] = Counter()

    async def run(self) -> None:
        """Load, then follow the daemon's orders.

        Raises:
            MolinkError: the stage can't be loaded or run; it has been reported on the pipe.
        """
        self._pipe.listen(asyncio.get_running_loop(), self._told)
        self._gatekeeper.start()
        self._gatekeeper.allow(self._start.public_key)
        reports: asyncio.Task[None] | None = None
        try:
            engine = await self._load(self._load_engine)
            reports = asyncio.create_task(self._report())
            reports.add_done_callback(self._report_ended)
            await self._obey(engine)
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

    def _told(self, message: ToWorker) -> None:
        """A message came on the pipe. Orders are obeyed one after another, a ping at once."""
        if isinstance(message, Ping):
            self._pipe.send(Pong(stuck=self._place is not None and self._place.ring.stuck))
        else:
            self._orders.put_nowait(message)

    async def _load(self, load: LoadEngine) -> Engine:
        """Load the stage's weights and bind the data socket, unless it is bound."""
        start, began = self._start, time.perf_counter()
        with _failing(f"layers {start.layers[0]}:{start.layers[1]} can't run on {start.device}"):
            engine = await asyncio.to_thread(load, start)
        stage = engine.stage
        blocks = start.kv_bytes // stage.block_bytes(start.block_size)
        if blocks < 1:
            raise WorkerError(
                f"no KV block fits {start.kv_bytes} bytes (one takes"
                f" {stage.block_bytes(start.block_size)}); give this peer more memory"
            )
        if not self._port:
            self._port = self._server.bind(start.bind, start.ports, "worker_ports")
        log.info("layers %d:%d loaded, %d blocks, port %d", *start.layers, blocks, self._port)
        self._pipe.send(
            Loaded(
                port=self._port,
                max_blocks=min(blocks, 2**31 - 1),
                profile=engine.profile,
                weight_bytes=stage.weight_bytes,
                weights_s=max(0.0, time.perf_counter() - began - engine.profile_s),
                profile_s=engine.profile_s,
            )
        )
        return engine

    async def _obey(self, engine: Engine) -> None:
        while True:
            match await self._orders.get():
                case Members() as members:
                    self._admit(members)
                case FormRing() as order:
                    await self._form(engine, order)
                case Start() as start:
                    engine = await self._change(engine, start)
                case Warm():
                    raise WorkerError("a worker that has a stage is no spare")
                case Ping():
                    raise WorkerError("a ping is no order")
                case WorkerError() as error:
                    raise error

    async def _change(self, engine: Engine, start: Start) -> Engine:
        """Hold other layers from now on, in no ring at first."""
        await self._leave()
        self._start = start
        return await self._load(engine.change or self._load_engine)

    def _admit(self, members: Members) -> None:
        """Let in exactly these members; whoever is missing is dropped at once."""
        wanted = {member.peer: member.public_key for member in members.members}
        wanted[peer_id(self._start.public_key)] = self._start.public_key
        for user in (self._gatekeeper.users | self._gatekeeper.blocked) - wanted.keys():
            self._server.deny(user)
            self._blocks.pop(user, None)
            if self._place is not None and self._place.desk is not None:
                self._place.desk.forget_owner(user, time.perf_counter())
                self._place.ring.pump()
        for peer, key in wanted.items():
            if peer not in self._gatekeeper.users:
                self._gatekeeper.allow(key, peer)

    async def _form(self, engine: Engine, order: FormRing) -> None:
        """Take our place in a new ring; the old one's KV and links are gone.

        The order may be repeated by who has not heard the answer.
        """
        if self._place is not None and order.epoch <= self._place.epoch:
            if order.epoch == self._place.epoch:
                self._pipe.send(Formed(epoch=order.epoch))
            else:
                log.warning("ignoring epoch %d after %d", order.epoch, self._place.epoch)
            return
        await self._leave()
        stage, size = engine.stage, self._start.block_size
        nbytes = order.blocks * stage.block_bytes(size)
        with _failing(
            f"no memory on {self._start.device} for {order.blocks} KV blocks ({nbytes >> 20} MiB)"
            f" beside {stage.weight_bytes >> 20} MiB of weights; give this peer less to use"
        ):
            await asyncio.to_thread(stage.allocate, order.blocks, size)
        host = await asyncio.to_thread(_host_room, stage, self._start)
        lost = partial(self._next_lost, order.epoch)
        self._place = Place(
            self._start,
            order,
            engine,
            self._context,
            self._server,
            lost,
            self._broken,
            self._links,
            host,
            self._answers,
        )
        self._place.open()
        self._pipe.send(Formed(epoch=order.epoch))
        log.info("in the ring of epoch %d, %d stages", order.epoch, len(order.ring))
        before = self._place.previous_peer
        if before in self._blocks:
            self._blocked(before, self._blocks[before])

    async def _leave(self) -> None:
        place, self._place = self._place, None
        if place is not None:
            await place.close()
            self._past.update(place.stats()[0])

    def _broken(self, reason: str) -> None:
        """This process can't go on; its daemon starts another."""
        self._orders.put_nowait(WorkerError(reason))

    def _next_lost(self, epoch: int, reason: str) -> None:
        self._pipe.send(NextStageLost(epoch=epoch, reason=reason[:1024]))

    def _blocked(self, user: str, reason: str) -> None:
        """The server has cut off a member: say so, or this stage will be taken for dead."""
        self._blocks[user] = reason
        place = self._place
        self._pipe.send(
            MemberBlocked(
                epoch=0 if place is None else place.epoch,
                peer=user,
                reason=reason[:1024],
                previous=place is not None and place.previous_peer == user,
            )
        )

    # --- messages and reports --------------------------------------------------------------------

    def _handle(self, sender: Sender, message: DataMessage, payload: memoryview | None) -> None:
        if self._place is not None:
            self._place.handle(sender, message, payload)
        elif isinstance(message, Submit):
            rejected = Rejected(message.epoch, message.key, "epoch", "the ring is being formed")
            self._server.send(sender.identity, rejected)

    def _report_ended(self, reports: asyncio.Task[None]) -> None:
        if not reports.cancelled() and (error := reports.exception()) is not None:
            log.error("reporting failed", exc_info=error)
            self._broken(f"reporting failed: {error!r}")

    async def _report(self) -> None:
        """Tell the daemon what ``/metrics`` shows, as soon as it changes; look for lost daemons."""
        last: Stats | None = None
        swept = time.perf_counter()
        while True:
            await asyncio.sleep(STATS_INTERVAL)
            now, place = time.perf_counter(), self._place
            if place is None:
                continue
            if place.desk is not None:
                place.desk.expire(now)
            if now - swept >= SWEEP_INTERVAL and place.desk is not None:
                swept = now
                place.desk.sweep(now)
                place.ring.pump()
            stats = self._stats(place)
            if (text := self._shortage.look(stats, now)) is not None:
                log.warning("%s", text)
            if stats != last:
                last = stats
                self._pipe.send(stats)

    def _stats(self, place: Place) -> Stats:
        counters, gauges = place.stats()
        for name, value in self._past.items():
            counters[name] = counters.get(name, 0.0) + value
        counters["strangers_refused_total"] = float(self._gatekeeper.refused)
        counters["malformed_messages_total"] = float(self._server.counters.malformed)
        counters["members_blocked_total"] = float(self._server.counters.blocked)
        # Rounded, so that an idle worker has nothing new to say.
        gauges["loop_busy_share"] = round(self._meter.share(), 2)
        return Stats(
            epoch=place.epoch,
            counters=counters,
            gauges=gauges,
            load=place.load(),
            head=place.head_load(),
        )


@contextmanager
def _failing(what: str) -> Iterator[None]:
    """Whatever a library raises (out of memory, say) becomes a :class:`WorkerError` with ``what``.

    Otherwise the daemon would learn of it by the worker's last line of log only.
    """
    try:
        yield
    except MolinkError:
        raise
    except Exception as error:
        raise WorkerError(f"{what}: {type(error).__name__}: {error}") from error


def _host_room(stage: LoadedStage, start: Start) -> HostRoom:
    """Host memory for the KV of requests that give way; none where that is computed anew."""
    settings = start.settings
    if settings.preemption_mode == "recompute" or not settings.swap_space:
        return NO_ROOM
    blocks, block_s = stage.open_host(settings.swap_space, start.stages_here)
    log.info("host memory for %d KV blocks, %.3f ms each way", blocks, 1000 * block_s)
    return HostRoom(blocks, block_s)


def _links_file(start: Start) -> Path | None:
    return Path(start.profile_cache) / "links" / "peers.json" if start.profile_cache else None
