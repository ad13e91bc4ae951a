"""The KV blocks of a head: who gets which, and what of them is kept for later requests."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

from molink.errors import InvariantError
from molink.scheduler.blocks import BlockAllocator, Returning
from molink.scheduler.job import Job
from molink.scheduler.leaving import Leaving
from molink.scheduler.limits import HeadLimits
from molink.scheduler.prefix import OTHER_ROOT, ROOT, Match, PrefixTree
from molink.scheduler.span_log import SpanLog


class BlockCache:
    """Blocks of requests that run, and beside them as many of those that are over as there is room.

    Only KV that is at every stage gets into the prefix tree: its rows have come back. So rows that
    read it have to wait for nothing. Full blocks are shared, since nobody writes to them any more;
    what a request has in common with a block beyond that is copied into one of its own.

    Whoever holds a block of the tree holds all blocks above it. So everything below a cached block
    is cached, too, and all cached blocks can be forgotten, the longest unused first and each one
    after what follows it.

    Where the keys of requests that may become long differ (LongRoPE), these have a root of their
    own.
    """

    def __init__(self, limits: HeadLimits) -> None:
        self.blocks = BlockAllocator(limits.blocks)
        self._tree = PrefixTree(limits.block_size)
        self._size = limits.block_size
        #: What those who route are told of it.
        self.span_log = SpanLog()
        self._enabled = limits.prefix_cache
        self._short = limits.short_context
        #: What was last looked for, under which version of the tree, and what was found.
        self._last: tuple[Job, int, Match] | None = None
        self.hit_tokens = 0
        self.lookup_tokens = 0
        self.evictions = 0

    @property
    def available(self) -> int:
        """Blocks that can be allocated now, what is cached included."""
        return self.blocks.free + self.blocks.settled

    @property
    def hit_rate(self) -> float:
        """Share of the tokens of new requests that the prefix cache had."""
        return self.hit_tokens / self.lookup_tokens if self.lookup_tokens else 0.0

    # --- admission -----------------------------------------------------------------------------

    def find(self, job: Job) -> Match:
        """What is cached of a waiting job's tokens, the last of which is to be computed anyway."""
        tree = self._tree
        if not self._enabled:
            return Match()
        if self._last is not None and self._last[:2] == (job, tree.version):
            return self._last[2]
        long = 0 < self._short < job.kv_end
        found = tree.match(job.tokens[:-1], OTHER_ROOT if long else ROOT)
        self._last = job, tree.version, found
        return found

    def whole(self, found: Match) -> Match:
        """Only the full blocks of what was found: no block is held just to be copied from."""
        return replace(found, source=-1, tokens=len(found.blocks) * self._size)

    def affords(self, found: Match, total: int) -> bool:
        """Whether there are ``total`` blocks, those that were found included."""
        lacking = total - len(found.blocks)
        if lacking > self.available:
            return False
        return lacking <= self.available - self.blocks.settled_among(_held_by(found))

    def take(self, found: Match, total: int) -> list[int] | None:
        """A table of ``total`` blocks that begins with what was found; ``None`` if there aren't.

        A block to be copied from is held, too, until :meth:`copied` or a release.
        """
        if not self.affords(found, total):
            return None
        self.blocks.share(_held_by(found))
        fresh = self.allocate(total - len(found.blocks))
        if fresh is None:
            raise InvariantError("blocks that there are can't be allocated")
        self._last = None
        return [*found.blocks, *fresh]

    def count(self, job: Job) -> None:
        """A job was admitted for the first time."""
        self.lookup_tokens += len(job.tokens)
        self.hit_tokens += job.reused

    def allocate(self, count: int) -> list[int] | None:
        """``count`` fresh blocks; what is cached is forgotten as far as it must be."""
        if count > self.available:
            return None
        while self.blocks.free < count:
            self._forget(next(iter(self.blocks.cached)))
            self.evictions += 1
        return self.blocks.allocate(count)

    # --- while a request runs, and after -------------------------------------------------------

    def copied(self, job: Job) -> None:
        """The rows that copied from ``job.source`` have come back."""
        self.blocks.unshare(job.source)
        job.source = -1

    def offer(self, job: Job) -> None:
        """Let others share the full blocks that an admitted job has computed.

        It ends where another job's block has the same tokens: what is below that one may be held
        only by who holds it.
        """
        job.offered = True
        if not self._enabled:
            return
        for index in range(job.depth, job.computed // self._size):
            key = tuple(job.tokens[index * self._size : (index + 1) * self._size])
            if self._tree.child(job.node, key) is not None:
                return
            job.node = self._add(job.node, key, job.blocks[index])
            job.depth = index + 1

    def release(self, tick: int, leaving: Leaving) -> None:
        """A request is over as of the release ``tick``; what it has computed remains cached.

        What a failed one has used, and what follows it, is forgotten as far as nobody holds it:
        should a stage's KV be bad, not every request that begins alike is to fail.
        """
        leaf = leaving.node
        if self._enabled and leaving.sound:
            leaf = self._insert(leaf, leaving)
        self.blocks.retire(tick, leaving.holds)
        self.blocks.touch(self._tree.path(leaf))
        if not leaving.sound:
            self._distrust(leaf)

    def coming(self, leaving: Iterable[Leaving]) -> Returning:
        """Blocks that can be used once all releases, those of ``leaving`` included, are round."""
        found = Returning(self.blocks)
        for each in leaving:
            found.add(each.holds)
        return found

    def _insert(self, node: int, leaving: Leaving) -> int:
        """Add what the tree lacks of a request's computed tokens; returns the end of their path."""
        size, tokens, end = self._size, leaving.tokens, leaving.computed
        full = end // size
        for index in range(leaving.depth, full):
            key = tuple(tokens[index * size : (index + 1) * size])
            child = self._tree.child(node, key)
            node = self._add(node, key, leaving.blocks[index]) if child is None else child
        rest = tuple(tokens[full * size : end])
        if rest and full >= leaving.depth and not self._tree.longer(node, rest):
            node = self._add(node, rest, leaving.blocks[full])
        return node

    def _add(self, parent: int, key: tuple[int, ...], block: int) -> int:
        """Keep a block; one that has only some of its tokens is no longer needed."""
        before = self._tree.shorter(parent, key)
        if before is not None and self.blocks.is_cached(before):
            self._forget(before)
        self.blocks.keep(block)
        self._tree.add(parent, key, block)
        if len(key) == self._size:
            self.span_log.added(block, parent, key)
        return block

    def _distrust(self, leaf: int) -> None:
        """Forget the cached ones of ``leaf`` and its ancestors with all that is below them."""
        cached = [block for block in self._tree.path(leaf) if self.blocks.is_cached(block)]
        for block in reversed(self._tree.below(cached[-1]) if cached else []):
            self._forget(block)

    def _forget(self, block: int) -> None:
        self._tree.remove(block)
        self.span_log.removed(block)
        self.blocks.forget(block)

    # --- reports -------------------------------------------------------------------------------

    def validate(self, jobs: Iterable[Job], leaving: Iterable[Leaving]) -> None:
        """Blocks are held by exactly the tables and copies that there are, and paths from the top.

        Raises:
            InvariantError: they aren't.
        """
        references = Counter(block for job in jobs for block in (*job.blocks, job.source))
        references.update(block for each in leaving for block in each.holds)
        del references[-1]
        self.blocks.validate(references, self._tree)
        self._tree.validate()
        later = {block: place for place, block in enumerate(self.blocks.cached)}
        for block in self._tree:
            parent = self._tree.parent(block)
            if parent in later and later.get(block, len(later)) > later[parent]:
                raise InvariantError(f"block {block} is held or outlives {parent} above it")


def _held_by(found: Match) -> tuple[int, ...]:
    return found.blocks if found.source < 0 else (*found.blocks, found.source)
