"""The pieces of one transfer, several under way at once."""

from collections.abc import Callable, Iterable
from contextlib import AbstractAsyncContextManager, nullcontext
from functools import partial
from threading import Lock
from typing import BinaryIO

from molink.errors import Unavailable
from molink.swarm.artifacts.fetch_plan import ChunkRun
from molinkd.peer.artifacts.sources import SourcePool
from molinkd.peer.gate import run_together

#: Requests under way to one source.
MAX_IN_FLIGHT = 8

#: A context for each piece of a transfer: when it may begin, and how long it takes.
Throttle = Callable[[], AbstractAsyncContextManager[None]]
#: Takes a piece, its bytes and who sent them, in a thread.
RunWriter = Callable[[ChunkRun, bytes, str], None]


async def fetch_runs(
    pool: SourcePool,
    runs: Iterable[ChunkRun],
    write: RunWriter,
    count: Callable[[int], None],
    at_once: int = MAX_IN_FLIGHT,
    turn: Throttle = nullcontext,
    *,
    to_the_end: bool = False,
) -> None:
    """Have all pieces kept, ``at_once`` at a time; ``count`` is told the bytes of each.

    ``to_the_end``: if one can't be had, those that are under way still are.

    Raises as :meth:`SourcePool.read`.
    """
    waiting = iter(runs)
    failures: list[Unavailable] = []

    async def work() -> None:
        for run in waiting:
            if failures:
                return
            try:
                async with turn():
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
    """Writes pieces to their places in a file."""
    lock = Lock()

    def write(run: ChunkRun, data: bytes, _sender: str) -> None:
        with lock:
            file.seek(run.offset)
            file.write(data)

    return write
