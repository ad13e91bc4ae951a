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

from molink.files import plain_name
from molink.swarm.agent.keeper import FromStage
from molink.swarm.throughput import Throughput
from molink.wire.messages.load import MAX_HEADS, MAX_STAGES, Load
from molink.wire.messages.pipe import (
    FromWorker,
    Loaded,
    Loading,
    Members,
    Start,
    Stats,
    ToWorker,
    Warm,
    Warmed,
    read_pipe,
    write_pipe,
)
from molinkd.api.backend import Figures, StageFigures, StageName
from molinkd.peer.agent.child import WINDOWS_CODES, Child, how_it_ended
from molinkd.peer.agent.gpu_use import OwnUse

log = logging.getLogger(__name__)

#: Seconds that a worker has to exit before it is terminated, and then killed.
GRACE_S = 5.0
#: ``-P``: a folder called molink, or torch, where the user happens to be is none of ours.
WORKER_COMMAND = (sys.executable, "-P", "-m", "molinkd.worker")
#: Seconds from a ring that stands to the next spare: until then requests are computed again.
SPARE_DELAY_S = 2.0
#: Longest wait for a spare that is not ready yet, in seconds.
SPARE_WAIT_S = 15.0
#: Stages whose workers' counters are remembered.
MAX_PAST = 32
#: A record in a worker's log, as :data:`molink.plaintext.LOG_FORMAT` has it.
_RECORD = re.compile(r"\d{4}-\d\d-\d\d \S+ (?P<level>[A-Z]+) \S+: (?P<text>.*)")


@dataclass(slots=True)
class _WorkerChild:
    child: Child = field(init=False)
    #: ``None`` as long as it is a spare.
    start: Start | None = None
    generation: int = 0
    warm: bool = False
    #: A spare that doesn't give way: it is sooner ready than another process.
    early: bool = False
    stats: Stats | None = None
    #: While it loads: how far that is, and how fast.
    loading: Loading | None = None
    speed: Throughput | None = None
    #: Whether it has said anything: until then it imports and loads, and has nothing to put away.
    spoke: bool = False
    stopping: bool = False


class Supervisor:
    """Worker processes by generation (see :mod:`molink.swarm.agent.keeper`), and a spare one.

    The spare has imported and compiled what a stage needs, before there is one for it.
    """

    def __init__(
        self,
        logs: Path,
        on_message: Callable[[int, FromStage], None],
        on_exit: Callable[[int, str], None],
        command: tuple[str, ...] = WORKER_COMMAND,
    ) -> None:
        """``on_exit`` gets the generation of a worker that wasn't asked to stop, and why."""
        self._logs = logs
        self._on_message = on_message
        self._on_exit = on_exit
        self._command = command
        self._workers: dict[int, _WorkerChild] = {}
        self._spare: _WorkerChild | None = None
        self._spare_timer: asyncio.TimerHandle | None = None
        #: Set when the spare has got ready, or is none any more.
        self._spare_news = asyncio.Event()
        self._stopping: set[asyncio.Task[None]] = set()
        self._closed = False
        #: Counters of workers that are no more, so that they never fall.
        self._past: dict[StageName, Counter[str]] = {}

    def start(self, generation: int, start: Start, members: Members) -> int:
        """Have a worker for a stage, the spare if it is ready; returns its process id.

        Raises:
            OSError: no process can be started.
        """
        worker = self._spare
        if worker is not None and (worker.warm or worker.early):
            self._spare = None
        else:
            worker = self._launch(*self._names(start))
        worker.generation = generation
        self._workers[generation] = worker
        self.tell(generation, start)
        self.tell(generation, members)
        pid, was = worker.child.pid, " (the spare)" if worker.warm or worker.early else ""
        log.info("worker %d%s: stage %d, layers %d:%d", pid, was, start.stage, *start.layers)
        return pid

    def _names(self, start: Start) -> tuple[str, Path]:
        """What a stage's worker is called, and where its log goes."""
        name = f"worker-{plain_name(start.pipeline, 'p')}-{start.stage}"
        return name, self._logs / f"{name}.log"

    def prepare(self) -> None:
        """Have a spare before it is known what for: a stage is likely to come soon."""
        if self._spare is None and self._spare_timer is None and not self._closed:
            self._start_spare(Warm())

    async def quick(self) -> None:
        """Wait, for a while at most, until a first worker here would begin at once.

        It is the spare that is waited for, if one is starting. A PC that has a worker already need
        not wait: its next stage may be in that one.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(SPARE_WAIT_S):
                while self._spare is not None and not self._spare.warm and not self._workers:
                    self._spare_news.clear()
                    await self._spare_news.wait()

    def drop_spare(self) -> None:
        """End the spare: it takes memory of the device, which is wanted for something else."""
        if self._spare_timer is not None:
            self._spare_timer.cancel()
            self._spare_timer = None
        spare, self._spare = self._spare, None
        if spare is not None:
            self._end(spare)

    @property
    def own_use(self) -> OwnUse:
        """What the processes here take of the device: perhaps all of it where one isn't ready."""
        busy = sum(one.busy for one in self.load().stages) / 100
        workers, spares = [*self._workers.values()], [self._spare] if self._spare else []
        stages = [one.stats.load if one.stats is not None else None for one in workers]
        if None in stages or not all(one.warm for one in spares):
            busy = 1.0  # they load, measure and compile, which nobody counts
        return OwnUse([one.child.pid for one in (*workers, *spares)], min(1.0, busy))

    def keep_spare(self, generation: int) -> None:
        """Soon have a spare that can follow on the worker of ``generation``, or on another."""
        if self._spare is not None or self._spare_timer is not None or self._closed:
            return
        worker = self._workers.get(generation)
        if worker is None or worker.start is None:
            return
        loop = asyncio.get_running_loop()
        self._spare_timer = loop.call_later(SPARE_DELAY_S, self._start_spare, _warm(worker.start))

    def _start_spare(self, warm: Warm) -> None:
        self._spare_timer = None
        try:
            self._spare = self._launch("worker-spare", self._logs / "worker-spare.log")
            self._spare.early = not warm.model_dir
        except OSError as error:
            log.warning("no spare worker: %s", error)
        else:
            self._send(self._spare, warm)

    def _launch(self, name: str, log_file: Path) -> _WorkerChild:
        decoder: msgspec.msgpack.Decoder[FromWorker] = msgspec.msgpack.Decoder(FromWorker)

        def read(stream: BinaryIO) -> object | None:
            return read_pipe(stream, decoder)

        worker = _WorkerChild()
        worker.child = Child(
            name,
            self._command,
            reader=read,
            on_message=partial(self._said, worker),
            on_exit=partial(self._exited, worker),
            log_file=log_file,
            computes=True,
        )
        worker.child.start()
        return worker

    def tell(self, generation: int, message: ToWorker) -> None:
        """Send to a worker, if it is there."""
        worker = self._workers.get(generation)
        if worker is None:
            return
        if isinstance(message, Start):
            worker.start, worker.loading, worker.speed = message, None, None
            worker.child.rename(*self._names(message))
        self._send(worker, message)

    def _send(self, worker: _WorkerChild, message: ToWorker) -> None:
        buffer = io.BytesIO()
        write_pipe(buffer, message)
        worker.child.send(buffer.getvalue())

    def tell_all(self, message: ToWorker) -> None:
        """Send to all workers."""
        for generation in self._workers:
            self.tell(generation, message)

    def stop(self, generation: int, *, kill: bool = False) -> None:
        """End a worker by closing its pipe, or ``kill`` it; returns at once.

        One that has said nothing yet is killed in any case.
        """
        worker = self._workers.get(generation)
        if worker is not None:
            self._end(worker, kill=kill)

    def _end(self, worker: _WorkerChild, *, kill: bool = False) -> None:
        if worker.stopping:
            return
        worker.stopping = True
        kill |= not worker.spoke  # it would load on for seconds, beside what takes its place
        task = asyncio.get_running_loop().create_task(worker.child.stop(GRACE_S, kill=kill))
        self._stopping.add(task)
        task.add_done_callback(self._stopping.discard)

    async def close(self) -> None:
        """End all workers and wait until they have exited."""
        self._closed = True
        if self._spare_timer is not None:
            self._spare_timer.cancel()
        for worker in (*self._workers.values(), self._spare):
            if worker is not None:
                self._end(worker)
        await asyncio.gather(*self._stopping)

    def metrics(self) -> Figures:
        """Counters of all workers there have been, and gauges of those there are, by stage."""
        spare = self._spare
        gauges = {
            "workers": float(len(self._workers)),
            "spare_workers": float(spare is not None and spare.warm),
        }
        stages = {name: StageFigures(dict(past)) for name, past in list(self._past.items())}
        for worker in list(self._workers.values()):  # called from the endpoint's thread
            if worker.stats is None or worker.start is None:
                continue
            figures = stages.setdefault(_stage_name(worker.start), StageFigures())
            for name, count in worker.stats.counters.items():
                figures.counters[name] = figures.counters.get(name, 0.0) + count
            figures.gauges.update(worker.stats.gauges)
        return Figures({}, gauges, stages)

    def _remember(self, name: StageName, counters: Mapping[str, float]) -> None:
        """A worker is no more; of stages only the latest are remembered."""
        past = self._past.pop(name, Counter())
        past.update(counters)
        self._past[name] = past
        while len(self._past) > MAX_PAST:
            del self._past[next(iter(self._past))]

    def load(self) -> Load:
        """How busy the stages and heads here are, as others are told."""
        said = [worker.stats for worker in self._workers.values() if worker.stats is not None]
        stages = [stats.load for stats in said if stats.load is not None]
        heads = [stats.head for stats in said if stats.head is not None]
        return Load(tuple(stages[:MAX_STAGES]), tuple(heads[:MAX_HEADS]))

    def loading(self) -> dict[int, tuple[int, int, int]]:
        """By generation: bytes that are loaded, those that there are in all, and bytes/s."""
        return {
            generation: (worker.loading.done, worker.loading.total, round(worker.speed.rate))
            for generation, worker in self._workers.items()
            if worker.loading is not None and worker.speed is not None
        }

    def gauge(self, pipeline: str, name: str) -> float | None:
        """A gauge of the worker of a pipeline; 0 as long as it is unknown, ``None`` without one."""
        for worker in self._workers.values():
            if worker.start is not None and worker.start.pipeline == pipeline:
                return worker.stats.gauges.get(name, 0.0) if worker.stats is not None else 0.0
        return None

    def gauges(self, name: str) -> dict[str, float]:
        """A gauge of all workers that have told it, by pipeline."""
        return {
            worker.start.pipeline: worker.stats.gauges[name]
            for worker in self._workers.values()
            if worker.start is not None and worker.stats is not None and name in worker.stats.gauges
        }

    def _said(self, worker: _WorkerChild, message: object) -> None:
        if worker.stopping:
            return
        if isinstance(message, Loading):
            now = asyncio.get_running_loop().time()
            worker.loading, worker.speed = message, worker.speed or Throughput(now, message.done)
            worker.speed.observe(message.done, now)
            return
        worker.spoke = True
        if isinstance(message, Loaded):
            worker.loading = None
        if isinstance(message, Warmed):
            worker.warm = True
            self._spare_news.set()
        elif isinstance(message, Stats):
            worker.stats = message
        elif isinstance(message, FromStage) and worker.start is not None:
            self._on_message(worker.generation, message)

    def _exited(self, worker: _WorkerChild, code: int) -> None:
        if worker is self._spare:
            self._spare = None
            self._spare_news.set()
        if worker.start is not None:
            del self._workers[worker.generation]
        if worker.stats is not None and worker.start is not None:
            self._remember(_stage_name(worker.start), worker.stats.counters)
        if worker.stopping:
            return
        log.warning("%s (pid %d) exited with %d", worker.child.name, worker.child.pid, code)
        if worker.start is not None:
            self._on_exit(worker.generation, exit_reason(code, worker.child.tail))


def _stage_name(start: Start) -> StageName:
    return StageName.of(start.pipeline, start.layers, start.stage, start.stages)


def _warm(start: Start) -> Warm:
    return Warm(
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
    if 0 < code < WINDOWS_CODES:
        last = next((line.strip() for line in reversed(tail.splitlines()) if line.strip()), "")
        record = _RECORD.match(last)
        if record is None:
            said = last  # of a traceback
        elif record["level"] in ("ERROR", "CRITICAL"):
            said = record["text"]
    return f"the worker {how_it_ended(code)}" + (f": {said}" if said else "")
