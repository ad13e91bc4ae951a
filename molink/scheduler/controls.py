"""What stages are told when a request begins, and when it is over or preempted."""

from collections.abc import Iterator, Sequence

from molink.scheduler.batch import HeadControl
from molink.scheduler.cache import BlockCache
from molink.scheduler.host import HostCopy
from molink.scheduler.job import Job
from molink.scheduler.leaving import Leaving
from molink.scheduler.ledger import Ledger
from molink.wire.messages.base import Payload
from molink.wire.messages.data import Admit, Grammar, History, Release, SwapIn, SwapOut, Table

#: Ids per History or Table message: 240 kB, below the longest message.
MESSAGE_IDS = 60_000


class ControlIssuer:
    """Issues the control messages of admissions and releases, each with a tick."""

    def __init__(self, cache: BlockCache, ledger: Ledger) -> None:
        self._cache = cache
        self._ledger = ledger

    def release(self, leaving: Leaving) -> list[HeadControl]:
        """An admission is over; what is to be kept of it is copied to host memory before."""
        control, last, copy = [], leaving.last, leaving.copy
        if copy is not None:
            last = copy.filled = self._ledger.issue()
            ids = (*leaving.blocks[: len(copy.blocks)], *copy.blocks)
            out = SwapOut(last, leaving.id, _two_rows(ids))
            control.append(HeadControl(out, ids))
        tick = self._ledger.issue()
        self._cache.release(tick, leaving)
        self._ledger.released(tick, leaving.trip)
        return [*control, HeadControl(Release(tick, leaving.id, last, leaving.also))]

    def admission(self, job: Job, copy: HostCopy | None) -> list[HeadControl]:
        """``job`` has been admitted; some of its blocks come from ``copy``, if that is one."""
        request = job.request
        job.last = self._ledger.issue()
        admit = Admit(job.last, job.id, request.sampling, request.prompt_tokens, job.kv_end)
        control = [HeadControl(admit)]
        if request.grammar:
            job.last = self._ledger.issue()
            grammar = Grammar(job.last, job.id, Payload("u8", (len(request.grammar),)))
            control.append(HeadControl(grammar, text=request.grammar))
        answered = len(job.tokens) > request.prompt_tokens
        if request.sampling.needs_history or (request.grammar and answered):
            for first, ids in _parts(job.tokens):
                job.last = self._ledger.issue()
                history = History(job.last, job.id, first, Payload("i32", (len(ids),)))
                control.append(HeadControl(history, ids))
        told = job.depth if copy is None else len(copy.blocks)
        for _, ids in _parts(job.blocks[:told]):
            job.last = self._ledger.issue()
            table = Table(job.last, job.id, Payload("i32", (len(ids),)))
            control.append(HeadControl(table, ids))
        if copy is not None:
            job.last = self._ledger.issue()
            ids = (*job.blocks[job.depth : told], *copy.blocks[job.depth :])
            swap = SwapIn(job.last, job.id, copy.filled, _two_rows(ids))
            control.append(HeadControl(swap, ids))
        return control


def _two_rows(ids: Sequence[int]) -> Payload:
    return Payload("i32", (2, len(ids) // 2))


def _parts(ids: Sequence[int]) -> Iterator[tuple[int, tuple[int, ...]]]:
    """As few parts of ``ids`` as messages can hold, and where each begins."""
    for first in range(0, len(ids), MESSAGE_IDS):
        yield first, tuple(ids[first : first + MESSAGE_IDS])
