"""What a scoreboard knows of requests, and the bounds that tell honest messages from others."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from molink.ring.seq_set import SeqSet
from molink.wire.messages.data_plane import (
    MAX_GRAMMAR_BYTES,
    MAX_SLICES,
    Grammar,
    History,
    RequestSlice,
    Volume,
)


@dataclass(frozen=True, slots=True)
class ScoreboardLimits:
    """What an honest ring never exceeds, or a step would fail, or memory run out.

    ``max_requests`` counts those admitted and not forgotten, ``waiting_bytes`` the rows of volumes
    that have come, at least in part, and were not taken whole. ``max_model_len`` tokens and
    ``max_table_blocks`` blocks are those of one request; ``blocks`` of ``block_size`` tokens are in
    the KV pool, and there are ``host_blocks`` in host memory.
    """

    max_requests: int = 1 << 16
    max_model_len: int = 1 << 24
    max_table_blocks: int = 1 << 24
    blocks: int = 1 << 31
    block_size: int = 1 << 16
    waiting_bytes: int = 256 << 20
    host_blocks: int = 0


def has_honest_drafts(volume: Volume) -> bool:
    """Whether all drafts are of decode rows that are sampled from, and one ``SamplerOutput`` has
    room.

    A group may be drafts only: it goes ahead of the token that it assumes.
    """
    drafted = [group for group in volume.slices if group.drafts]
    if not drafted or volume.prefill:
        return not drafted
    proper = all(group.sample and len(group.drafts) <= group.count for group in drafted)
    checked = sum(len(group.verified_drafts) for group in drafted)
    return proper and len(volume.slices) + checked <= MAX_SLICES


@dataclass(slots=True)
class TrackedRequest:
    """A request that lives: ids of its history, blocks of its table.

    ``last_seq`` is the seq of the latest volume of which rows of it were taken; 0: none was.
    """

    num_ids: int = 0
    num_blocks: int = 0
    last_seq: int = 0
    has_grammar: bool = False
    #: Whether what its blocks should hold could not be brought there: none of its rows can run.
    is_broken: bool = False

    def add_ids(self, history: History, limits: ScoreboardLimits) -> bool:
        """Count the ids of a message; ``False`` if they are not the next ones, or too many."""
        payload = history.payload
        end = history.first + payload.shape[0]
        proper = (
            payload.dtype == "i32" and len(payload.shape) == 1 and history.first == self.num_ids
        )
        if not proper or end > limits.max_model_len:
            return False
        self.num_ids = end
        return True

    def add_grammar(self, grammar: Grammar) -> bool:
        """Note that it has one; ``False`` if it is late, a second one, or no honest one."""
        payload = grammar.payload
        proper = payload.dtype == "u8" and len(payload.shape) == 1
        proper = proper and 0 < payload.nbytes <= MAX_GRAMMAR_BYTES
        if not proper or self.last_seq or self.num_ids or self.has_grammar:
            return False
        self.has_grammar = True
        return True

    def add_blocks(self, blocks: Sequence[int], limits: ScoreboardLimits) -> bool:
        """Count blocks that its table begins with; ``False`` if they are late or no honest ones."""
        end = self.num_blocks + len(blocks)
        proper = len(blocks) and min(blocks) >= 0 and max(blocks) < limits.blocks
        if not proper or self.last_seq or end > limits.max_table_blocks:
            return False
        self.num_blocks = end
        return True

    def can_run(self, request_slice: RequestSlice, limits: ScoreboardLimits) -> bool:
        """Whether its table, with what the rows bring along, holds them all."""
        if (
            any(block >= limits.blocks for block in request_slice.blocks)
            or request_slice.copy_from_block >= limits.blocks
        ):
            return False
        if self.is_broken or (
            request_slice.copy_from_block >= 0 and request_slice.start % limits.block_size == 0
        ):
            return False
        table, end = (
            self.num_blocks + len(request_slice.blocks),
            request_slice.start + request_slice.count,
        )
        return table <= limits.max_table_blocks and end <= min(
            limits.max_model_len, table * limits.block_size
        )

    def start_rows(self, request_slice: RequestSlice, seq: int) -> None:
        """The first piece of a volume with these rows was taken."""
        self.num_blocks += len(request_slice.blocks)
        self.last_seq = seq


class TrackedRequests:
    """Those that were admitted and are not known to be over.

    Nothing is kept of the others: ids rise with admission, so who is not among them and no newer
    than the newest is over.
    """

    def __init__(self, limits: ScoreboardLimits, complete: SeqSet) -> None:
        """``complete`` are the stage's seqs, which somebody else adds to."""
        self._limits = limits
        self._complete = complete
        self._live: dict[int, TrackedRequest] = {}
        self._highest_id = -1

    def __len__(self) -> int:
        return len(self._live)

    def get_request(self, request: int) -> TrackedRequest | None:
        """One that lives."""
        return self._live.get(request)

    def is_new(self, request: int) -> bool:
        """Whether it can still be admitted."""
        return request > self._highest_id

    def is_finished(self, request: int) -> bool:
        """Whether it was released, or can't be admitted any more."""
        return request <= self._highest_id and request not in self._live

    def admit_request(self, request: int) -> None:
        """A new one begins."""
        self._highest_id = request
        self._live[request] = TrackedRequest()

    def release_request(self, request: int) -> None:
        """It is over.

        Admitted after its release, it would be forgotten in the midst of its rows: it is not new
        any more.
        """
        self._highest_id = max(self._highest_id, request)
        self._live.pop(request, None)

    def can_run(self, request_slice: RequestSlice) -> bool:
        """Whether these rows are to be computed, all seqs being complete that they come after."""
        known = self._live.get(request_slice.request)
        if known is None or known.last_seq not in self._complete:
            return False
        return known.can_run(request_slice, self._limits)

    def start_rows(self, request_slice: RequestSlice, seq: int) -> None:
        """The first piece of a volume with these rows was taken."""
        self._live[request_slice.request].start_rows(request_slice, seq)

    def find_problems(self) -> Iterator[str]:
        """What must not be."""
        if any(request > self._highest_id for request in self._live):
            yield "a request is live that was never admitted"
