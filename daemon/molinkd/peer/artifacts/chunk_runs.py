"""Fetches the chunk runs of one transfer concurrently."""

from collections.abc import Callable, Iterable
from contextlib import AbstractAsyncContextManager, nullcontext
from functools import partial
from threading import Lock
from typing import BinaryIO

from molink.errors import Unavailable
from molink.swarm.artifacts.fetch_plan import ChunkRun
from molinkd.peer.artifacts.sources import SourcePool
from molinkd.peer.gate import run_together

#: Concurrent requests of one transfer.
MAX_IN_FLIGHT = 8

#: Context around each chunk run of a transfer, which delays and times it.
Throttle = Callable[[], AbstractAsyncContextManager[None]]
#: Stores a chunk run, given its bytes and the sender. Called in a thread.
RunWriter = Callable[[ChunkRun, bytes, str], None]


async def fetch_runs(
    pool: SourcePool,
    runs: Iterable[ChunkRun],
    write: RunWriter,
    count: Callable[[int], None],
    at_once: int = MAX_IN_FLIGHT,
    throttle: Throttle = nullcontext,
    *,
    to_the_end: bool = False,
) -> None:
    """Fetch all runs, ``at_once`` concurrently; ``count`` gets the bytes of each.

    With ``to_the_end`` a failure does not cancel the other requests in flight.

    Raises as :meth:`SourcePool.read_run`.
    """
    waiting = iter(runs)
    failures: list[Unavailable] = []

    async def work() -> None:
        for run in waiting:
            if failures:
                return
            try:
                async with throttle():
                    await pool.read_run(run, partial(write, run))
            except Unavailable as error:
                if not to_the_end:
                    raise
                failures.append(error)
                return
            count(run.nbytes)

    await run_together(work() for _ in range(at_once))
    if failures:
        raise failures[0]


def write_into(file: BinaryIO) -> RunWriter:
    """A writer that puts runs at their offsets in ``file``."""
    lock = Lock()

    def write(run: ChunkRun, data: bytes, _sender: str) -> None:
        with lock:
            file.seek(run.offset)
            file.write(data)

    return write
