"""The worker processes of this peer: starts them, talks to them, ends them. It decides nothing."""

import asyncio
import io
import logging
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import msgspec

from molink.files import plain_name
from molink.swarm.keeper import FromStage
from molink.wire.messages.pipe import (
    FromWorker,
    Members,
    Start,
    Stats,
    ToWorker,
    read_pipe,
    write_pipe,
)
from molinkd.api.backend import Figures
from molinkd.peer.child import Child, how_it_ended

log = logging.getLogger(__name__)

#: Seconds that a worker has to exit before it is terminated, and then killed.
GRACE_S = 5.0
#: ``-P``: a folder called molink, or torch, where the user happens to be is none of ours.
WORKER_COMMAND = (sys.executable, "-P", "-m", "molinkd.worker")


@dataclass(slots=True)
class _WorkerChild:
    child: Child
    start: Start
    stats: Stats | None = None
    stopping: bool = False


class Supervisor:
    """Worker processes by generation (see :mod:`molink.swarm.keeper`)."""

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
        self._stopping: set[asyncio.Task[None]] = set()
        #: Counters of workers that are no more, so that sums never fall.
        self._past: Counter[str] = Counter()

    def start(self, generation: int, start: Start, members: Members) -> int:
        """Start a worker and return its process id.

        Raises:
            OSError: the process can't be started.
        """
        decoder: msgspec.msgpack.Decoder[FromWorker] = msgspec.msgpack.Decoder(FromWorker)

        def read(stream: BinaryIO) -> object | None:
            return read_pipe(stream, decoder)

        child = Child(
            f"worker-{start.pipeline}-{start.stage}",
            self._command,
            reader=read,
            on_message=lambda message: self._said(generation, message),
            on_exit=lambda code: self._exited(generation, code),
            log_file=self._logs / f"worker-{plain_name(start.pipeline, 'p')}-{start.stage}.log",
            computes=True,
        )
        child.start()
        self._workers[generation] = _WorkerChild(child, start)
        self.tell(generation, start)
        self.tell(generation, members)
        log.info("worker %d: stage %d, layers %d:%d", child.pid, start.stage, *start.layers)
        return child.pid

    def tell(self, generation: int, message: ToWorker) -> None:
        """Send to a worker, if it is there."""
        worker = self._workers.get(generation)
        if worker is not None:
            buffer = io.BytesIO()
            write_pipe(buffer, message)
            worker.child.send(buffer.getvalue())

    def tell_all(self, message: ToWorker) -> None:
        """Send to all workers."""
        for generation in self._workers:
            self.tell(generation, message)

    def stop(self, generation: int) -> None:
        """End a worker by closing its pipe; returns at once."""
        worker = self._workers.get(generation)
        if worker is None or worker.stopping:
            return
        worker.stopping = True
        task = asyncio.get_running_loop().create_task(worker.child.stop(GRACE_S))
        self._stopping.add(task)
        task.add_done_callback(self._stopping.discard)

    async def close(self) -> None:
        """End all workers and wait until they have exited."""
        for generation in list(self._workers):
            self.stop(generation)
        await asyncio.gather(*self._stopping)

    def metrics(self) -> Figures:
        """Counters, summed over all workers there have been, and gauges of those there are."""
        counters = Counter(self._past)
        gauges = {"workers": float(len(self._workers))}
        stages: dict[str, dict[str, float]] = {}
        for worker in list(self._workers.values()):  # called from the endpoint's thread
            if worker.stats is None:
                continue
            counters.update(worker.stats.counters)
            first, last = worker.start.layers
            stages[f"{first}:{last}"] = dict(worker.stats.gauges)
        return Figures(dict(counters), gauges, stages)

    def _said(self, generation: int, message: object) -> None:
        worker = self._workers.get(generation)
        if worker is None or worker.stopping:
            return
        if isinstance(message, Stats):
            worker.stats = message
        elif isinstance(message, FromStage):
            self._on_message(generation, message)

    def _exited(self, generation: int, code: int) -> None:
        worker = self._workers.pop(generation)
        if worker.stats is not None:
            self._past.update(worker.stats.counters)
        if worker.stopping:
            return
        log.warning("worker %d exited with %d", worker.child.pid, code)
        self._on_exit(generation, exit_reason(code, worker.child.tail))


def exit_reason(code: int, tail: str) -> str:
    """One line about a process that ended by itself."""
    last = next((line for line in reversed(tail.splitlines()) if line.strip()), "")
    return f"the worker {how_it_ended(code)}" + (f": {last.strip()}" if last else "")
