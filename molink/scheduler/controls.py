"""What stages are told when a request begins, and when it is over or preempted."""

from collections.abc import Iterator, Sequence

from molink.scheduler.batch import ControlWithPayload
from molink.scheduler.host_blocks import HostCopy
from molink.scheduler.in_flight import InFlightTracker
from molink.scheduler.kv_cache_manager import KVCacheManager
from molink.scheduler.pending_release import PendingRelease
from molink.scheduler.request_state import RequestState
from molink.wire.messages.base import Payload
from molink.wire.messages.data_plane import (
    Admit,
    BlockTable,
    Grammar,
    History,
    Release,
    SwapIn,
    SwapOut,
)

#: Ids per History or Table message: 240 kB, below the longest message.
MAX_MESSAGE_IDS = 60_000


class ControlIssuer:
    """Issues the control messages of admissions and releases, each with a tick."""

    def __init__(self, cache: KVCacheManager, in_flight: InFlightTracker) -> None:
        self._cache = cache
        self._in_flight = in_flight

    def issue_release(self, pending: PendingRelease) -> list[ControlWithPayload]:
        """An admission is over; what is to be kept of it is copied to host memory before."""
        control, last, copy = [], pending.last_seq, pending.host_copy
        if copy is not None:
            last = copy.filled_seq = self._in_flight.issue_seq()
            ids = (*pending.blocks[: len(copy.blocks)], *copy.blocks)
            out = SwapOut(last, pending.id, _pairs_payload(ids))
            control.append(ControlWithPayload(out, ids))
        seq = self._in_flight.issue_seq()
        self._cache.release_request(seq, pending)
        self._in_flight.record_release(seq, pending.round_trips)
        return [*control, ControlWithPayload(Release(seq, pending.id, last, pending.other_seqs))]

    def issue_admission(
        self, state: RequestState, copy: HostCopy | None
    ) -> list[ControlWithPayload]:
        """``job`` has been admitted; some of its blocks come from ``copy``, if that is one."""
        request = state.request
        state.last_seq = self._in_flight.issue_seq()
        admit = Admit(
            state.last_seq, state.id, request.sampling, request.prompt_tokens, state.kv_end
        )
        control = [ControlWithPayload(admit)]
        if request.grammar:
            state.last_seq = self._in_flight.issue_seq()
            grammar = Grammar(state.last_seq, state.id, Payload("u8", (len(request.grammar),)))
            control.append(ControlWithPayload(grammar, text=request.grammar))
        answered = len(state.tokens) > request.prompt_tokens
        if request.sampling.needs_history or (request.grammar and answered):
            for first, ids in _split_ids(state.tokens):
                state.last_seq = self._in_flight.issue_seq()
                history = History(state.last_seq, state.id, first, Payload("i32", (len(ids),)))
                control.append(ControlWithPayload(history, ids))
        num_announced = state.tree_depth if copy is None else len(copy.blocks)
        for _, ids in _split_ids(state.blocks[:num_announced]):
            state.last_seq = self._in_flight.issue_seq()
            table = BlockTable(state.last_seq, state.id, Payload("i32", (len(ids),)))
            control.append(ControlWithPayload(table, ids))
        if copy is not None:
            state.last_seq = self._in_flight.issue_seq()
            ids = (
                *state.blocks[state.tree_depth : num_announced],
                *copy.blocks[state.tree_depth :],
            )
            swap = SwapIn(state.last_seq, state.id, copy.filled_seq, _pairs_payload(ids))
            control.append(ControlWithPayload(swap, ids))
        return control


def _pairs_payload(ids: Sequence[int]) -> Payload:
    return Payload("i32", (2, len(ids) // 2))


def _split_ids(ids: Sequence[int]) -> Iterator[tuple[int, tuple[int, ...]]]:
    """As few parts of ``ids`` as messages can hold, and where each begins."""
    for first in range(0, len(ids), MAX_MESSAGE_IDS):
        yield first, tuple(ids[first : first + MAX_MESSAGE_IDS])
