"""The worker processes of this peer: starts them, talks to them, ends them. It decides nothing."""

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
from molinkd.peer.agent.gpu_usage import OwnGpuUsage

log = logging.getLogger(__name__)

#: Seconds that a worker has to exit before it is terminated, and then killed.
GRACE_S = 5.0
#: ``-P``: a folder called molink, or torch, where the user happens to be is none of ours.
WORKER_COMMAND = (sys.executable, "-P", "-m", "molinkd.worker")
#: Seconds from a ring that stands to the next spare: until then requests are computed again.
STANDBY_DELAY_S = 2.0
#: Longest wait for a spare that is not ready yet, in seconds.
STANDBY_WAIT_S = 15.0
#: Stages whose workers' counters are remembered.
MAX_RETIRED_STAGES = 32
#: A record in a worker's log, as :data:`molink.plaintext.LOG_FORMAT` has it.
_LOG_RECORD = re.compile(r"\d{4}-\d\d-\d\d \S+ (?P<level>[A-Z]+) \S+: (?P<text>.*)")


@dataclass(slots=True)
class _WorkerProcess:
    child: ChildProcess = field(init=False)
    #: ``None`` as long as it is a spare.
    start: LoadStage | None = None
    generation: int = 0
    is_warm: bool = False
    #: A spare that doesn't give way: it is sooner ready than another process.
    preloaded: bool = False
    stats: WorkerStats | None = None
    #: While it loads: how far that is, and how fast.
    load_progress: WeightLoadProgress | None = None
    load_rate: TransferRate | None = None
    #: Whether it has said anything: until then it imports and loads, and has nothing to put away.
    has_spoken: bool = False
    is_stopping: bool = False


class WorkerSupervisor:
    """Worker processes by generation (see :mod:`molink.swarm.agent.stage_agent`), and a spare one.

    The spare has imported and compiled what a stage needs, before there is one for it.
    """

    def __init__(
        self,
        logs: Path,
        on_message: Callable[[int, WorkerMessage], None],
        on_exit: Callable[[int, str], None],
        command: tuple[str, ...] = WORKER_COMMAND,
    ) -> None:
        """``on_exit`` gets the generation of a worker that wasn't asked to stop, and why."""
        self._logs = logs
        self._on_message = on_message
        self._on_exit = on_exit
        self._command = command
        self._workers: dict[int, _WorkerProcess] = {}
        self._standby: _WorkerProcess | None = None
        self._standby_timer: asyncio.TimerHandle | None = None
        #: Set when the spare has got ready, or is none any more.
        self._standby_changed = asyncio.Event()
        self._stopping: set[asyncio.Task[None]] = set()
        self._closed = False
        #: Counters of workers that are no more, so that they never fall.
        self._retired_counters: dict[StageLabels, Counter[str]] = {}

    def start_worker(self, generation: int, start: LoadStage, members: PeerKeys) -> int:
        """Have a worker for a stage, the spare if it is ready; returns its process id.

        Raises:
            OSError: no process can be started.
        """
        worker = self._standby
        if worker is not None and (worker.is_warm or worker.preloaded):
            self._standby = None
        else:
            worker = self._launch_process(*self._worker_names(start))
        worker.generation = generation
        self._workers[generation] = worker
        self.send_to_worker(generation, start)
        self.send_to_worker(generation, members)
        pid, was = worker.child.pid, " (the spare)" if worker.is_warm or worker.preloaded else ""
        log.info("worker %d%s: stage %d, layers %d:%d", pid, was, start.stage, *start.layers)
        return pid

    def _worker_names(self, start: LoadStage) -> tuple[str, Path]:
        """What a stage's worker is called, and where its log goes."""
        name = f"worker-{make_plain_name(start.pipeline, 'p')}-{start.stage}"
        return name, self._logs / f"{name}.log"

    def start_standby(self) -> None:
        """Have a spare before it is known what for: a stage is likely to come soon."""
        if self._standby is None and self._standby_timer is None and not self._closed:
            self._launch_standby(WarmUp())

    async def wait_until_ready(self) -> None:
        """Wait, for a while at most, until a first worker here would begin at once.

        It is the spare that is waited for, if one is starting. A PC that has a worker already need
        not wait: its next stage may be in that one.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STANDBY_WAIT_S):
                while self._standby is not None and not self._standby.is_warm and not self._workers:
                    self._standby_changed.clear()
                    await self._standby_changed.wait()

    def drop_standby(self) -> None:
        """End the spare: it takes memory of the device, which is wanted for something else."""
        if self._standby_timer is not None:
            self._standby_timer.cancel()
            self._standby_timer = None
        spare, self._standby = self._standby, None
        if spare is not None:
            self._stop_process(spare)

    @property
    def own_gpu_usage(self) -> OwnGpuUsage:
        """What the processes here take of the device: perhaps all of it where one isn't ready."""
        busy = sum(one.busy for one in self.measure_load().stages) / 100
        workers, spares = [*self._workers.values()], [self._standby] if self._standby else []
        stages = [one.stats.load if one.stats is not None else None for one in workers]
        if None in stages or not all(one.is_warm for one in spares):
            busy = 1.0  # they load, measure and compile, which nobody counts
        return OwnGpuUsage([one.child.pid for one in (*workers, *spares)], min(1.0, busy))

    def schedule_standby(self, generation: int) -> None:
        """Soon have a spare that can follow on the worker of ``generation``, or on another."""
        if self._standby is not None or self._standby_timer is not None or self._closed:
            return
        worker = self._workers.get(generation)
        if worker is None or worker.start is None:
            return
        loop = asyncio.get_running_loop()
        self._standby_timer = loop.call_later(
            STANDBY_DELAY_S, self._launch_standby, _warm_up_of(worker.start)
        )

    def _launch_standby(self, warm: WarmUp) -> None:
        self._standby_timer = None
        try:
            self._standby = self._launch_process("worker-spare", self._logs / "worker-spare.log")
            self._standby.preloaded = not warm.model_dir
        except OSError as error:
            log.warning("no spare worker: %s", error)
        else:
            self._write_message(self._standby, warm)

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
        """Send to a worker, if it is there."""
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
        """End a worker by closing its pipe, or ``kill`` it; returns at once.

        One that has said nothing yet is killed in any case.
        """
        worker = self._workers.get(generation)
        if worker is not None:
            self._stop_process(worker, kill=kill)

    def _stop_process(self, worker: _WorkerProcess, *, kill: bool = False) -> None:
        if worker.is_stopping:
            return
        worker.is_stopping = True
        kill |= not worker.has_spoken  # it would load on for seconds, beside what takes its place
        task = asyncio.get_running_loop().create_task(worker.child.stop(GRACE_S, kill=kill))
        self._stopping.add(task)
        task.add_done_callback(self._stopping.discard)

    async def close(self) -> None:
        """End all workers and wait until they have exited."""
        self._closed = True
        if self._standby_timer is not None:
            self._standby_timer.cancel()
        for worker in (*self._workers.values(), self._standby):
            if worker is not None:
                self._stop_process(worker)
        await asyncio.gather(*self._stopping)

    def collect_metrics(self) -> MetricValues:
        """Counters of all workers there have been, and gauges of those there are, by stage."""
        spare = self._standby
        gauges = {
            "workers": float(len(self._workers)),
            "spare_workers": float(spare is not None and spare.is_warm),
        }
        stages = {
            name: StageMetricValues(dict(past))
            for name, past in list(self._retired_counters.items())
        }
        for worker in list(self._workers.values()):  # called from the endpoint's thread
            if worker.stats is None or worker.start is None:
                continue
            figures = stages.setdefault(_stage_name(worker.start), StageMetricValues())
            for name, count in worker.stats.counters.items():
                figures.counters[name] = figures.counters.get(name, 0.0) + count
            figures.gauges.update(worker.stats.gauges)
        return MetricValues({}, gauges, stages)

    def _retire_counters(self, name: StageLabels, counters: Mapping[str, float]) -> None:
        """A worker is no more; of stages only the latest are remembered."""
        past = self._retired_counters.pop(name, Counter())
        past.update(counters)
        self._retired_counters[name] = past
        while len(self._retired_counters) > MAX_RETIRED_STAGES:
            del self._retired_counters[next(iter(self._retired_counters))]

    def measure_load(self) -> PeerLoad:
        """How busy the stages and heads here are, as others are told."""
        said = [worker.stats for worker in self._workers.values() if worker.stats is not None]
        stages = [stats.load for stats in said if stats.load is not None]
        heads = [stats.scheduler for stats in said if stats.scheduler is not None]
        return PeerLoad(tuple(stages[:MAX_STAGES]), tuple(heads[:MAX_SCHEDULERS]))

    def loading_progress(self) -> dict[int, tuple[int, int, int]]:
        """By generation: bytes that are loaded, those that there are in all, and bytes/s."""
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
        """A gauge of the worker of a pipeline; 0 as long as it is unknown, ``None`` without one."""
        for worker in self._workers.values():
            if worker.start is not None and worker.start.pipeline == pipeline:
                return worker.stats.gauges.get(name, 0.0) if worker.stats is not None else 0.0
        return None

    def read_gauges(self, name: str) -> dict[str, float]:
        """A gauge of all workers that have told it, by pipeline."""
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
        elif isinstance(message, WorkerStats):
            worker.stats = message
        elif isinstance(message, WorkerMessage) and worker.start is not None:
            self._on_message(worker.generation, message)

    def _on_worker_exit(self, worker: _WorkerProcess, code: int) -> None:
        if worker is self._standby:
            self._standby = None
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
    )


def exit_reason(code: int, tail: str) -> str:
    """One line about a process that ended by itself; clients may read it.

    It quotes the last line of the log only where that says why: a process that was killed had
    something else to say, and what it logged is nobody's business.
    """
    said = ""
    if 0 < code < FIRST_WINDOWS_CODE:
        last = next((line.strip() for line in reversed(tail.splitlines()) if line.strip()), "")
        record = _LOG_RECORD.match(last)
        if record is None:
            said = last  # of a traceback
        elif record["level"] in ("ERROR", "CRITICAL"):
            said = record["text"]
    return f"the worker {exit_text(code)}" + (f": {said}" if said else "")
