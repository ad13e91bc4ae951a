"""Which requests' KV goes to host memory, and when: proactive swapping (FastServe, §4.2)."""

from collections import deque
from collections.abc import Iterator

from molink.errors import InvariantError
from molink.facts.ringtimes import RingTimes
from molink.scheduler.cache import BlockCache
from molink.scheduler.host import HostBlocks, HostCopy
from molink.scheduler.job import Job
from molink.scheduler.limits import HeadLimits
from molink.scheduler.roster import Roster
from molink.wire.messages.data import MAX_SWAP

#: Blocks are reserved for what should arrive in so many turns of the ring: blocks that are given up
#: can be used after one. With more of them first tokens come sooner, but too many go that have to
#: come back.
RESERVED_TURNS = 1
#: They are no more than this share of all blocks.
MAX_RESERVED = 0.2
#: Arrivals that the recent rate goes by.
_ARRIVALS = 32
#: Seconds of a turn where nothing is known of the stages.
_UNKNOWN_S = 0.05


class Swapping:
    """Keeps what is preempted in host memory, if the mode is not ``recompute`` and there is room.

    In mode ``proactive-swap`` some blocks are reserved for requests that should arrive soon, by the
    recent rate. As long as fewer are free, jobs give way whose turn comes last, before anybody
    lacks a block; a job in host memory comes back when more are free than are reserved.
    """

    def __init__(self, limits: HeadLimits, roster: Roster, cache: BlockCache) -> None:
        self._mode = limits.preemption_mode
        self._limits = limits
        self._roster = roster
        self._cache = cache
        self._times = RingTimes(limits.profiles, (), limits.row_bytes)
        #: When the last requests arrived, and blocks that each asked for.
        self._arrivals: deque[tuple[float, int]] = deque(maxlen=_ARRIVALS)
        #: Seconds in which the slowest stage copies a block.
        self._block_s = 0.0
        self.host = HostBlocks()
        #: Requests that went to host memory and came back, and those that there was no room for.
        self.outs = self.ins = self.fallbacks = 0

    def open(self, blocks: int, block_s: float) -> None:
        """All stages have host memory for so many blocks, each of which takes ``block_s``."""
        if self._mode == "recompute" or self.host.total or not blocks:
            return
        self.host.open(blocks)
        self._block_s = block_s
        self._roster.set_restoring(self._copied_s)

    def set_times(self, times: RingTimes) -> None:
        """Stages have measured themselves, or their links, anew."""
        self._times = times

    # --- to host memory --------------------------------------------------------------------------

    def keep(self, job: Job) -> None:
        """``job`` is about to be preempted: have its KV copied to host memory, if that is well."""
        if self._mode == "recompute" or not job.sound or job.source >= 0 or not job.computed:
            return
        if not self._is_worth_it(job.computed):
            return
        held = self.host.allocate(self._limits.blocks_for(job.computed))
        if held is None:
            self.fallbacks += 1
            return
        self.outs += 1
        job.copy = HostCopy(held, job.computed)

    def forget(self, job: Job) -> None:
        """The copy of ``job``, if there is one, is not needed any more."""
        if job.copy is not None:
            self.host.free(job.copy.blocks)
            job.copy = None

    def giving_way(self, now: float) -> Iterator[Job]:
        """Jobs to be preempted before others lack blocks, the one whose turn comes last first."""
        if not self._is_ahead:
            return
        reserved = self.reserved(now)
        if not reserved:
            return
        lacking = reserved + self._limits.growth(self._roster.admitted) - self._cache.available
        coming = self._cache.coming(self._roster.leaving)
        lacking -= coming.count
        for job in self._roster.farthest(now):
            if lacking <= 0:
                return
            lacking -= coming.add(job.blocks)
            if self._roster.rests(job) and not job.fresh:  # the others when their rows are back
                yield job

    # --- and back --------------------------------------------------------------------------------

    @property
    def returns_early(self) -> bool:
        """Whether jobs come back before their turn: their rows go in a later micro-batch."""
        return self._is_ahead

    def reserved(self, now: float) -> int:
        """Blocks that are to be free for requests that should arrive soon."""
        if not self._is_ahead or not self._arrivals:
            return 0
        seconds = now - self._arrivals[0][0]
        if seconds <= 0:
            return 0
        rate = sum(blocks for _, blocks in self._arrivals) / seconds
        soon = rate * RESERVED_TURNS * (self._times.turn_s(1) or _UNKNOWN_S)
        return int(min(soon, MAX_RESERVED * self._limits.blocks))

    def arrived(self, job: Job, now: float) -> None:
        """A request has arrived."""
        self._arrivals.append((now, self._limits.blocks_for(job.uncached + 1)))

    # --- inside ----------------------------------------------------------------------------------

    @property
    def _is_ahead(self) -> bool:
        return self._mode == "proactive-swap" and self.host.total > 0

    def _copying_s(self, tokens: int) -> float:
        """Seconds that the blocks of so many tokens take, there and back."""
        return 2 * self._limits.blocks_for(tokens) * self._block_s

    def _is_worth_it(self, tokens: int) -> bool:
        """Whether so many tokens can be copied at once, and sooner than computed anew."""
        anew_s = self._times.prompt_s(tokens)
        fits = self._limits.blocks_for(tokens) <= MAX_SWAP
        return fits and not 0 < anew_s < self._copying_s(tokens)

    def _copied_s(self, job: Job) -> float | None:
        """Seconds that a copy of ``job`` takes, if it has one or, most likely, would have."""
        if job.copy is not None:
            return self._copying_s(job.copy.tokens)
        tokens = job.computed
        room = self._limits.blocks_for(tokens) <= self.host.left
        if job.state == "waiting" or not room or not self._is_worth_it(tokens):
            return None
        return self._copying_s(tokens)

    def validate(self) -> None:
        """Each host block belongs to one job that waits, or to none.

        Raises:
            InvariantError: one doesn't.
        """
        jobs = [job for job in self._roster if job.copy is not None]
        if any(job.state != "waiting" for job in jobs):
            raise InvariantError("a job that has blocks has a copy of them in host memory, too")
        copies = [job.copy for job in jobs if job.copy is not None]
        for copy in copies:
            if len(copy.blocks) != self._limits.blocks_for(copy.tokens) or not copy.filled:
                raise InvariantError(f"a copy of {copy.tokens} tokens in {len(copy.blocks)} blocks")
        self.host.validate(copies)
