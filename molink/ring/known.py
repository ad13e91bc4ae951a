"""What a scoreboard knows of requests, and the bounds that tell honest messages from others."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from molink.ring.ticks import TickSet
from molink.wire.messages.data import MAX_GRAMMAR, MAX_GROUPS, Grammar, History, Rows, Volume


@dataclass(frozen=True, slots=True)
class BoardLimits:
    """What an honest ring never exceeds, or a step would fail, or memory run out.

    ``requests`` counts those admitted and not forgotten, ``waiting_bytes`` the rows of volumes that
    have come, at least in part, and were not taken whole. ``context`` tokens and ``table`` blocks
    are those of one request; ``blocks`` of ``block_size`` tokens are in the KV pool, and there are
    ``host_blocks`` in host memory.
    """

    requests: int = 1 << 16
    context: int = 1 << 24
    table: int = 1 << 24
    blocks: int = 1 << 31
    block_size: int = 1 << 16
    waiting_bytes: int = 256 << 20
    host_blocks: int = 0


def has_honest_drafts(volume: Volume) -> bool:
    """Whether all drafts are of decode rows that are sampled from, and one ``Sampled`` has room.

    A group may be drafts only: it goes ahead of the token that it assumes.
    """
    drafted = [group for group in volume.rows if group.drafts]
    if not drafted or volume.prefill:
        return not drafted
    proper = all(group.sample and len(group.drafts) <= group.count for group in drafted)
    checked = sum(len(group.checked) for group in drafted)
    return proper and len(volume.rows) + checked <= MAX_GROUPS


@dataclass(slots=True)
class KnownRequest:
    """A request that lives: ids of its history, blocks of its table.

    ``last`` is the tick of the latest volume of which rows of it were taken; 0: none was.
    """

    ids: int = 0
    blocks: int = 0
    last: int = 0
    has_grammar: bool = False
    #: Whether what its blocks should hold could not be brought there: none of its rows can run.
    is_broken: bool = False

    def add_ids(self, history: History, limits: BoardLimits) -> bool:
        """Count the ids of a message; ``False`` if they are not the next ones, or too many."""
        payload = history.payload
        end = history.first + payload.shape[0]
        proper = payload.dtype == "i32" and len(payload.shape) == 1 and history.first == self.ids
        if not proper or end > limits.context:
            return False
        self.ids = end
        return True

    def add_grammar(self, grammar: Grammar) -> bool:
        """Note that it has one; ``False`` if it is late, a second one, or no honest one."""
        payload = grammar.payload
        proper = payload.dtype == "u8" and len(payload.shape) == 1
        proper = proper and 0 < payload.nbytes <= MAX_GRAMMAR
        if not proper or self.last or self.ids or self.has_grammar:
            return False
        self.has_grammar = True
        return True

    def add_blocks(self, blocks: Sequence[int], limits: BoardLimits) -> bool:
        """Count blocks that its table begins with; ``False`` if they are late or no honest ones."""
        end = self.blocks + len(blocks)
        proper = len(blocks) and min(blocks) >= 0 and max(blocks) < limits.blocks
        if not proper or self.last or end > limits.table:
            return False
        self.blocks = end
        return True

    def can_run(self, rows: Rows, limits: BoardLimits) -> bool:
        """Whether its table, with what the rows bring along, holds them all."""
        if any(block >= limits.blocks for block in rows.blocks) or rows.source >= limits.blocks:
            return False
        if self.is_broken or (rows.source >= 0 and rows.start % limits.block_size == 0):
            return False
        table, end = self.blocks + len(rows.blocks), rows.start + rows.count
        return table <= limits.table and end <= min(limits.context, table * limits.block_size)

    def begin(self, rows: Rows, tick: int) -> None:
        """The first piece of a volume with these rows was taken."""
        self.blocks += len(rows.blocks)
        self.last = tick


class KnownRequests:
    """Those that were admitted and are not known to be over.

    Nothing is kept of the others: ids rise with admission, so who is not among them and no newer
    than the newest is over.
    """

    def __init__(self, limits: BoardLimits, complete: TickSet) -> None:
        """``complete`` are the stage's ticks, which somebody else adds to."""
        self._limits = limits
        self._complete = complete
        self._live: dict[int, KnownRequest] = {}
        self._highest_id = -1

    def __len__(self) -> int:
        return len(self._live)

    def get(self, request: int) -> KnownRequest | None:
        """One that lives."""
        return self._live.get(request)

    def is_new(self, request: int) -> bool:
        """Whether it can still be admitted."""
        return request > self._highest_id

    def is_over(self, request: int) -> bool:
        """Whether it was released, or can't be admitted any more."""
        return request <= self._highest_id and request not in self._live

    def admit(self, request: int) -> None:
        """A new one begins."""
        self._highest_id = request
        self._live[request] = KnownRequest()

    def release(self, request: int) -> None:
        """It is over.

        Admitted after its release, it would be forgotten in the midst of its rows: it is not new
        any more.
        """
        self._highest_id = max(self._highest_id, request)
        self._live.pop(request, None)

    def can_run(self, rows: Rows) -> bool:
        """Whether these rows are to be computed, all ticks being complete that they come after."""
        known = self._live.get(rows.request)
        if known is None or known.last not in self._complete:
            return False
        return known.can_run(rows, self._limits)

    def begin(self, rows: Rows, tick: int) -> None:
        """The first piece of a volume with these rows was taken."""
        self._live[rows.request].begin(rows, tick)

    def problems(self) -> Iterator[str]:
        """What must not be."""
        if any(request > self._highest_id for request in self._live):
            yield "a request is live that was never admitted"
