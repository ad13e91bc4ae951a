"""Starts, stops and talks to this peer's worker processes. All decisions are the stage agent's."""

import asyncio
import contextlib
import io
import logging
import re
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import BinaryIO

import msgspec
import psutil

from molink.facts.layer_range import format_layers, stage_number
from molink.files import make_plain_name
from molink.swarm.agent.stage_agent import WorkerMessage
from molink.swarm.artifacts.transfer import TransferRate
from molink.wire.messages.load import MAX_SCHEDULERS, MAX_STAGES, PeerLoad
from molink.wire.messages.worker_pipe import (
    FromWorker,
    LoadStage,
    PeerKeys,
    ToWorker,
    WarmedUp,
    WarmUp,
    WeightLoadProgress,
    WorkerLoaded,
    WorkerStats,
    read_pipe,
    write_pipe,
)
from molinkd.api.backend import MetricValues, StageLabels, StageMetricValues
from molinkd.child_process import FIRST_WINDOWS_CODE, ChildProcess, exit_text
from molinkd.peer.agent.pause_controller import OwnGpuUsage

log = logging.getLogger(__name__)

#: Grace period before a worker is terminated, and then killed, in seconds.
GRACE_S = 5.0
#: ``-P`` keeps folders named molink or torch in the working directory from being imported.
WORKER_COMMAND = (sys.executable, "-P", "-m", "molinkd.worker")
#: Delay from a formed ring to the next standby worker, in seconds: requests are replayed first.
STANDBY_DELAY_S = 2.0
#: Longest wait for a standby worker to become ready, in seconds.
STANDBY_WAIT_S = 15.0
#: Standby workers of a PC with free memory. The second one serves while the first is replaced,
#: which takes 2 CPU seconds and so a multiple on a busy PC.
MAX_STANDBYS = 2
#: Bytes of free memory from which on a PC keeps more than one.
MANY_STANDBYS_BYTES = 4 << 30
#: Stages whose counters are kept after their workers have exited.
MAX_RETIRED_STAGES = 32
#: A log record in the format :data:`molink.plaintext.LOG_FORMAT`.
_LOG_RECORD = re.compile(r"\d{4}-\d\d-\d\d \S+ (?P<level>[A-Z]+) \S+: (?P<text>.*)")


@dataclass(slots=True, eq=False)
class _WorkerProcess:
    child: ChildProcess = field(init=False)
    #: ``None`` for a standby worker.
    start: LoadStage | None = None
    generation: int = 0
    #: What a standby worker was told to prepare for, and whether it has finished that.
    warm_up: WarmUp | None = None
    is_warm: bool = False
    stats: WorkerStats | None = None
    #: Progress and rate of loading weights.
    load_progress: WeightLoadProgress | None = None
    load_rate: TransferRate | None = None
    #: Whether it has sent a message; before that it has no state to save, and may be killed.
    has_spoken: bool = False
    is_stopping: bool = False


class WorkerSupervisor:
    """Worker processes by generation, and standby workers.

    See :mod:`molink.swarm.agent.stage_agent` for generations. A standby worker imports torch and
    compiles kernels before a stage needs it.
    """

    def __init__(
        self,
        logs: Path,
        on_message: Callable[[int, WorkerMessage], None],
        on_exit: Callable[[int, str], None],
        command: tuple[str, ...] = WORKER_COMMAND,
    ) -> None:
        """``on_exit`` gets the generation of a worker that exited unexpectedly, and the reason."""
        self._logs = logs
        self._on_message = on_message
        self._on_exit = on_exit
        self._command = command
        self._workers: dict[int, _WorkerProcess] = {}
        #: The oldest first.
        self._standbys: list[_WorkerProcess] = []
        self._standby_timer: asyncio.TimerHandle | None = None
        #: Set when a standby worker becomes ready or is gone.
        self._standby_changed = asyncio.Event()
        self._stopping: set[asyncio.Task[None]] = set()
        self._closed = False
        #: Counters of exited workers, which keep the totals monotonic.
        self._retired_counters: dict[StageLabels, Counter[str]] = {}

    def start_worker(self, generation: int, start: LoadStage, peer_keys: PeerKeys) -> int:
        """Start a stage's worker, or assign a standby worker; returns the process id.

        A standby worker that is still preparing is ahead of a new process.

        Raises:
            OSError: The process can't be started.
        """
        standbys = [one for one in self._standbys if one.is_warm] or self._standbys
        if standbys:
            worker = standbys[0]
            self._standbys.remove(worker)
        else:
            worker = self._launch_process(*self._worker_names(start))
        worker.generation = generation
        self._workers[generation] = worker
        self.send_to_worker(generation, start)
        self.send_to_worker(generation, peer_keys)
        pid, was = worker.child.pid, " (standby)" if worker.warm_up is not None else ""
        number, layers = stage_number(start.stage), format_layers(start.layers)
        log.info("worker %d%s: stage %d, layers %s", pid, was, number, layers)
        return pid

    def _worker_names(self, start: LoadStage) -> tuple[str, Path]:
        """Process name and log file of a stage's worker."""
        name = f"worker-{make_plain_name(start.pipeline, 'p')}-{start.stage}"
        return name, self._logs / f"{name}.log"

    def start_standby(self) -> None:
        """Start a standby worker before the first stage is assigned."""
        if not self._standbys and self._standby_timer is None and not self._closed:
            self._launch_standby(WarmUp())

    async def wait_until_ready(self) -> None:
        """Wait up to :data:`STANDBY_WAIT_S` until a first worker could start at once.

        Waits for a starting standby worker. A PC that already has a worker does not wait, because
        its next stage may reuse that process.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STANDBY_WAIT_S):
                while (
                    self._standbys
                    and not any(one.is_warm for one in self._standbys)
                    and not self._workers
                ):
                    self._standby_changed.clear()
                    await self._standby_changed.wait()

    def drop_standbys(self) -> None:
        """Stop the standby workers to free their memory."""
        if self._standby_timer is not None:
            self._standby_timer.cancel()
            self._standby_timer = None
        standbys, self._standbys = self._standbys, []
        for worker in standbys:
            self._stop_process(worker)

    @property
    def own_gpu_usage(self) -> OwnGpuUsage:
        """GPU use of the worker processes; counts as full while one is still loading."""
        busy = sum(one.busy for one in self.measure_load().stages) / 100
        workers = [*self._workers.values()]
        stages = [one.stats.load if one.stats is not None else None for one in workers]
        if None in stages or not all(one.is_warm for one in self._standbys):
            busy = 1.0  # loading, profiling and compiling are not measured
        return OwnGpuUsage([one.child.pid for one in (*workers, *self._standbys)], min(1.0, busy))

    def schedule_standby(self, generation: int) -> None:
        """Start a standby worker soon, warmed up for the stage of ``generation``."""
        if self._standby_timer is not None or self._closed:
            return
        worker = self._workers.get(generation)
        if worker is None or worker.start is None:
            return
        loop = asyncio.get_running_loop()
        self._standby_timer = loop.call_later(
            STANDBY_DELAY_S, self._launch_standby, _warm_up_of(worker.start)
        )

    def _launch_standby(self, warm_up: WarmUp) -> None:
        """Start a standby worker unless there are enough; once it is ready, another may follow."""
        self._standby_timer = None
        has_memory = psutil.virtual_memory().available >= MANY_STANDBYS_BYTES
        if len(self._standbys) >= (MAX_STANDBYS if has_memory else 1):
            return
        try:
            worker = self._launch_process("worker-standby", self._logs / "worker-standby.log")
        except OSError as error:
            log.warning("no standby worker: %s", error)
            return
        worker.warm_up = warm_up
        self._standbys.append(worker)
        self._write_message(worker, warm_up)

    def _launch_process(self, name: str, log_file: Path) -> _WorkerProcess:
        decoder: msgspec.msgpack.Decoder[FromWorker] = msgspec.msgpack.Decoder(FromWorker)

        def read(stream: BinaryIO) -> object | None:
            return read_pipe(stream, decoder)

        worker = _WorkerProcess()
        worker.child = ChildProcess(
            name,
            self._command,
            reader=read,
            on_message=partial(self._on_worker_message, worker),
            on_exit=partial(self._on_worker_exit, worker),
            log_file=log_file,
            computes=True,
        )
        worker.child.start()
        return worker

    def send_to_worker(self, generation: int, message: ToWorker) -> None:
        """Send to the worker of ``generation``, if it exists."""
        worker = self._workers.get(generation)
        if worker is None:
            return
        if isinstance(message, LoadStage):
            worker.start, worker.load_progress, worker.load_rate = message, None, None
            worker.child.set_name(*self._worker_names(message))
        self._write_message(worker, message)

    def _write_message(self, worker: _WorkerProcess, message: ToWorker) -> None:
        buffer = io.BytesIO()
        write_pipe(buffer, message)
        worker.child.send(buffer.getvalue())

    def broadcast_message(self, message: ToWorker) -> None:
        """Send to all workers."""
        for generation in self._workers:
            self.send_to_worker(generation, message)

    def stop_worker(self, generation: int, *, kill: bool = False) -> None:
        """Stop a worker by closing its pipe, or ``kill`` it; returns immediately.

        A worker that has not sent a message yet is always killed.
        """
        worker = self._workers.get(generation)
        if worker is not None:
            self._stop_process(worker, kill=kill)

    def _stop_process(self, worker: _WorkerProcess, *, kill: bool = False) -> None:
        if worker.is_stopping:
            return
        worker.is_stopping = True
        # A silent one would keep loading for seconds while its replacement loads too.
        kill |= not worker.has_spoken
        task = asyncio.get_running_loop().create_task(worker.child.stop(GRACE_S, kill=kill))
        self._stopping.add(task)
        task.add_done_callback(self._stopping.discard)

    async def close(self) -> None:
        """Stop all workers and wait for their exit."""
        self._closed = True
        if self._standby_timer is not None:
            self._standby_timer.cancel()
        for worker in (*self._workers.values(), *self._standbys):
            self._stop_process(worker)
        await asyncio.gather(*self._stopping)

    def collect_metrics(self) -> MetricValues:
        """Counters of all workers, including exited ones, and gauges of running ones, by stage."""
        gauges = {
            "workers": float(len(self._workers)),
            "standby_workers": float(sum(one.is_warm for one in list(self._standbys))),
        }
        stages = {
            name: StageMetricValues(dict(past))
            for name, past in list(self._retired_counters.items())
        }
        for worker in list(self._workers.values()):  # called from the API thread
            if worker.stats is None or worker.start is None:
                continue
            figures = stages.setdefault(_stage_name(worker.start), StageMetricValues())
            for name, count in worker.stats.counters.items():
                figures.counters[name] = figures.counters.get(name, 0.0) + count
            figures.gauges.update(worker.stats.gauges)
        return MetricValues({}, gauges, stages)

    def _retire_counters(self, name: StageLabels, counters: Mapping[str, float]) -> None:
        """Keep an exited worker's counters, for the last :data:`MAX_RETIRED_STAGES` stages."""
        past = self._retired_counters.pop(name, Counter())
        past.update(counters)
        self._retired_counters[name] = past
        while len(self._retired_counters) > MAX_RETIRED_STAGES:
            del self._retired_counters[next(iter(self._retired_counters))]

    def measure_load(self) -> PeerLoad:
        """Load of the stages and schedulers of this PC."""
        reported = [worker.stats for worker in self._workers.values() if worker.stats is not None]
        stages = [stats.load for stats in reported if stats.load is not None]
        schedulers = [stats.scheduler for stats in reported if stats.scheduler is not None]
        return PeerLoad(tuple(stages[:MAX_STAGES]), tuple(schedulers[:MAX_SCHEDULERS]))

    def loading_progress(self) -> dict[int, tuple[int, int, int]]:
        """By generation: bytes loaded, bytes in total, and bytes/s."""
        return {
            generation: (
                worker.load_progress.done,
                worker.load_progress.total,
                round(worker.load_rate.rate),
            )
            for generation, worker in self._workers.items()
            if worker.load_progress is not None and worker.load_rate is not None
        }

    def read_gauge(self, pipeline: str, name: str) -> float | None:
        """A gauge of the worker of ``pipeline``; 0 until reported, ``None`` without a worker."""
        for worker in self._workers.values():
            if worker.start is not None and worker.start.pipeline == pipeline:
                return worker.stats.gauges.get(name, 0.0) if worker.stats is not None else 0.0
        return None

    def read_gauges(self, name: str) -> dict[str, float]:
        """A gauge of all workers that reported it, by pipeline."""
        return {
            worker.start.pipeline: worker.stats.gauges[name]
            for worker in self._workers.values()
            if worker.start is not None and worker.stats is not None and name in worker.stats.gauges
        }

    def _on_worker_message(self, worker: _WorkerProcess, message: object) -> None:
        if worker.is_stopping:
            return
        if isinstance(message, WeightLoadProgress):
            now = asyncio.get_running_loop().time()
            worker.load_progress, worker.load_rate = (
                message,
                worker.load_rate or TransferRate(now, message.done),
            )
            worker.load_rate.observe_bytes(message.done, now)
            return
        worker.has_spoken = True
        if isinstance(message, WorkerLoaded):
            worker.load_progress = None
        if isinstance(message, WarmedUp):
            worker.is_warm = True
            self._standby_changed.set()
            if worker in self._standbys and worker.warm_up is not None and worker.warm_up.model_dir:
                self._launch_standby(worker.warm_up)
        elif isinstance(message, WorkerStats):
            worker.stats = message
        elif isinstance(message, WorkerMessage) and worker.start is not None:
            self._on_message(worker.generation, message)

    def _on_worker_exit(self, worker: _WorkerProcess, code: int) -> None:
        if worker in self._standbys:
            self._standbys.remove(worker)
            self._standby_changed.set()
        if worker.start is not None:
            del self._workers[worker.generation]
        if worker.stats is not None and worker.start is not None:
            self._retire_counters(_stage_name(worker.start), worker.stats.counters)
        if worker.is_stopping:
            return
        log.warning("%s (pid %d) exited with %d", worker.child.name, worker.child.pid, code)
        if worker.start is not None:
            self._on_exit(worker.generation, exit_reason(code, worker.child.tail))


def _stage_name(start: LoadStage) -> StageLabels:
    return StageLabels.for_stage(start.pipeline, start.layers, start.stage, start.stages)


def _warm_up_of(start: LoadStage) -> WarmUp:
    return WarmUp(
        layers=start.layers,
        model_dir=start.model_dir,
        dtype=start.dtype,
        device=start.device,
        threads=start.threads,
        block_size=start.block_size,
        quantize=start.quantize,
        kv_cache_dtype=start.kv_cache_dtype,
    )


def exit_reason(code: int, tail: str) -> str:
    """One line about a worker that exited unexpectedly; clients may read it.

    Quotes the last log line only if it explains the exit. For a killed process that line is
    unrelated, and may be private.
    """
    reported = ""
    if 0 < code < FIRST_WINDOWS_CODE:
        last = next((line.strip() for line in reversed(tail.splitlines()) if line.strip()), "")
        record = _LOG_RECORD.match(last)
        if record is None:
            reported = last  # last line of a traceback
        elif record["level"] in ("ERROR", "CRITICAL"):
            reported = record["text"]
    return f"the worker {exit_text(code)}" + (f": {reported}" if reported else "")
