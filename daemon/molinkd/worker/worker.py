"""The worker's life: load a stage, join one ring after another, report, exit."""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import zmq.asyncio

from molink.errors import KernelsFailed, MolinkError, WorkerError
from molink.facts.identity import derive_peer_id
from molink.facts.layer_range import format_layers
from molink.link.estimate.link_memory import LinkMemory
from molink.ring.ring_measurements import NO_HOST_MEMORY, HostMemory
from molink.scheduler.policies.answer_lengths import AnswerLengths
from molink.wire.messages.codec import DataMessage, data_codec
from molink.wire.messages.serving import Rejected, Submit
from molink.wire.messages.worker_pipe import (
    FormRing,
    LoadStage,
    NextStageLost,
    PeerBlocked,
    PeerKeys,
    Ping,
    Pong,
    RingFormed,
    ToWorker,
    WarmUp,
    WorkerFailed,
    WorkerLoaded,
    WorkerStats,
)
from molink.wire.sockets.key_pair import KeyPair
from molink.wire.sockets.server import MessageSender, Server
from molink.wire.sockets.zap import ZapAuthenticator
from molinkd.worker.daemon_pipe import DaemonPipe
from molinkd.worker.engine import LoadedStage, LoadEngine, StageEngine
from molinkd.worker.monitors import LoopMeter, SwapShortage
from molinkd.worker.stage_runtime import StageRuntime

log = logging.getLogger(__name__)

#: Seconds between statistics reports, and between checks for disconnected daemons.
STATS_INTERVAL_S = 0.2
SWEEP_INTERVAL_S = 2.0


class Worker:
    """Shell of one stage process. ``run`` ends when the daemon says so.

    ``load`` creates the engine, in production :func:`molinkd.worker.engine_loader.load_engine`.
    Nothing here imports torch, so that a worker with a fake engine starts at once.
    """

    def __init__(self, start: LoadStage, pipe: DaemonPipe, load: LoadEngine) -> None:
        self._start = start
        self._load_engine = load
        self._pipe = pipe
        self._context = zmq.asyncio.Context()
        self._authenticator = ZapAuthenticator(self._context)
        self._server: Server[DataMessage] = Server(
            self._context,
            KeyPair(start.public_key, start.secret_key),
            data_codec(),
            self._authenticator,
            self._on_message,
            on_blocked=self._on_peer_blocked,
        )
        #: Reason for each blocked peer.
        self._block_reasons: dict[str, str] = {}
        self._commands: asyncio.Queue[ToWorker | WorkerError] = asyncio.Queue()
        self._runtime: StageRuntime | None = None
        #: Port of the data socket; 0 until it is bound.
        self._port = 0
        self._link_memory = LinkMemory(_link_memory_path(start))
        #: Answer lengths learned in all epochs.
        self._answer_lengths = AnswerLengths()
        self._loop_meter = LoopMeter()
        self._swap_shortage = SwapShortage()
        #: Counters of earlier epochs: a counter in ``/metrics`` never decreases.
        self._past_counters: Counter[str] = Counter()

    async def run(self) -> None:
        """Load the stage, then execute the daemon's commands.

        Raises:
            MolinkError: the stage can't be loaded or run; the error was sent on the pipe.
        """
        self._pipe.start_listening(asyncio.get_running_loop(), self._on_command)
        self._authenticator.start()
        self._authenticator.allow_peer(self._start.public_key)
        reports: asyncio.Task[None] | None = None
        try:
            engine = await self._load_stage(self._load_engine)
            reports = asyncio.create_task(self._run_reporting())
            reports.add_done_callback(self._on_reporting_ended)
            await self._run_commands(engine)
        except MolinkError as error:
            kind, message = type(error).__name__, str(error)[:1024]
            kernels = error.kernels if isinstance(error, KernelsFailed) else ()
            self._pipe.send(WorkerFailed(kind=kind, message=message, failed_kernels=kernels))
            raise
        finally:
            if reports is not None:
                reports.cancel()
            await self._leave_ring()
            await self._server.close()
            self._authenticator.close()
            self._context.term()

    # --- the daemon's orders ---------------------------------------------------------------------

    def _on_command(self, message: ToWorker) -> None:
        """Queue a command of the daemon; answer a ping at once."""
        if isinstance(message, Ping):
            self._pipe.send(
                Pong(is_stuck=self._runtime is not None and self._runtime.ring.is_stuck)
            )
        else:
            self._commands.put_nowait(message)

    async def _load_stage(self, load: LoadEngine) -> StageEngine:
        """Load the stage's weights, and bind the data socket if it is not bound yet."""
        start, began = self._start, time.perf_counter()
        layers = format_layers(start.layers)
        with _convert_errors(f"layers {layers} can't run on {start.device}"):
            engine = await asyncio.to_thread(load, start)
        stage = engine.stage
        blocks = stage.count_blocks(start.kv_bytes, start.block_size)
        if blocks < 1:
            raise WorkerError(
                f"no KV block fits {start.kv_bytes} bytes (one takes "
                f"{stage.pool_bytes(1, start.block_size)}); give this peer more memory"
            )
        if not self._port:
            self._port = self._server.bind(start.bind, start.ports, "worker_ports")
        log.info("layers %s loaded, %d blocks, port %d", layers, blocks, self._port)
        self._pipe.send(
            WorkerLoaded(
                port=self._port,
                max_blocks=min(blocks, 2**31 - 1),
                profile=engine.profile,
                weight_bytes=stage.weight_bytes,
                weights_s=max(0.0, time.perf_counter() - began - engine.profile_s),
                profile_s=engine.profile_s,
            )
        )
        return engine

    async def _run_commands(self, engine: StageEngine) -> None:
        while True:
            match await self._commands.get():
                case PeerKeys() as members:
                    self._update_peers(members)
                case FormRing() as command:
                    await self._form_ring(engine, command)
                case LoadStage() as start:
                    engine = await self._reload_stage(engine, start)
                case WarmUp():
                    raise WorkerError("a worker with a stage can't be a standby worker")
                case Ping():
                    raise WorkerError("a ping is not a command")
                case WorkerError() as error:
                    raise error

    async def _reload_stage(self, engine: StageEngine, start: LoadStage) -> StageEngine:
        """Leave the ring and load other layers."""
        await self._leave_ring()
        self._start = start
        return await self._load_stage(engine.reload or self._load_engine)

    def _update_peers(self, members: PeerKeys) -> None:
        """Allow exactly these peers; drop all others at once."""
        wanted = {member.peer: member.public_key for member in members.peers}
        wanted[derive_peer_id(self._start.public_key)] = self._start.public_key
        for user in (self._authenticator.peers | self._authenticator.blocked) - wanted.keys():
            self._server.drop_peer(user)
            self._block_reasons.pop(user, None)
            if self._runtime is not None and self._runtime.receiver is not None:
                self._runtime.receiver.drop_peer(user, time.perf_counter())
                self._runtime.ring.run_pending()
        for peer, key in wanted.items():
            if peer not in self._authenticator.peers:
                self._authenticator.allow_peer(key, peer)

    async def _form_ring(self, engine: StageEngine, command: FormRing) -> None:
        """Join a new ring; KV and links of the old one are dropped.

        The command may be repeated if its answer was lost.
        """
        if self._runtime is not None and command.epoch <= self._runtime.epoch:
            if command.epoch == self._runtime.epoch:
                self._pipe.send(RingFormed(epoch=command.epoch))
            else:
                log.warning("ignoring epoch %d after %d", command.epoch, self._runtime.epoch)
            return
        await self._leave_ring()
        stage, size = engine.stage, self._start.block_size
        nbytes = stage.pool_bytes(command.blocks, size)
        with _convert_errors(
            f"no memory on {self._start.device} for {command.blocks} KV blocks ({nbytes >> 20} MiB)"
            f" besides {stage.weight_bytes >> 20} MiB of weights; let this peer use less memory"
        ):
            await asyncio.to_thread(stage.allocate_kv_pool, command.blocks, size)
        host = await asyncio.to_thread(_open_host_pool, stage, self._start)
        lost = partial(self._report_next_stage_lost, command.epoch)
        self._runtime = StageRuntime(
            self._start,
            command,
            engine,
            self._context,
            self._server,
            lost,
            self._on_fatal_error,
            self._link_memory,
            host,
            self._answer_lengths,
        )
        self._runtime.open()
        self._pipe.send(RingFormed(epoch=command.epoch))
        log.info("joined the ring of epoch %d with %d stages", command.epoch, len(command.ring))
        before = self._runtime.previous_peer
        if before in self._block_reasons:
            self._on_peer_blocked(before, self._block_reasons[before])

    async def _leave_ring(self) -> None:
        runtime, self._runtime = self._runtime, None
        if runtime is not None:
            await runtime.close()
            self._past_counters.update(runtime.collect_stats()[0])

    def _on_fatal_error(self, reason: str) -> None:
        """Report that this process can't continue; the daemon starts another."""
        self._commands.put_nowait(WorkerError(reason))

    def _report_next_stage_lost(self, epoch: int, reason: str) -> None:
        self._pipe.send(NextStageLost(epoch=epoch, reason=reason[:1024]))

    def _on_peer_blocked(self, user: str, reason: str) -> None:
        """Report a blocked peer; otherwise this stage would be taken for dead."""
        self._block_reasons[user] = reason
        runtime = self._runtime
        self._pipe.send(
            PeerBlocked(
                epoch=0 if runtime is None else runtime.epoch,
                peer=user,
                reason=reason[:1024],
                is_previous_stage=runtime is not None and runtime.previous_peer == user,
            )
        )

    # --- messages and reports --------------------------------------------------------------------

    def _on_message(
        self, sender: MessageSender, message: DataMessage, payload: memoryview | None
    ) -> None:
        if self._runtime is not None:
            self._runtime.handle_message(sender, message, payload)
        elif isinstance(message, Submit):
            rejected = Rejected(message.epoch, message.key, "epoch", "the ring is being formed")
            self._server.send(sender.identity, rejected)

    def _on_reporting_ended(self, reports: asyncio.Task[None]) -> None:
        if not reports.cancelled() and (error := reports.exception()) is not None:
            log.error("reporting failed", exc_info=error)
            self._on_fatal_error(f"reporting failed: {error!r}")

    async def _run_reporting(self) -> None:
        """Report statistics to the daemon as they change, and drop disconnected daemons."""
        last: WorkerStats | None = None
        swept = time.perf_counter()
        while True:
            await asyncio.sleep(STATS_INTERVAL_S)
            now, runtime = time.perf_counter(), self._runtime
            if runtime is None:
                continue
            if runtime.receiver is not None:
                runtime.receiver.expire_requests(now)
            if now - swept >= SWEEP_INTERVAL_S and runtime.receiver is not None:
                swept = now
                runtime.receiver.sweep_connections(now)
                runtime.ring.run_pending()
            stats = self._collect_stats(runtime)
            if (text := self._swap_shortage.check_stats(stats, now)) is not None:
                log.warning("%s", text)
            if stats != last:
                last = stats
                self._pipe.send(stats)

    def _collect_stats(self, runtime: StageRuntime) -> WorkerStats:
        counters, gauges = runtime.collect_stats()
        for name, value in self._past_counters.items():
            counters[name] = counters.get(name, 0.0) + value
        counters["strangers_refused_total"] = float(self._authenticator.refused)
        counters["malformed_messages_total"] = float(self._server.counters.malformed)
        counters["members_blocked_total"] = float(self._server.counters.blocked)
        # Rounded so that an idle worker sends no reports.
        gauges["loop_busy_share"] = round(self._loop_meter.measure_busy_share(), 2)
        return WorkerStats(
            epoch=runtime.epoch,
            counters=counters,
            gauges=gauges,
            load=runtime.report_load(),
            scheduler=runtime.report_scheduler_load(),
        )


@contextmanager
def _convert_errors(what: str) -> Iterator[None]:
    """Convert library exceptions, such as out of memory, to :class:`WorkerError` with ``what``.

    Otherwise the daemon would see the error only in the worker's log.
    """
    try:
        yield
    except MolinkError:
        raise
    except Exception as error:
        raise WorkerError(f"{what}: {type(error).__name__}: {error}") from error


def _open_host_pool(stage: LoadedStage, start: LoadStage) -> HostMemory:
    """Allocate host memory for preempted requests' KV; none where preemption recomputes."""
    settings = start.settings
    if settings.preemption_mode == "recompute" or not settings.swap_space:
        return NO_HOST_MEMORY
    blocks, block_s = stage.open_host_pool(settings.swap_space, start.stages_per_host)
    log.info("host memory for %d KV blocks, %.3f ms each way", blocks, 1000 * block_s)
    return HostMemory(blocks, block_s)


def _link_memory_path(start: LoadStage) -> Path | None:
    return Path(start.profile_cache) / "links" / "peers.json" if start.profile_cache else None
